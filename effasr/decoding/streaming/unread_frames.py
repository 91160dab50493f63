"""Frames of streams that not all hypotheses of a transducer's search have read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effasr.decoding.transducer_hypotheses import Utterances
from effasr.model.transducer import Transducer


class UnreadFrames:
    """The last frames of each slot, projected for the joint network.

    Args:
        head: Transducer of the model.
        slots: Number of streams at a time.
        limit: Most labels of an open transcript of so many frames.
    """

    def __init__(self, head: Transducer, slots: int, limit: Callable[[int], int]):
        self._head, self._limit = head, limit
        weight = head.output.weight
        self._device = weight.device
        self._none = weight.new_empty(0, head.config.joint)
        self._rows = [self._none] * slots
        self._first = [0] * slots
        self._since = [0] * slots

    def start(self, slot: int) -> None:
        """Begin a stream in a slot."""
        self._rows[slot] = self._none
        self._first[slot] = self._since[slot] = 0

    def add(self, encoded: Tensor, frames: Sequence[int]) -> None:
        """Add the first ``frames`` of encoder output (S, c, encoder width) to each slot."""
        projected = self._head.encoder_projection(encoded)
        for slot, count in enumerate(frames):
            if count:
                self._rows[slot] = torch.cat([self._rows[slot], projected[slot, :count]])

    def end(self, slot: int) -> int:
        """Return the number of frames of a stream so far, read or not."""
        return self._first[slot] + len(self._rows[slot])

    def forget(self, slot: int, before: int) -> None:
        """Forget the frames before one, which all hypotheses have read."""
        # A view would keep all of them alive.
        self._rows[slot] = self._rows[slot][before - self._first[slot] :].clone()
        self._first[slot] = before

    def commit(self, slot: int, since: int) -> None:
        """Count the frames of the open transcript from one on."""
        self._since[slot] = since

    def utterances(self, slots: Sequence[int]) -> tuple[Tensor, Utterances]:
        """Return the frames of slots, (T, J), and where each is among them.

        The utterances begin with the first frame of their streams, so that frames are numbered as
        in these, although the row of a frame that is forgotten does not exist.
        """
        begins, ends, row = [], [], 0
        for slot in slots:
            begins.append(row - self._first[slot])
            row += len(self._rows[slot])
            ends.append(row)
        limits = [self._limit(self.end(slot) - self._since[slot]) for slot in slots]
        numbers = torch.tensor([list(range(len(slots))), begins, ends, limits])
        return torch.cat([self._rows[slot] for slot in slots]), Utterances(
            *numbers.to(self._device)
        )
