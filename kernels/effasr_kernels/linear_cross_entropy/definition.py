"""Definition of `linear_cross_entropy`: arguments, backends, output shapes, FLOPs and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class CrossEntropyArguments:
    """Validated arguments of a call.

    See `effasr_kernels.linear_cross_entropy.linear_cross_entropy`.

    Attributes:
        frozen: Whether neither ``weight`` nor ``bias`` has a gradient, so that none is computed.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    label_smoothing: float
    ignore_index: int
    z_loss: float
    uniform_gradient: bool = False
    frozen: bool = False


def _flops(a: CrossEntropyArguments) -> int:
    fake = is_fake(a.targets)
    rows = a.targets.shape[0] if fake else int((a.targets != a.ignore_index).sum())
    return 2 * rows * a.weight.numel()


def _example(inputs: ExampleInputs) -> Keywords:
    targets = inputs.targets()
    return {
        "hidden": inputs.floating(targets.shape[0], CHANNELS),
        "weight": inputs.floating(CLASSES, CHANNELS),
        "targets": targets,
        "bias": inputs.floating(CLASSES),
        "label_smoothing": 0.1,
    }


OPERATION = DifferentiableOp(
    "linear_cross_entropy",
    CrossEntropyArguments,
    {
        Backend.TRITON: "effasr_kernels.linear_cross_entropy._triton",
        Backend.REFERENCE: "effasr_kernels.linear_cross_entropy.reference",
    },
    outputs=lambda a: a.hidden.new_empty(a.hidden.shape[0], dtype=wide_dtype(a.hidden)),
    flops=_flops,
    examples=[Example("linear_cross_entropy", _example, 2 * 8 * CLASSES * CHANNELS)],
)
