"""What the implementations that others wrote have in common: refusals, and guards around them.

All of them read packed sequences by their offsets, as `attention` does, and keep less of its
promises. Rows that belong to no sequence come back uninitialised, as do their gradients
(https://github.com/pytorch/pytorch/issues/176793, flash-attention issue 2324): here they become
zeros. With ``causal`` the last query sees the last key, where ours begins at the first key: the two
agree for self-attention alone. Their dropout draws from torch's generator, not from a seed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr_kernels.packed import PackedLayout
from effasr_kernels.shared.ragged import zeroed

if TYPE_CHECKING:
    from effasr_kernels.attention.definition import AttentionArguments

_OLDEST = (8, 0)
_WIDEST = 256
_VECTOR = 8


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU that is there; None for anything else."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def refusal(a: AttentionArguments) -> str | None:
    """Why none of these implementations can serve a call, or None."""
    if a.content_bias is not None:
        return "knows no relative positions"
    if a.rotary is not None:
        return "does not rotate, and to rotate before it would round queries and keys once more"
    if a.dropout:
        return "its dropout does not repeat with a seed"
    q = a.q
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {str(q.dtype).removeprefix('torch.')}"
    width = q.shape[-1]
    if width % _VECTOR or not 0 < width <= _WIDEST:
        return f"needs a head width that is a multiple of {_VECTOR}, up to {_WIDEST}, not {width}"
    if a.causal and not same_offsets(a.layout_q, a.layout_k):
        return "aligns causal masks at the last key, not at the first"
    found = capability(q.device)
    if found is None:
        return "needs an NVIDIA GPU"
    if found < _OLDEST:
        return "needs compute capability 8.0, an A100, or later"
    return None


def same_offsets(a: PackedLayout, b: PackedLayout) -> bool:
    """Whether two layouts are certainly one; their numbers are not read, which could wait."""
    if a.cu_seqlens is b.cu_seqlens:
        return True
    if is_fake(a.cu_seqlens) or is_fake(b.cu_seqlens):
        return False
    same = a.cu_seqlens.data_ptr() == b.cu_seqlens.data_ptr()
    return same and a.cu_seqlens.shape == b.cu_seqlens.shape


@functools.cache
def find(
    module: str, name: str, package: str, parameters: tuple[str, ...]
) -> Callable[..., Any] | str:
    """The function of an optional package, or why there is none that we understand.

    Args:
        module: Where it is.
        name: Of the function.
        package: What to install for it.
        parameters: The arguments that we pass by name: signatures have changed between versions.
    """
    try:
        function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return f"not installed (pip install {package})"
        return f"cannot be imported: {error}"
    except AttributeError:
        # The folder `flash_attn` is there if any of version 2 and version 4 is.
        return f"{module} has no {name} (pip install {package})"
    except Exception as error:
        # Compiled for another torch or driver, packages fail in many ways; none must stop a call
        # that another implementation can serve.
        return f"cannot be imported: {type(error).__name__}: {error}"
    known = inspect.signature(function).parameters
    missing = [parameter for parameter in parameters if parameter not in known]
    if missing:
        return f"{module}.{name} of this version has no `{'`, `'.join(missing)}`"
    return function


def outside(layout: PackedLayout, other: PackedLayout) -> Tensor:
    """The rows that attend to nothing, and to which nothing attends: bool (rows, 1, 1).

    They are the tail, and the sequences that are empty on the other side. ``layout`` has one.
    """
    inside = layout.mask()
    if layout.cu_seqlens is not other.cu_seqlens:
        filled = other.cu_seqlens.diff() > 0
        inside = inside & filled[layout.sequence_ids().clamp(max=layout.num_sequences - 1)]
    return ~inside[:, None, None]


class _GradientInside(Function):
    """The values as they are; of the gradient, the rows outside are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outside: Tensor) -> Tensor:
        ctx.save_for_backward(outside)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        (outside,) = ctx.saved_tensors
        return grad.masked_fill(outside, 0), None


def guarded(
    function: Callable[..., Any] | str, a: AttentionArguments, *, reads_beyond: bool
) -> Tensor:
    """Call a ``flash_attn_varlen_func``, deterministic, and keep what lies outside at zero.

    Args:
        function: Any version's, as `find` returns it.
        a: The arguments.
        reads_beyond: Whether it loads rows past the end of a sequence, and multiplies them by zero:
            what is outside must then be finite.

    Raises:
        RuntimeError: There is no function.
    """
    if isinstance(function, str):
        raise RuntimeError(function)
    layout_q, layout_k = a.layout_q, a.layout_k
    if not (layout_q.max_seqlen_bound and layout_k.max_seqlen_bound):
        return zeroed(a.q)
    outside_q, outside_k = outside(layout_q, layout_k), outside(layout_k, layout_q)

    def enclosed(x: Tensor, rows: Tensor) -> Tensor:
        return x.masked_fill(rows, 0) if reads_beyond else _GradientInside.apply(x, rows)  # type: ignore[return-value]

    y = function(
        q=enclosed(a.q, outside_q),
        k=enclosed(a.k, outside_k),
        v=enclosed(a.v, outside_k),
        cu_seqlens_q=layout_q.cu_seqlens,
        cu_seqlens_k=layout_k.cu_seqlens,
        max_seqlen_q=layout_q.max_seqlen_bound,
        max_seqlen_k=layout_k.max_seqlen_bound,
        softmax_scale=a.scale,
        causal=a.causal,
        deterministic=True,
    )
    # Some versions return the log-sum-exp, too.
    y = y[0] if isinstance(y, tuple) else y
    return y.masked_fill(outside_q, 0)


PARAMETERS = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "deterministic",
)
"""What `guarded` passes."""
