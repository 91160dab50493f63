"""Greedy CTC search: best class of each frame, repeats merged, blanks removed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.streams import Emitted
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_ROWS = 4096  # frames whose logits are computed at a time: with V = 16k, 256 MB in float32


def ctc_greedy(
    model: ASRModel, encoded: PackedSequence, blank_id: int, boost: BoostTree | None = None
) -> list[list[int]]:
    """Decode each sequence of encoder output (T, C); sequences without frames give no tokens."""
    blocks, lengths = encoded.values.split(_ROWS), encoded.layout.lengths
    if boost is None:
        best = [model.ctc_logits(rows).argmax(-1) for rows in blocks]
        sequences = [part.tolist() for part in encoded.with_values(torch.cat(best).cpu()).unpack()]
    else:
        logits = torch.cat([model.ctc_logits(rows) for rows in blocks])
        search = _BoostedSearch(boost, len(lengths), logits.device)
        sequences = search.read(logits, encoded.layout.cu_seqlens[:-1].long(), lengths)
    return [[token for token, _ in _collapse(row, blank_id, blank_id)] for row in sequences]


class _BoostedSearch:
    """Searches that read their frames one after the other, because bonuses depend on the tokens."""

    def __init__(self, boost: BoostTree, searches: int, device: torch.device) -> None:
        self._boost = boost
        self._states = torch.zeros(searches, dtype=torch.int64, device=device)
        self._last = torch.full_like(self._states, boost.vocab_size)

    def start(self, search: int) -> None:
        self._states[search] = 0
        self._last[search] = self._boost.vocab_size

    def read(self, logits: Tensor, begins: Tensor, frames: Sequence[int]) -> list[list[int]]:
        """Return the symbol of each frame; those of a search begin at a row of (T, V + 1)."""
        most, chosen = max(frames, default=0), [self._last]
        counts = torch.tensor(frames, device=begins.device)
        for frame in range(most):
            # Rows past the end are read, but their results are not used.
            rows = logits[(begins + frame).clamp(max=len(logits) - 1)]
            symbols = self._boost.likeliest(rows, self._states, self._last)
            is_new = (symbols != self._last) & (frame < counts)
            advanced = self._boost.advanced(self._states, symbols)
            self._states = torch.where(is_new, advanced, self._states)
            self._last = torch.where(frame < counts, symbols, self._last)
            chosen.append(symbols)
        columns = torch.stack(chosen[1:], 1).tolist() if most else [[]] * len(frames)
        return [row[:count] for row, count in zip(columns, frames, strict=True)]


def ctc_log_probs(model: ASRModel, encoded: PackedSequence) -> Tensor:
    """Return log-probabilities of every token and, last, the blank: float32 (T, V + 1)."""
    blocks = encoded.values.split(_ROWS)
    return torch.cat([model.ctc_logits(rows).float().log_softmax(-1) for rows in blocks])


class CTCStreams:
    """Decodes streams as `ctc_greedy`; a symbol is not repeated across chunks either."""

    def __init__(self, model: ASRModel, slots: int, boost: BoostTree | None = None):
        self._model, self._blank = model, model.vocab_size
        self._last = [self._blank] * slots
        self._boosted = None
        if boost is not None:
            self._boosted = _BoostedSearch(boost, slots, next(model.parameters()).device)

    def start(self, slot: int) -> None:
        self._last[slot] = self._blank
        if self._boosted is not None:
            self._boosted.start(slot)

    @torch.inference_mode()
    def step(self, encoded: Tensor, frames: Sequence[int]) -> list[list[Emitted]]:
        """Return new tokens of each slot of (S, c, encoder width), of which ``frames`` are real."""
        logits, (slots, chunk) = self._model.ctc_logits(encoded.flatten(0, 1)), encoded.shape[:2]
        if self._boosted is None:
            best = logits.argmax(-1).view(slots, chunk).tolist()
        else:
            begins = torch.arange(0, slots * chunk, chunk, device=logits.device)
            best = self._boosted.read(logits, begins, frames)
        emitted = []
        for slot, row in enumerate(best):
            symbols = row[: frames[slot]]
            emitted.append(_collapse(symbols, self._blank, self._last[slot]))
            self._last[slot] = symbols[-1] if symbols else self._last[slot]
        return emitted


def _collapse(symbols: Sequence[int], blank: int, last: int) -> list[Emitted]:
    """Merge repetitions, also of the symbol before, and remove blanks."""
    emitted = []
    for frame, symbol in enumerate(symbols):
        if symbol not in (last, blank):
            emitted.append(Emitted(symbol, frame))
        last = symbol
    return emitted
