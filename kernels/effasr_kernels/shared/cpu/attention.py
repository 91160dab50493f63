"""Packed attention with the CPU kernels of ``csrc/``, for `attention` and `guided_attention`.

No tensor of size T_q x T_k is stored: the backward recomputes the scores from the softmax
statistics that the forward stores for each query. Results and gradients of a sequence depend only
on that sequence, and with dropout on its number in the batch, but not on the number of threads.
"""

import ctypes
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import native
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.runtime.native import FLOAT, INT32, INT64, POINTER, check, pointer

_INT32_MAX = torch.iinfo(torch.int32).max
_BEST_INSTRUCTIONS = 0


class _Heads(ctypes.Structure):
    """PackedHeads of csrc/attention.h."""

    _fields_ = [("data", POINTER), ("row", INT64), ("head", INT64)]


class _Attention(ctypes.Structure):
    """PackedAttention of csrc/attention.h."""

    _fields_ = [
        *((name, _Heads) for name in ("q", "k", "v", "out")),
        *((name, POINTER) for name in ("softmax", "content_bias", "position_bias", "table")),
        *((name, POINTER) for name in ("penalty", "cu_q", "cu_k")),
        *((name, INT64) for name in ("rows_q", "rows_k", "seed")),
        *((name, FLOAT) for name in ("scale", "sigma", "dropout")),
        *((name, INT32) for name in ("sequences", "heads", "group", "width", "reach", "causal")),
        ("instructions", INT32),
    ]


class _Gradients(ctypes.Structure):
    """AttentionGradients of csrc/attention.h."""

    _fields_ = [
        ("out", _Heads),
        ("penalty", POINTER),
        *((name, _Heads) for name in ("q", "k", "v")),
        *((name, POINTER) for name in ("content_bias", "position_bias", "table")),
    ]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the kernels; all floating tensors are float32."""

    op: str  # the operation, for messages
    # (T_q, H, D). Like ``k`` and ``v`` it may have any strides between rows and heads, such as a
    # part of a joint projection; it is copied if its channels are not contiguous.
    q: Tensor
    k: Tensor  # (T_k, H_k, D); H_k divides H, and is H with `sigma` or `position`
    v: Tensor  # (T_k, H_k, D)
    layout_q: PackedLayout
    layout_k: PackedLayout  # layout of `k` and `v`
    scale: float  # factor of the scores
    dropout: float  # probability to drop a weight
    seed: Tensor | None  # seed of the dropout, int64 (); None without dropout
    causal: bool = False  # whether query i attends only to keys 0 to i
    sigma: float | None = None  # width of the guided penalty, if any
    position: tuple[Tensor, Tensor, Tensor] | None = None  # tensors of a `RelativeBias`

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the forward."""
        # Returns the output, (T_q, H, D); the softmax statistics for `backward`, (T_q, H, 2); and
        # with ``sigma`` the penalty, (T_q, H), else None.
        inputs = self._inputs()
        q = inputs[0]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        # Zeroed, as the kernels write neither rows without keys nor the tail, and runs must agree.
        softmax, penalty = saved_like(q).zero_(), None
        if self.sigma is not None:
            penalty = q.new_empty(q.shape[:2])
        call = self._describe(inputs, out, softmax, penalty)
        native.run(self.op, "attention_forward_cpu", call)
        return out, softmax, penalty

    def backward(
        self,
        d_out: Tensor,  # gradient of the output, (T_q, H, D), contiguous
        d_penalty: Tensor | None,  # gradient of the penalty, (T_q, H), contiguous; None for zero
        out: Tensor,  # the output of `forward`
        softmax: Tensor,  # the softmax statistics of `forward`
        penalty: Tensor | None,  # the penalty of `forward`
    ) -> list[Tensor]:
        """Compute the gradients of q, k and v, and of the tensors of ``position`` if given."""
        inputs = self._inputs()
        shape = inputs[0].shape
        for name, x, expected in (
            ("d_out", d_out, shape),
            ("d_penalty", d_penalty, shape[:2]),
            ("out", out, shape),
            ("softmax", softmax, (*shape[:2], 2)),
            ("penalty", penalty, shape[:2]),
        ):
            if x is not None:
                check(self.op, name, x, torch.float32, expected)
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
        call = self._describe(inputs, out, softmax, penalty)
        structure = _Gradients(
            *(_heads(d_out), pointer(d_penalty)),
            *map(_heads, gradients[:3]),
            *map(pointer, gradients[3:]),
        )
        native.run(self.op, "attention_backward_cpu", call, structure)
        return gradients

    def _inputs(self) -> list[Tensor]:
        """Check the tensors, and copy them if the kernels do not support their strides."""
        rows, heads, width = self.q.shape
        shape_k = self.layout_k.rows, self.k.shape[1], width
        for name, x, shape in (
            ("q", self.q, (rows, heads, width)),
            ("k", self.k, shape_k),
            ("v", self.v, shape_k),
        ):
            check(self.op, name, x, torch.float32, shape, contiguous=False)
            if x.numel() >= _INT32_MAX:
                rule = 'have less than 2**31 - 1 elements (backend="reference" takes more)'
                raise wrong(self.op, name, rule, tuple(x.shape))
        lengths = _lengths(self.op, "layout_q", self.layout_q)
        if self.layout_k is not self.layout_q:
            lengths_k = _lengths(self.op, "layout_k", self.layout_k)
            if len(lengths_k) != len(lengths):
                rule = f"have {len(lengths)} sequences, as `layout_q` does"
                raise wrong(self.op, "layout_k", rule, len(lengths_k))
            lengths = [*lengths, *lengths_k]
        tensors = [
            x if x.stride(2) == 1 or width <= 1 else x.contiguous()
            for x in (self.q, self.k, self.v)
        ]
        return [*tensors, *self._checked_position(heads, width, max(lengths, default=0))]

    def _checked_position(self, heads: int, width: int, longest: int) -> list[Tensor]:
        if self.position is None:
            return []
        content_bias, position_bias, table = (x.contiguous() for x in self.position)
        check(self.op, "position.content_bias", content_bias, torch.float32, (heads, width))
        check(self.op, "position.position_bias", position_bias, torch.float32, (heads, width))
        check(self.op, "position.table", table, torch.float32, (len(table), heads, width))
        if len(table) % 2 == 0 or len(table) < 2 * longest - 1:
            rule = f"have an odd number of at least 2 * {longest} - 1 rows for the longest sequence"
            raise wrong(self.op, "position.table", rule, tuple(table.shape))
        return [content_bias, position_bias, table]

    def _describe(
        self, inputs: list[Tensor], out: Tensor, softmax: Tensor, penalty: Tensor | None
    ) -> _Attention:
        q, k, _, *position = inputs
        a = _Attention(*map(_heads, (*inputs[:3], out)), pointer(softmax))
        if position:
            a.content_bias, a.position_bias, a.table = map(pointer, position)
            a.reach = (len(position[2]) + 1) // 2
        a.penalty = pointer(penalty)
        a.cu_q, a.cu_k = (pointer(x.cu_seqlens) for x in (self.layout_q, self.layout_k))
        a.rows_q, a.rows_k = len(q), len(k)
        a.seed = 0 if self.seed is None else int(self.seed)
        a.scale, a.dropout = self.scale, self.dropout
        a.sigma = 1.0 if self.sigma is None else self.sigma
        a.sequences, a.heads, a.width = self.layout_q.num_sequences, q.shape[1], q.shape[2]
        a.group = q.shape[1] // k.shape[1]
        a.causal, a.instructions = self.causal, _BEST_INSTRUCTIONS
        return a


def saved_like(q: Tensor) -> Tensor:
    """An empty tensor for the softmax statistics of these queries: float32 (T_q, H, 2)."""
    return q.new_empty((q.shape[0], q.shape[1], 2), dtype=torch.float32)


def _heads(x: Tensor) -> Any:
    return _Heads(x.data_ptr(), x.stride(0), x.stride(1))


def _lengths(op: str, name: str, layout: PackedLayout) -> list[int]:
    """The length of each sequence. Offsets are checked, as kernels do not check their reads."""
    offsets = layout.cu_seqlens
    check(op, f"{name}.cu_seqlens", offsets, torch.int32)
    ends = offsets.tolist()
    if not ends or ends[0] != 0 or ends[-1] > layout.rows or sorted(ends) != ends:
        rule = f"rise from 0 to at most {layout.rows} rows"
        raise wrong(op, f"{name}.cu_seqlens", rule, ends)
    return [end - begin for begin, end in pairwise(ends)]
