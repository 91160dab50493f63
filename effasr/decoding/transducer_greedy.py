"""Greedy search of a transducer, with or without durations, in recordings and streams."""

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.streams import Emitted
from effasr.model.transducer import Transducer
from effasr_kernels import PackedSequence


@torch.no_grad()
def transducer_greedy(
    head: Transducer, encoded: PackedSequence, max_symbols: int, boost: BoostTree | None = None
) -> list[list[int]]:
    """Decode sequences of encoder output, independently of each other; see `GreedyTransducer`."""
    emitted = emitted_labels(head, encoded, max_symbols, boost)
    return [[token for token, _ in tokens] for tokens in emitted]


@torch.no_grad()
def emitted_labels(
    head: Transducer, encoded: PackedSequence, max_symbols: int, boost: BoostTree | None = None
) -> list[list[Emitted]]:
    """Return the labels of `transducer_greedy` with their frames."""
    rows = head.encoder_projection(encoded.values)
    bounds = encoded.layout.cu_seqlens.long()
    search = GreedyTransducer(head, encoded.layout.num_sequences, max_symbols, boost)
    return search.advance(rows, bounds[:-1], bounds[1:])[: len(encoded.layout.lengths)]


class GreedyTransducer:
    """The state of a number of searches, which read their frames in any number of parts.

    After a blank the search moves to the next frame, otherwise the label joins the transcript. With
    durations, the likeliest one is the number of frames to move, at least one after a blank. The
    inner loop takes every transcript to its next label over any number of blanks, so that the
    predictor runs once for each label of the longest transcript. After ``max_symbols`` labels in a
    frame the search moves on by at least one.

    Bataev et al., 2024, https://arxiv.org/abs/2406.06220 (label-looping). With durations, the
    transcripts are those of NeMo's batched search, and of transformers'
    ``ParakeetForTDT.generate``, which does not limit the labels of a frame.
    """

    def __init__(
        self, head: Transducer, searches: int, max_symbols: int, boost: BoostTree | None = None
    ):
        self._head, self._max_symbols, self._boost = head, max_symbols, boost
        self._predicted, self._state = head.begin(searches)
        # Of the phrases that bonuses are for.
        self._phrases = torch.zeros(searches, dtype=torch.int64, device=self._predicted.device)
        self._skipped: Tensor | None = None  # frames of the next part that a duration leads past

    def start(self, search: int) -> None:
        predicted, state = self._head.begin(1)
        self._put(torch.tensor([search], device=predicted.device), predicted, state)
        self._phrases[search] = 0
        if self._skipped is not None:
            self._skipped[search] = 0

    def advance(self, rows: Tensor, begins: Tensor, ends: Tensor) -> list[list[Emitted]]:
        """Read the next frames of each search, rows ``begins`` to ``ends`` of (T, J), projected."""
        if self._skipped is None:
            self._skipped = torch.zeros_like(begins)
        at = begins + self._skipped
        # Labels of the current frame so far.
        count = torch.zeros_like(at)
        emitted: list[list[Emitted]] = [[] for _ in range(len(begins))]
        index = (at < ends).nonzero()[:, 0]
        predicted, state = self._predicted[index], tuple(part[index] for part in self._state)
        while len(index):
            before = at[index]
            reached, symbols, durations = next_labels(
                self._head, rows, predicted, before, ends[index], self._boost, self._phrases[index]
            )
            again = torch.where(reached == before, count[index], 0) + 1
            onward = torch.where(again < self._max_symbols, durations, durations.clamp(min=1))
            is_label = reached < ends[index]
            # Without a label the search has moved beyond the part.
            now = reached + onward * is_label
            at[index], count[index] = now, again.where(now == reached, 0)
            labelled = is_label.nonzero()[:, 0]
            index, symbols = index[labelled], symbols[labelled]
            frames = (reached[labelled] - begins[index]).tolist()
            for search, token, frame in zip(index.tolist(), symbols.tolist(), frames, strict=True):
                emitted[search].append(Emitted(token, frame))
            if not len(index):
                break
            if self._boost is not None:
                self._phrases[index] = self._boost.advanced(self._phrases[index], symbols)
            predicted, state = self._head.step(symbols, tuple(part[labelled] for part in state))
            self._put(index, predicted, state)
            going = (now[labelled] < ends[index]).nonzero()[:, 0]
            index, predicted = index[going], predicted[going]
            state = tuple(part[going] for part in state)
        self._skipped = torch.where(ends > begins, (at - ends).clamp(min=0), self._skipped)
        return emitted

    def _put(self, index: Tensor, predicted: Tensor, state: Sequence[Tensor]) -> None:
        self._predicted[index] = predicted
        for part, new in zip(self._state, state, strict=True):
            part[index] = new


class TransducerStreams:
    """Decodes streams; a duration that leads beyond a chunk skips frames of the next one."""

    def __init__(
        self, head: Transducer, slots: int, max_symbols: int, boost: BoostTree | None = None
    ):
        self._head = head
        with torch.inference_mode():
            self._search = GreedyTransducer(head, slots, max_symbols, boost)

    @torch.inference_mode()
    def start(self, slot: int) -> None:
        self._search.start(slot)

    @torch.inference_mode()
    def step(self, encoded: Tensor, frames: Sequence[int]) -> list[list[Emitted]]:
        """Return the new labels of each slot; see `effasr.decoding.ctc_greedy.CTCStreams.step`."""
        slots, chunk, _ = encoded.shape
        rows = self._head.encoder_projection(encoded.flatten(0, 1))
        begins = torch.arange(0, slots * chunk, chunk, device=rows.device)
        return self._search.advance(rows, begins, begins + torch.tensor(frames, device=rows.device))


def next_labels(
    head: Transducer,
    frames: Tensor,  # (T, J), projected
    predicted: Tensor,  # (N, J), after the labels so far
    at: Tensor,  # int64 (N,), the current row of ``frames`` of each
    end: Tensor,  # int64 (N,), the row after the last of each
    boost: BoostTree | None = None,
    phrases: Tensor | None = None,  # int64 (N,), states of ``boost``
) -> tuple[Tensor, Tensor, Tensor]:
    """Move over blanks; return row (from ``end`` on: none), label and duration, int64 (N,)."""
    at, symbols, lasts = at.clone(), torch.full_like(at, head.blank_id), torch.zeros_like(at)
    durations = head.config.durations
    frames_of = None if durations is None else torch.tensor(durations, device=at.device)
    seeking = (at < end).nonzero()[:, 0]
    while len(seeking):
        logits = head.logits(frames[at[seeking]], predicted[seeking])
        of_symbols = logits[:, : head.blank_id + 1]
        if boost is None or phrases is None:
            best = of_symbols.argmax(-1)
        else:
            best = boost.likeliest(of_symbols, phrases[seeking])
        symbols[seeking] = best
        is_blank = best == head.blank_id
        if frames_of is not None:
            lasts[seeking] = frames_of[logits[:, head.blank_id + 1 :].argmax(-1)]
        at[seeking] += lasts[seeking].clamp(min=1) * is_blank
        seeking = seeking[is_blank & (at[seeking] < end[seeking])]
    return at, symbols, lasts
