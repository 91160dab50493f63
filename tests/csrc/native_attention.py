"""Attention's C interface (csrc/attention.h) as a differentiable function of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from effasr_kernels import PackedLayout, RelativeBias

INSTRUCTIONS = {"best": 0, "base": 1, "avx2": 2, "avx512": 3}
NOT_ON_THIS_MACHINE = 2
_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class _Heads(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("row", _INT64), ("head", _INT64)]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, _Heads) for name in ("q", "k", "v", "out")),
        *((name, _POINTER) for name in ("softmax", "content_bias", "position_bias", "table")),
        *((name, _POINTER) for name in ("penalty", "cu_q", "cu_k")),
        *((name, _INT64) for name in ("rows_q", "rows_k", "seed")),
        *((name, _FLOAT) for name in ("scale", "sigma", "dropout")),
        *((name, _INT32) for name in ("sequences", "heads", "group", "width", "reach", "causal")),
        ("instructions", _INT32),
    ]


class _Gradients(ctypes.Structure):
    _fields_ = [
        ("out", _Heads),
        ("penalty", _POINTER),
        *((name, _Heads) for name in ("q", "k", "v")),
        *((name, _POINTER) for name in ("content_bias", "position_bias", "table")),
    ]


def _heads(x: Tensor) -> _Heads:
    assert x.stride(-1) == 1
    return _Heads(x.data_ptr(), x.stride(0), x.stride(1))


@dataclass(frozen=True)
class NativeAttention:
    """A library and how to call it.

    Attributes:
        library: The build.
        instructions: A key of `INSTRUCTIONS`.
        threads: At most.
        causal: As of `effasr_kernels.attention`.
        sigma: Of the penalty of `effasr_kernels.guided_attention`; None for no penalty.
        dropout: The share of the weights that is dropped.
        seed: Of the dropout.
        scale: Of the scores; ``D ** -0.5`` by default.
    """

    library: ctypes.CDLL
    instructions: str = "best"
    threads: int = 1
    causal: bool = False
    sigma: float | None = None
    dropout: float = 0.0
    seed: int = 0
    scale: float | None = None

    def with_options(self, **options: Any) -> NativeAttention:
        """The same library, called otherwise."""
        return replace(self, **options)

    def runs_here(self) -> bool:
        """Whether this machine has the instructions."""
        empty = PackedLayout.from_lengths([])
        x = torch.zeros(0, 1, 8)
        code = self._call("forward", self._describe((x, x, x, x), (empty, empty), None, None, None))
        return code != NOT_ON_THIS_MACHINE

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout_q: PackedLayout,
        layout_k: PackedLayout | None = None,
        position: RelativeBias | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the penalty where there is a sigma."""
        layouts = layout_q, layout_q if layout_k is None else layout_k
        biases = () if position is None else (position.content_bias, position.position_bias)
        table = () if position is None else (position.table,)
        out, penalty = _Differentiable.apply(self, layouts, q, k, v, *biases, *table)
        return out, None if self.sigma is None else penalty

    def _describe(
        self,
        tensors: Sequence[Tensor],
        layouts: tuple[PackedLayout, PackedLayout],
        softmax: Tensor | None,
        penalty: Tensor | None,
        position: Sequence[Tensor] | None,
    ) -> _Attention:
        q = tensors[0]
        a = _Attention(*map(_heads, tensors))
        a.softmax = None if softmax is None else softmax.data_ptr()
        a.penalty = None if penalty is None else penalty.data_ptr()
        if position:
            a.content_bias, a.position_bias, a.table = (x.data_ptr() for x in position)
            a.reach = (position[2].shape[0] + 1) // 2
        a.cu_q, a.cu_k = (layout.cu_seqlens.data_ptr() for layout in layouts)
        a.rows_q, a.rows_k = (layout.rows for layout in layouts)
        a.sequences, a.heads, a.width = layouts[0].num_sequences, q.shape[1], q.shape[2]
        a.group = 1
        a.scale = q.shape[2] ** -0.5 if self.scale is None else self.scale
        a.sigma, a.dropout, a.seed = self.sigma or 1.0, self.dropout, self.seed
        a.causal, a.instructions = self.causal, INSTRUCTIONS[self.instructions]
        return a

    def _call(self, name: str, *structures: ctypes.Structure) -> int:
        run: Callable[..., int] = getattr(self.library, f"attention_{name}_cpu")
        return run(*map(ctypes.byref, structures), self.threads)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: NativeAttention, layouts: Any, *inputs: Tensor) -> Any:  # type: ignore[override]
        q, k, v, *position = inputs
        # What the library does not write stays NaN.
        out = torch.full(q.shape, torch.nan)
        softmax = torch.full((*q.shape[:2], 2), torch.nan)
        penalty = torch.full(q.shape[:2], torch.nan)
        held = penalty if native.sigma is not None else None
        described = native._describe((q, k, v, out), layouts, softmax, held, position)
        assert native._call("forward", described) == 0
        ctx.native, ctx.layouts = native, layouts
        ctx.save_for_backward(out, softmax, penalty, *inputs)
        return out, penalty

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_penalty: Tensor) -> Any:  # type: ignore[override]
        native: NativeAttention = ctx.native
        out, softmax, penalty, q, k, v, *position = ctx.saved_tensors
        gradients = [torch.full(x.shape, torch.nan) for x in (q, k, v, *position)]
        held = penalty if native.sigma is not None else None
        described = native._describe((q, k, v, out), ctx.layouts, softmax, held, position)
        d_out, d_penalty = d_out.contiguous(), d_penalty.contiguous()
        g = _Gradients()
        g.out = _heads(d_out)
        g.penalty = None if held is None else d_penalty.data_ptr()
        g.q, g.k, g.v = map(_heads, gradients[:3])
        if position:
            g.content_bias, g.position_bias, g.table = (x.data_ptr() for x in gradients[3:])
        assert native._call("backward", described, g) == 0
        return None, None, *gradients
