"""Greedy transducer search of streams, with or without durations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.decoding.streaming.emitted import Emitted
from effasr.decoding.transducer_greedy import next_labels
from effasr.model.transducer import Transducer


class TransducerStreams:
    """Decodes as `effasr.decoding.transducer_greedy`, with the state of the predictor kept.

    A duration may lead beyond a chunk: the next one then begins with so many frames less.
    """

    def __init__(self, head: Transducer, slots: int, max_symbols: int):
        """Prepare a number of slots; ``max_symbols`` is that of `transducer_greedy`."""
        self._head, self._max_symbols = head, max_symbols
        self._skipped = [0] * slots
        with torch.inference_mode():
            self._predicted, self._state = head.begin(slots)

    def start(self, slot: int) -> None:
        """Begin a stream in a slot."""
        self._skipped[slot] = 0
        with torch.inference_mode():
            predicted, state = self._head.begin(1)
            self._put(torch.tensor([slot], device=predicted.device), predicted, state)

    @torch.inference_mode()
    def step(self, encoded: Tensor, frames: Sequence[int]) -> list[list[Emitted]]:
        """Return the new labels of each slot; see `CTCStreams.step`."""
        slots, chunk, _ = encoded.shape
        rows = self._head.encoder_projection(encoded.flatten(0, 1))
        # Offsets of the slots; those of slots without frames are not read.
        first = torch.arange(0, slots * chunk, chunk, device=rows.device)
        counts = torch.tensor([frames, self._skipped], device=rows.device)
        at, end = first + counts[1], first + counts[0]
        emitted = torch.zeros_like(at)
        found: list[list[Emitted]] = [[] for _ in frames]
        index = (at < end).nonzero()[:, 0]
        while len(index):
            reached, symbols, lasts = next_labels(
                self._head, rows, self._predicted[index], at[index], end[index]
            )
            again = torch.where(reached == at[index], emitted[index], 0) + 1
            onward = torch.where(again < self._max_symbols, lasts, lasts.clamp(min=1))
            kept = reached < end[index]
            # Without a label the search has moved beyond the chunk.
            at[index] = reached + onward * kept
            emitted[index] = again.where(at[index] == reached, 0)
            index, symbols = index[kept], symbols[kept]
            places = (reached[kept] - first[index]).tolist()
            for slot, symbol, place in zip(index.tolist(), symbols.tolist(), places, strict=True):
                found[slot].append(Emitted(symbol, place))
            if len(index):
                state = tuple(part[index] for part in self._state)
                self._put(index, *self._head.step(symbols, state))
            index = index[at[index] < end[index]]
        beyond = (at - end).tolist()
        self._skipped = [
            max(0, left) if count else before
            for left, count, before in zip(beyond, frames, self._skipped, strict=True)
        ]
        return found

    def _put(self, index: Tensor, predicted: Tensor, state: Sequence[Tensor]) -> None:
        self._predicted[index] = predicted
        for own, new in zip(self._state, state, strict=True):
            own[index] = new
