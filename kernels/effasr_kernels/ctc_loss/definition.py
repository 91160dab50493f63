"""Definition of `ctc_loss`: arguments, backends, output shapes, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class CtcArguments:
    """Validated arguments of a call; see `effasr_kernels.ctc_loss.ctc_loss`."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    layout_frames: PackedLayout
    layout_targets: PackedLayout
    bias: Tensor | None
    blank_id: int


def _outputs(a: CtcArguments) -> Tensor:
    return a.hidden.new_empty(a.layout_frames.num_sequences, dtype=wide_dtype(a.hidden))


def _example(inputs: ExampleInputs) -> Keywords:
    frames = inputs.frames()
    return {
        "hidden": inputs.floating(frames.rows, CHANNELS),
        "weight": inputs.floating(CLASSES, CHANNELS),
        "targets": inputs.targets(),
        "layout_frames": frames,
        "layout_targets": inputs.tokens(),
        "bias": inputs.floating(CLASSES),
        "blank_id": 0,
    }


OPERATION = DifferentiableOp(
    "ctc_loss",
    CtcArguments,
    {
        Backend.TRITON: "effasr_kernels.ctc_loss._triton",
        Backend.CPP: "effasr_kernels.ctc_loss._cpp",
        Backend.REFERENCE: "effasr_kernels.ctc_loss.reference",
    },
    outputs=_outputs,
    flops=lambda a: 2 * sum(known_lengths(a.layout_frames)) * a.weight.numel(),
    examples=[Example("ctc_loss", _example, 2 * 40 * CLASSES * CHANNELS)],
)
