"""What the beam searches of streams by transducers with and without durations share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effasr.decoding.streaming.beam import BeamStreams
from effasr.decoding.streaming.unread_frames import UnreadFrames
from effasr.decoding.transducer_hypotheses import Hypotheses
from effasr.model.transducer import Transducer


class BaseTransducerBeamStreams(BeamStreams):
    """Base of the searches by a transducer: its frames that are not yet read."""

    def __init__(
        self,
        head: Transducer,
        slots: int,
        beam: int,
        nbest: int,
        limit: Callable[[int], int],
    ):
        """Prepare a number of slots, each for a stream at a time.

        Args:
            head: Transducer of the model.
            slots: S.
            beam: K, hypotheses of each stream.
            nbest: Complete hypotheses of a finished stream that are wanted, from 1 to ``beam``.
            limit: Most labels of an open transcript of so many frames. One that reaches it before
                later frames have come may be another one than that of the whole utterance.
        """
        super().__init__(slots, beam, nbest)
        self._head, self._frames = head, UnreadFrames(head, slots, limit)
        self._device = next(head.parameters()).device
        with torch.inference_mode():
            self._prepare(slots)

    @abstractmethod
    def _prepare(self, slots: int) -> None:
        """Make the state of a number of streams that have no frames."""

    def _first(self, count: int) -> Hypotheses:
        """Return the hypotheses at the first frames of streams."""
        return Hypotheses.begin(self._head, count, self.beam, with_frames=True)

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, device=self._device)
