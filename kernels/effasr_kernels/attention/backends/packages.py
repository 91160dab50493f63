"""Shared checks and wrappers of attention implementations from torch and other packages.

They read packed sequences by offsets, as `attention` does, with these differences. Rows outside all
sequences and their gradients are uninitialised (https://github.com/pytorch/pytorch/issues/176793,
flash-attention issue 2324); the wrappers set them to zero. Their causal mask is aligned to the last
key, but the mask of `attention` to the first, so both agree only for self-attention. Their dropout
draws from torch's generator, not from a seed.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.order import capability
from effasr_kernels.packed import PackedLayout
from effasr_kernels.shared.ragged import zeroed

_OLDEST = (8, 0)
_WIDEST = 256
_VECTOR = 8


def refusal(a: AttentionArguments) -> str | None:
    """The reason why none of these implementations supports a call, or None."""
    if a.content_bias is not None:
        return "does not support relative positions"
    if a.rotary is not None:
        return "does not support rotary positions, and rotating before would round once more"
    if a.dropout:
        return "does not support dropout with a seed"
    if a.context is not None:
        return "does not support a context of chunks"
    q = a.q
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {str(q.dtype).removeprefix('torch.')}"
    width = q.shape[-1]
    if width % _VECTOR or not 0 < width <= _WIDEST:
        return f"needs a head width that is a multiple of {_VECTOR}, up to {_WIDEST}, not {width}"
    if a.causal and not same_offsets(a.layout_q, a.layout_k):
        return "aligns causal masks at the last key, not at the first"
    gpu = capability(q.device)
    if gpu is None:
        return "needs an NVIDIA GPU"
    if gpu < _OLDEST:
        return "needs compute capability 8.0, an A100, or later"
    return None


def same_offsets(a: PackedLayout, b: PackedLayout) -> bool:
    """Whether two layouts share their offsets; values are not compared, as that would wait."""
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
    """Return a function of an optional package with these parameters, or why it cannot be used."""
    try:
        function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return f"not installed (pip install {package})"
        return f"cannot be imported: {error}"
    except AttributeError:
        # The folder `flash_attn` exists if either version 2 or version 4 is installed.
        return f"{module} has no {name} (pip install {package})"
    except Exception as error:
        # Packages that were compiled for another torch or driver raise various exceptions. None may
        # stop a call that another implementation supports.
        return f"cannot be imported: {type(error).__name__}: {error}"
    accepted = inspect.signature(function).parameters
    missing = [parameter for parameter in parameters if parameter not in accepted]
    if missing:
        return f"{module}.{name} of this version has no `{'`, `'.join(missing)}`"
    return function


def outside(layout: PackedLayout, other: PackedLayout) -> Tensor:
    """The rows without any query-key pair: bool (rows, 1, 1)."""
    # They are the tail and the sequences that are empty in ``other``. ``layout`` has at least one
    # sequence.
    inside = layout.mask()
    if layout.cu_seqlens is not other.cu_seqlens:
        filled = other.cu_seqlens.diff() > 0
        inside = inside & filled[layout.sequence_ids().clamp(max=layout.num_sequences - 1)]
    return ~inside[:, None, None]


class _MaskedGradient(Function):
    """Returns the values unchanged, and sets the gradient of the rows ``outside`` to zero."""

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


# The arguments that `FlashAttention.run` passes
_OFFSETS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
PARAMETERS = "q", "k", "v", *_OFFSETS, "softmax_scale", "causal", "deterministic"


@dataclass(frozen=True, slots=True)
class FlashAttention:
    module: str  # module of its `flash_attn_varlen_func`
    package: str  # arguments of pip that install it
    # Whether it loads rows past the end of a sequence and multiplies them by zero, so that these
    # rows must be finite
    reads_beyond: bool
    refusal: Callable[[AttentionArguments], str | None] = lambda a: None  # why it cannot compute it

    def unsupported_reason(self, a: AttentionArguments) -> str | None:
        function = self._find()
        if isinstance(function, str):
            return function
        return refusal(a) or self.refusal(a)

    def run(self, a: AttentionArguments) -> Tensor:
        """Call it deterministically, and zero the rows outside all sequences."""
        function = self._find()
        if isinstance(function, str):
            raise RuntimeError(function)
        layout_q, layout_k = a.layout_q, a.layout_k
        if not (layout_q.max_seqlen_bound and layout_k.max_seqlen_bound):
            return zeroed(a.q)
        outside_q, outside_k = outside(layout_q, layout_k), outside(layout_k, layout_q)

        def masked(x: Tensor, rows: Tensor) -> Tensor:
            return x.masked_fill(rows, 0) if self.reads_beyond else _MaskedGradient.apply(x, rows)  # type: ignore[return-value]

        y = function(
            q=masked(a.q, outside_q),
            k=masked(a.k, outside_k),
            v=masked(a.v, outside_k),
            cu_seqlens_q=layout_q.cu_seqlens,
            cu_seqlens_k=layout_k.cu_seqlens,
            max_seqlen_q=layout_q.max_seqlen_bound,
            max_seqlen_k=layout_k.max_seqlen_bound,
            softmax_scale=a.scale,
            causal=a.causal,
            deterministic=True,
        )
        # Some versions also return the log-sum-exp.
        y = y[0] if isinstance(y, tuple) else y
        return y.masked_fill(outside_q, 0)

    def _find(self) -> Callable[..., Any] | str:
        # Positions of arguments differ between versions, so they are passed by name.
        return find(self.module, "flash_attn_varlen_func", self.package, PARAMETERS)


def _inference_on_hopper(a: AttentionArguments) -> str | None:
    if capability(a.q.device) != (9, 0):
        return "needs compute capability 9.0, an H100 or H200"
    # The backward hangs on empty sequences, which every static shape has (issue 1254), and was
    # reported to be irreproducible in deterministic mode (issue 2244). Grad mode is not checked, as
    # torch.compile and torch.library disable it here.
    if any(x.requires_grad for x in (a.q, a.k, a.v)):
        return (
            "supports only inference: its backward hangs on empty sequences and may be "
            "irreproducible"
        )
    return None


def _hopper_or_blackwell(a: AttentionArguments) -> str | None:
    major, width = (capability(a.q.device) or (0, 0))[0], a.q.shape[-1]
    if major not in (9, 10, 11):
        return "needs compute capability 9, 10 or 11, an H100 or later"
    if major != 9 and width > 128:
        return f"supports head widths up to 128 on this GPU, not {width}"
    return None


# https://github.com/Dao-AILab/flash-attention. Version 2 does not load rows past the end of a
# sequence. Versions 3 and 4 do: with them, NaN in a sequence can reach the previous one.
# Version 2 is built from source; version 3 is on no index, and version 4 only as a pre-release.
_UNBUILT = "--no-build-isolation"
_VERSION_3 = "'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'"
VERSION_2 = FlashAttention("flash_attn", f"{_UNBUILT} flash-attn", reads_beyond=False)
VERSION_3 = FlashAttention(
    "flash_attn_interface", f"{_UNBUILT} {_VERSION_3}", True, _inference_on_hopper
)
VERSION_4 = FlashAttention("flash_attn.cute", "--pre flash-attn-4", True, _hopper_or_blackwell)
