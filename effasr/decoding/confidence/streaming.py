"""Confidence of the tokens of a stream, whose segments become final one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.decoding.confidence.tokens import token_confidences, transducer_confidences
from effasr.model.asr import ASRModel
from effasr_kernels import PackedLayout, PackedSequence


class StreamConfidences:
    """Aligns each segment with its encoder frames, as `token_confidences` does with a whole one.

    A transducer's predictor continues from the segments before.

    Attributes:
        first: The first frame that it holds.
    """

    def __init__(self, model: ASRModel, method: str):
        """Begin with no frames; ``method`` is ctc or transducer."""
        self._model, self._method = model, method
        self._rows: list[Tensor] = []
        self.first = 0
        with torch.inference_mode():
            self._predictor = None if model.transducer is None else model.transducer.begin(1)

    def add(self, encoded: Tensor) -> None:
        """Add the next frames, (frames, encoder width)."""
        # A view would keep the frames of all streams alive.
        self._rows.append(encoded.clone())

    def forget(self, before: int) -> None:
        """Forget the frames before one."""
        if before > self.first:
            rest = torch.cat(self._rows)[before - self.first :]
            self._rows, self.first = [rest.clone()], before

    @torch.inference_mode()
    def of_segment(self, tokens: Sequence[int], end: int) -> tuple[float, ...] | None:
        """Return the confidences of the tokens of a segment that ends before a frame.

        The next segment follows it.

        Returns:
            A value from 0 to 1 for each; None if no path of the model spells them.
        """
        rows = torch.cat(self._rows)[: max(0, end - self.first)]
        if self._method == "ctc":
            packed = PackedSequence(rows, PackedLayout.from_lengths([len(rows)], rows.device))
            return token_confidences(self._model, "ctc", packed, [()], [tokens])[0]
        assert self._model.transducer is not None
        predicted = self._predicted(tokens)
        return transducer_confidences(self._model.transducer, rows, tokens, predicted)

    def _predicted(self, tokens: Sequence[int]) -> Tensor:
        """Let the predictor read tokens; returns its share before the first and after each."""
        head = self._model.transducer
        assert head is not None
        assert self._predictor is not None
        predicted, state = self._predictor
        every = [predicted]
        for token in tokens:
            label = torch.tensor([token], device=predicted.device)
            predicted, state = head.step(label, state)
            every.append(predicted)
        self._predictor = predicted, state
        return torch.cat(every)
