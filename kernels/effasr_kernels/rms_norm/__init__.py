"""Root mean square normalization of rows, in one pass."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp


@dataclass(frozen=True, slots=True)
class RMSNormArguments:
    x: Tensor
    weight: Tensor
    eps: float
    offset: int
    dtype: str
    frozen: bool = False

    @property
    def result_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def _example(inputs: ExampleInputs) -> Keywords:
    return {"x": inputs.floating(6, CHANNELS), "weight": inputs.floating(CHANNELS), "eps": 1e-6}


OPERATION = DifferentiableOp(
    "rms_norm",
    RMSNormArguments,
    outputs=lambda a: a.x.new_empty(a.x.shape, dtype=a.result_dtype),
    flops=lambda a: 0,  # no matrix products
    examples=[
        Example("rms_norm", _example, 0),
        Example("rms_norm, offset", lambda inputs: {**_example(inputs), "offset": 1}, 0),
    ],
)

_NAME = OPERATION.name


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    offset: Literal[0, 1] = 0,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Divide each row by its root mean square, and multiply channels by a weight.

    .. math:: y_{tc} = (o + w_c) \, \frac{x_{tc}}{\sqrt{\frac{1}{W} \sum_i x_{ti}^2 + \epsilon}}

    Everything is computed in float32 (float64 for float64). With the offset 0 the normalized row is
    rounded to the dtype of x before it is multiplied, as in Llama; with 1 only the result is
    rounded, as in Gemma. A backend on a GPU reads and writes each tensor once, in the forward and
    in the backward, and keeps x and one number for each row; a weight that is frozen costs nothing
    in the backward. There is no layout: each row stands alone.

    Under autocast x and the weight keep their dtypes, and the result has that of a matrix product.

    Args:
        x: (..., W), floating point. The leading dimensions may have any order in memory, which the
            result has, too.
        weight: w, (W,), of any floating dtype; float64 exactly if x is.
        eps: epsilon.
        offset: o.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        y, (..., W): with the offset 0 in the wider of the dtypes of x and w, with 1 in that of x;
        under autocast in its dtype.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Zhang & Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    if x.ndim < 2:
        raise checks.wrong(_NAME, "x", "have shape (..., W)", tuple(x.shape))
    checks.check_floating(_NAME, x=x)
    checks.check_shape(_NAME, "weight", weight, "(W,)", x.shape[-1])
    checks.check_beside(_NAME, "weight", weight, "x", x)
    if offset not in (0, 1):
        raise checks.wrong(_NAME, "offset", "be 0 or 1", offset)
    kind = x.device.type
    dtype = x.dtype if offset else torch.promote_types(x.dtype, weight.dtype)
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    name, frozen = str(dtype).removeprefix("torch."), not weight.requires_grad
    options = float(eps), int(offset), name, frozen
    if x.ndim == 2:
        return OPERATION(RMSNormArguments(x, weight, *options), backend)
    # Leading dimensions in the order of memory: the rows of transposed heads need no copy.
    order = sorted(range(x.ndim - 1), key=lambda i: -x.stride(i))
    ordered = x.permute(*order, -1)
    y = OPERATION(RMSNormArguments(ordered.flatten(0, -2), weight, *options), backend)
    back = sorted(range(x.ndim - 1), key=order.__getitem__)
    return y.view(ordered.shape).permute(*back, -1)
