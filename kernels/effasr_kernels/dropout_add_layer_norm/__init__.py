"""Dropout of a branch, its addition to the residual stream, and the LayerNorm of the sum."""

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.dropout import realised_rate, seed_for


@dataclass(frozen=True, slots=True)
class NormArguments:
    residual: Tensor
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    seed: Tensor | None
    layout: PackedLayout
    scale: float
    dropout: float
    eps: float
    prenorm: bool
    offset: int
    has_branch: bool
    dtype: str
    x_bias: Tensor | None = None

    @property
    def narrow_dtype(self) -> torch.dtype:
        """The dtype of ``x`` and of what a pre-norm returns."""
        return getattr(torch, self.dtype)

    @property
    def normed_dtype(self) -> torch.dtype:
        return self.narrow_dtype if self.prenorm else self.residual.dtype


def _outputs(a: NormArguments) -> tuple[Tensor, Tensor]:
    none = a.residual.new_empty(0)
    normed = none
    if a.weight is not None:
        normed = a.residual.new_empty(a.residual.shape, dtype=a.normed_dtype)
    return normed, a.residual.new_empty(a.residual.shape) if a.prenorm else none


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(layout.rows, CHANNELS),
        "residual": inputs.floating(layout.rows, CHANNELS),
        "weight": inputs.floating(CHANNELS),
        "bias": inputs.floating(CHANNELS),
        "layout": layout,
        "scale": 0.5,
    }


def _example_post_norm(inputs: ExampleInputs) -> Keywords:
    return {**_example(inputs), "x_bias": inputs.floating(CHANNELS), "prenorm": False}


OPERATION = DifferentiableOp(
    "dropout_add_layer_norm",
    NormArguments,
    outputs=_outputs,
    flops=lambda a: 0,  # no matrix products
    results=2,
    # The sum is a result and holds what the backward needs, unless the norm replaces it.
    unread=lambda a: ("x", "residual", "bias") if a.prenorm else ("bias",),
    examples=[
        Example("dropout_add_layer_norm", _example, 0),
        Example("dropout_add_layer_norm, post-norm", _example_post_norm, 0),
    ],
)

_NAME = OPERATION.name


@overload
def dropout_add_layer_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: PackedLayout,
    *,
    x_bias: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    eps: float = 1e-5,
    prenorm: Literal[True] = True,
    seed: int | Tensor | None = None,
    offset: int = 0,
    backend: Backend | str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def dropout_add_layer_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: PackedLayout,
    *,
    x_bias: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    eps: float = 1e-5,
    prenorm: Literal[False],
    seed: int | Tensor | None = None,
    offset: int = 0,
    backend: Backend | str | None = None,
) -> Tensor: ...


@overload
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: None,
    bias: None,
    layout: PackedLayout,
    *,
    x_bias: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    eps: float = 1e-5,
    prenorm: Literal[True] = True,
    seed: int | Tensor | None = None,
    offset: int = 0,
    backend: Backend | str | None = None,
) -> Tensor: ...


def dropout_add_layer_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layout: PackedLayout,
    *,
    x_bias: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    eps: float = 1e-5,
    prenorm: bool = True,
    seed: int | Tensor | None = None,
    offset: int = 0,
    backend: Backend | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Add a branch to the residual stream, after dropout, and normalize the sum.

    .. math::
        s = r + \alpha \, \mathrm{dropout}(x + b_x), \qquad
        y_{tc} = w_c \, \frac{s_{tc} - \mu_t}{\sqrt{\sigma_t^2 + \epsilon}} + b_c

    with mean and biased variance of each row, as in `torch.nn.LayerNorm`. The sum is rounded to the
    dtype of the residual stream r before it is normalized. Everything else is computed in float32
    (float64 for float64). A backend on a GPU reads and writes each tensor once, in the forward and
    in the backward, and does not store which elements were dropped.

    Under autocast x is cast as for a matrix product, and the normalized rows of a pre-norm have its
    dtype; the residual stream and the parameters keep theirs.

    Args:
        x: Output of the branch, (T, C), floating point; None only normalizes r.
        residual: r, (T, C), of any floating dtype; float64 exactly if the others are.
        weight: w, (C,); None only adds.
        bias: b, (C,), the dtype of ``weight``; None exactly if ``weight`` is.
        layout: Layout of the rows.
        x_bias: b_x, (C,), of any floating dtype; float64 exactly if the others are. The bias of the
            linear layer that made x, whose gradient then needs no pass of its own; None for zero.
        scale: alpha.
        dropout: Probability to drop an element of x, in [0, 1); the others are divided by
            ``1 - dropout``. It is rounded to a multiple of 1/256.
        eps: epsilon.
        prenorm: Whether the stream goes on beside the norm. If not, the norm replaces it: the
            result has the dtype of r, and s is not returned.
        seed: Seed of the dropout; drawn from the device's global generator by default.
        offset: Distinguishes calls with the same seed, which drop other elements; in [0, 2^31).
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y and s if ``prenorm``, each (T, C): y in the dtype of x (without x, of r or of autocast), s
        in that of r; without x, s is r. Only y, in the dtype of r, if not ``prenorm``. Only s
        without ``weight``. All are zero in the tail, except r where it is returned as it is.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Ba et al., 2016, https://arxiv.org/abs/1607.06450; the interface is that of flash-attn's
        ``dropout_add_layer_norm``.
    """
    kind = residual.device.type
    narrow = residual.dtype if x is None else x.dtype
    if torch.is_autocast_enabled(kind) and narrow != torch.float64:
        narrow = torch.get_autocast_dtype(kind)
        x = None if x is None else x.to(narrow)
    checks.check_shape(_NAME, "residual", residual, "(T, C)", None, None)
    checks.check_rows(_NAME, "residual", residual, "layout", layout)
    checks.check_floating(_NAME, residual=residual)
    if x is not None:
        checks.check_shape(_NAME, "x", x, "(T, C)", *residual.shape)
        checks.check_beside(_NAME, "x", x, "residual", residual)
    if weight is not None:
        checks.check_shape(_NAME, "weight", weight, "(C,)", residual.shape[1])
        checks.check_beside(_NAME, "weight", weight, "residual", residual)
    elif x is None:
        raise checks.wrong(_NAME, "x", "be given where `weight` is not", x)
    elif not prenorm:
        raise checks.wrong(_NAME, "weight", "be given where `prenorm` is false", weight)
    if (weight is None) != (bias is None):
        raise checks.wrong(_NAME, "bias", "be given exactly where `weight` is", bias)
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, "(C,)", residual.shape[1])
        checks.check_floating(_NAME, weight=weight, bias=bias)
    if x_bias is not None:
        if x is None:
            raise checks.wrong(_NAME, "x_bias", "be None where `x` is", "given")
        checks.check_shape(_NAME, "x_bias", x_bias, "(C,)", residual.shape[1])
        checks.check_beside(_NAME, "x_bias", x_bias, "residual", residual)
    if not 0 <= dropout < 1:
        raise checks.wrong(_NAME, "dropout", "be in [0, 1)", dropout)
    if not 0 <= offset < 2**31:
        raise checks.wrong(_NAME, "offset", "be in [0, 2^31)", offset)
    dropout = 0.0 if x is None else realised_rate(dropout)
    arguments = NormArguments(
        *(residual, x, weight, bias, seed_for(dropout, seed, residual.device), layout),
        *(scale, dropout, eps, prenorm, offset, x is not None, str(narrow)[6:], x_bias),
    )
    normed, summed = OPERATION(arguments, backend)
    if weight is None:
        return summed
    return (normed, summed) if prenorm else normed
