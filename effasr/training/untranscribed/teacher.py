"""The average of the weights as a teacher that labels utterances without text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from effasr import ranges
from effasr.data.batch import Batch
from effasr.model.asr import ASRModel
from effasr.optim.ema import WeightAverage
from effasr.training.untranscribed.config import TeacherConfig
from effasr.training.untranscribed.labels import add_labels, emitted
from effasr_kernels import PackedSequence, ctc_loss

_ROWS = 4096
"""Frames whose logits exist at a time: with V = 16k, 256 MB in float32."""

UNSPLITTABLE_REASON = (
    "a micro-batch that a teacher has labelled cannot be split: lower data.frame_budget"
)
"""Why a labelled micro-batch cannot be computed in pieces."""


class Teacher:
    """Labels micro-batches before a step, in their static shape.

    Nothing waits for the device: the labels, their lengths and the number of targets that they add
    stay there.

    Args:
        model: Model that is trained, which shares its buffers and its frozen weights.
        average: Average of the others.
        config: When to label, and which labels to use.
        autocast: Returns the context in which the forward runs.
    """

    def __init__(
        self,
        model: ASRModel,
        average: WeightAverage,
        config: TeacherConfig,
        autocast: Callable[[], AbstractContextManager],
    ) -> None:
        self._config, self._autocast = config, autocast
        self._model = averaged(model, average).eval()
        self._device = next(model.parameters()).device
        self._sums = torch.zeros(5, dtype=torch.float64, device=self._device)

    def label(self, batches: Sequence[Batch], step: int) -> tuple[list[Batch], Tensor]:
        """Label the micro-batches of a step.

        Args:
            batches: Micro-batches, on any device.
            step: Number of the global step, from 0.

        Returns:
            The micro-batches, with labels on the device of the model; and float64 (), by how many
            targets they have more of what CTC counts.
        """
        added = torch.zeros((), dtype=torch.float64, device=self._device)
        labelled = []
        for batch in batches:
            if batch.label_room is None:
                labelled.append(batch)
            elif step < self._config.after_step:
                labelled.append(replace(batch, label_room=None))
            else:
                found, targets = self._label(batch)
                labelled.append(found)
                added += targets
        return labelled, added

    @torch.no_grad()
    def _label(self, batch: Batch) -> tuple[Batch, Tensor]:
        model, moved = self._model, batch.to(self._device)
        room = moved.label_room
        assert room is not None
        with ranges.range("teacher"), self._autocast():
            encoded = model.encode(moved)
            rows = encoded.values.split(_ROWS)
            best = torch.cat([model.ctc_logits(some).argmax(-1) for some in rows])
            says = emitted(best, encoded.layout, model.vocab_size)
            text, tokens = add_labels(moved.text, best, says, encoded.layout, room)
            confidence = self._confidence(encoded, text, tokens)
        fits = (tokens > 0) & (tokens <= room)
        used = fits & (confidence >= self._config.min_confidence)
        monotonic = moved.monotonic | used
        asked = room > 0
        self._sums += torch.stack(
            [
                asked.sum(),
                used.sum(),
                (tokens > room).sum(),
                fits.sum(),
                torch.where(fits, confidence, 0.0).sum(),
            ]
        )
        targets = torch.where(used, tokens + 1, 0).sum()
        return replace(batch, text=text, monotonic=monotonic, label_room=None), targets

    def _confidence(self, encoded: PackedSequence, text: PackedSequence, tokens: Tensor) -> Tensor:
        """Return the confidence in each label, float64 (N,); see `TeacherConfig`."""
        head = self._model.ctc_head
        assert head is not None
        loss = ctc_loss(
            encoded.values,
            head.weight,
            text.values,
            encoded.layout,
            text.layout,
            bias=head.bias,
            blank_id=self._model.vocab_size,
        )
        return (-loss.double() / tokens.clamp(min=1)).exp()

    def line(self) -> dict[str, Any]:
        """Return what became of the utterances without text of this rank since the last line.

        ``teacher_used``: share whose label is used. ``teacher_over_room``: share whose label had
        more tokens than were reserved. ``teacher_confidence``: mean confidence of the labels.
        """
        asked, used, over, labels, confidence = self._sums.tolist()
        self._sums.zero_()
        return {
            "teacher_utterances": asked,
            "teacher_used": used / asked if asked else None,
            "teacher_over_room": over / asked if asked else None,
            "teacher_confidence": confidence / labels if labels else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the next line; the weights are those of the average."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._sums.copy_(state["sums"])


def averaged(model: ASRModel, average: WeightAverage) -> ASRModel:
    """Return a copy of a model around its averaged weights, its frozen ones and its buffers.

    Nothing is copied: the weights of the copy are those of the average at any time.
    """
    shared: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        values = average.average.get(name, parameter.detach())
        shared[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for buffer in model.buffers():
        shared[id(buffer)] = buffer
    return copy.deepcopy(model, shared)
