"""The definition of `transducer_loss`: arguments, backends, shapes, work and examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class TransducerArguments:
    """The arguments of a call, checked; see `effasr_kernels.transducer_loss.transducer_loss`.

    ``overwritten`` names the tensors over which the backward writes their gradients.
    """

    encoded: Tensor
    predicted: Tensor
    targets: Tensor
    layout_frames: PackedLayout
    layout_targets: PackedLayout
    weight: Tensor
    bias: Tensor
    blank_id: int
    activation: str
    fastemit: float
    durations: tuple[int, ...] | None = None
    sigma: float = 0.0
    overwritten: tuple[str, ...] = ()
    max_nodes: int | None = None


def _outputs(a: TransducerArguments) -> Tensor:
    return a.encoded.new_empty(a.layout_frames.num_sequences, dtype=wide_dtype(a.encoded))


def _flops(a: TransducerArguments) -> int:
    return 2 * pairs(a.layout_frames, a.layout_targets.lengthened(1)) * a.weight.numel()


def _example(inputs: ExampleInputs, rows: int = CLASSES, **options: Any) -> Keywords:
    frames, tokens = inputs.frames(), inputs.tokens()
    return {
        "encoded": inputs.floating(frames.rows, CHANNELS),
        "predicted": inputs.floating(tokens.rows + tokens.num_sequences, CHANNELS),
        "targets": inputs.targets(),
        "layout_frames": frames,
        "layout_targets": tokens,
        "weight": inputs.floating(rows, CHANNELS),
        "bias": inputs.floating(rows),
        "blank_id": 0,
        **options,
    }


_NODES = 24 * 6 + 16 * 4

OPERATION = DifferentiableOp(
    "transducer_loss",
    TransducerArguments,
    {
        Backend.TRITON: "effasr_kernels.transducer_loss.triton.backend",
        Backend.CPP: "effasr_kernels.transducer_loss._cpp",
        Backend.REFERENCE: "effasr_kernels.transducer_loss.reference",
    },
    outputs=_outputs,
    flops=_flops,
    overwritable=("encoded", "predicted"),
    examples=[
        Example("transducer_loss", _example, 2 * _NODES * CLASSES * CHANNELS),
        Example(
            "transducer_loss, durations",
            lambda inputs: _example(inputs, CLASSES + 2, durations=(0, 1), sigma=0.05),
            2 * _NODES * (CLASSES + 2) * CHANNELS,
        ),
    ],
)
