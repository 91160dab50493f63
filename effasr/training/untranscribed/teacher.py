"""The average of the weights as a teacher that labels utterances without text."""

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
from effasr.training.config import TeacherConfig
from effasr_kernels import PackedLayout, PackedSequence, ctc_loss
from effasr_kernels.packed import OffsetsOnDemand

_ROWS = 4096
"""Frames whose logits exist at a time: with V = 16k, 256 MB in float32."""

UNSPLITTABLE_REASON = (
    "a micro-batch that a teacher has labelled cannot be split: lower data.frame_budget"
)


class Teacher:
    """Labels micro-batches before a step, in their static shape.

    Nothing waits for the device: the labels, their lengths and the number of targets that they add
    stay there. The teacher shares buffers and frozen weights with the model.
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
        """Label the micro-batches of the global step, counted from 0, on the model's device.

        Also return, float64 (), by how many targets they have more of what CTC counts.
        """
        added = torch.zeros((), dtype=torch.float64, device=self._device)
        labelled = []
        for batch in batches:
            if batch.label_room is not None:
                if step < self._config.after_step:
                    batch = replace(batch, label_room=None)
                else:
                    batch, targets = self._label(batch)
                    added += targets
            labelled.append(batch)
        return labelled, added

    @torch.no_grad()
    def _label(self, batch: Batch) -> tuple[Batch, Tensor]:
        model, moved = self._model, batch.to(self._device)
        room = moved.label_room
        assert room is not None
        with ranges.range("teacher"), self._autocast():
            encoded = model.encode(moved)
            rows = encoded.values.split(_ROWS)
            best = torch.cat([model.ctc_logits(part).argmax(-1) for part in rows])
            emits = emitted(best, encoded.layout, model.vocab_size)
            text, tokens = add_labels(moved.text, best, emits, encoded.layout, room)
            # The confidence in each label, float64 (N,); see `TeacherConfig`.
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
            confidence = (-loss.double() / tokens.clamp(min=1)).exp()
        fits = (tokens > 0) & (tokens <= room)
        used = fits & (confidence >= self._config.min_confidence)
        monotonic = moved.monotonic | used
        self._sums += torch.stack(
            [
                (room > 0).sum(),
                used.sum(),
                (tokens > room).sum(),
                fits.sum(),
                torch.where(fits, confidence, 0.0).sum(),
            ]
        )
        targets = torch.where(used, tokens + 1, 0).sum()
        return replace(batch, text=text, monotonic=monotonic, label_room=None), targets

    def line(self) -> dict[str, Any]:
        """Return shares of this rank's utterances without text since the last line.

        ``teacher_used``: with a label that is used. ``teacher_over_room``: with more tokens than
        were reserved. ``teacher_confidence``: mean confidence of the labels.
        """
        utterances, used, over_room, labels, confidence = self._sums.tolist()
        self._sums.zero_()
        return {
            "teacher_utterances": utterances,
            "teacher_used": used / utterances if utterances else None,
            "teacher_over_room": over_room / utterances if utterances else None,
            "teacher_confidence": confidence / labels if labels else None,
        }

    def state_dict(self) -> dict[str, Any]:
        # The weights are those of the average.
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.copy_(state["sums"])


def averaged(model: ASRModel, average: WeightAverage) -> ASRModel:
    """Return a view of a model with its averaged weights at any time; nothing is copied."""
    shared: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        values = average.average.get(name, parameter.detach())
        shared[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for buffer in model.buffers():
        shared[id(buffer)] = buffer
    return copy.deepcopy(model, shared)


def emitted(best: Tensor, layout: PackedLayout, blank_id: int) -> Tensor:
    """Return the frames at which greedy CTC decoding writes a token: bool (T,).

    ``best``, int64 (T,), is the likeliest class of each frame.
    """
    previous = torch.nn.functional.pad(best[:-1], (1, 0), value=blank_id)
    first = layout.positions() == 0
    return (best != blank_id) & (first | (best != previous)) & layout.mask()


def add_labels(
    text: PackedSequence,  # int64 (U,), transcripts; empty for the utterances to label
    best: Tensor,  # int64 (T,), the likeliest class of each frame
    emits: Tensor,  # bool (T,), at which frames it is written
    frames: PackedLayout,
    room: Tensor,  # int64 (N,), tokens that a label may have; 0 for an utterance with a transcript
) -> tuple[PackedSequence, Tensor]:
    """Write labels beside transcripts, in the same number of rows, without waiting for the device.

    Also return the tokens that each utterance to label has, int64 (N,), 0 for the others. The new
    layout is on the device alone. A label of more than ``room`` is left out.
    """
    count, rows = frames.num_sequences, text.layout.rows
    owner = frames.sequence_ids()
    before = torch.nn.functional.pad(emits.long().cumsum(0), (1, 0))
    offsets = frames.cu_seqlens.long()
    tokens = before[offsets[1:]] - before[offsets[:-1]]
    tokens = torch.where(room > 0, tokens, 0)
    fits = (tokens <= room) & (tokens > 0)
    lengths = text.layout.cu_seqlens.long().diff() + torch.where(fits, tokens, 0)
    begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = text.values.new_zeros(rows + 1)
    # Rows that are not written go to a spare row past the last.
    source = text.layout.sequence_ids()
    target = torch.where(source < count, begins[source] + text.layout.positions(), rows)
    values.scatter_(0, target, text.values)
    padded_fits = torch.nn.functional.pad(fits, (0, 1))
    position = begins[owner] + before[:-1] - before[offsets[owner]]
    target = torch.where(emits & padded_fits[owner], position, rows)
    values.scatter_(0, target, best)
    cu_seqlens = begins.int()
    bound = text.layout.static_max_seqlen
    layout = PackedLayout(cu_seqlens, OffsetsOnDemand(cu_seqlens), rows, bound)
    return PackedSequence(values[:-1], layout), tokens
