"""Greedy CTC search: best class of each frame, repeats merged, blanks removed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.decoding.streams import Emitted
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_ROWS = 4096  # frames whose logits are computed at a time: with V = 16k, 256 MB in float32


def ctc_greedy(model: ASRModel, encoded: PackedSequence, blank_id: int) -> list[list[int]]:
    """Decode each sequence of encoder output (T, C); sequences without frames give no tokens."""
    best = [model.ctc_logits(rows).argmax(-1) for rows in encoded.values.split(_ROWS)]
    sequences = encoded.with_values(torch.cat(best).cpu()).unpack()
    return [
        [token for token, _ in _collapse(sequence.tolist(), blank_id, blank_id)]
        for sequence in sequences
    ]


def ctc_log_probs(model: ASRModel, encoded: PackedSequence) -> Tensor:
    """Return log-probabilities of every token and, last, the blank: float32 (T, V + 1)."""
    blocks = encoded.values.split(_ROWS)
    return torch.cat([model.ctc_logits(rows).float().log_softmax(-1) for rows in blocks])


class CTCStreams:
    """Decodes streams as `ctc_greedy`; a symbol is not repeated across chunks either."""

    def __init__(self, model: ASRModel, slots: int):
        self._model, self._blank = model, model.vocab_size
        self._last = [self._blank] * slots

    def start(self, slot: int) -> None:
        self._last[slot] = self._blank

    @torch.inference_mode()
    def step(self, encoded: Tensor, frames: Sequence[int]) -> list[list[Emitted]]:
        """Return new tokens of each slot of (S, c, encoder width), of which ``frames`` are real."""
        best = self._model.ctc_logits(encoded.flatten(0, 1)).argmax(-1)
        emitted = []
        for slot, row in enumerate(best.view(encoded.shape[:2]).tolist()):
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
