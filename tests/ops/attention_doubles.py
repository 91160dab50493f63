"""Doubles of other people's flash attention: their signatures, the reference's values.

What lies outside every sequence is NaN, as it may be in theirs.
"""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from effasr_kernels import PackedLayout, attention
from effasr_kernels.runtime.torch_op import recording
from tests.support.tolerance import poison


class Library:
    """What was passed to the double, and whether it ran deterministically."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.deterministic: list[bool] = []


def _layout(cu_seqlens: Tensor, rows: int) -> PackedLayout:
    return PackedLayout(cu_seqlens, tuple(cu_seqlens.tolist()), rows)


def _reference(given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(
        q,
        k,
        v,
        _layout(given["cu_seqlens_q"], q.shape[0]),
        _layout(given["cu_seqlens_k"], k.shape[0]),
        causal=given["causal"],
        scale=given["softmax_scale"],
        backend="reference",
    )


def _nan_outside(x: Tensor, cu_seqlens: Tensor, other: Tensor) -> Tensor:
    """As freshly allocated memory may be."""
    x = poison(x, _layout(cu_seqlens, x.shape[0]))
    for n, length in enumerate(other.diff().tolist()):
        if length == 0:
            x = poison(x, _layout(cu_seqlens, x.shape[0]), n)
    return x


class _Double(Function):
    @staticmethod
    def forward(ctx: Any, given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.given = given
        ctx.save_for_backward(q, k, v)
        y = _reference(given, q, k, v)
        return _nan_outside(y, given["cu_seqlens_q"], given["cu_seqlens_k"])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dq, dk, dv = _gradients(ctx.given, grad, *ctx.saved_tensors)
        return None, dq, dk, dv


def _gradients(given: dict[str, Any], grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    # Autograd may be off here, and below the dispatcher.
    with recording():
        grads = torch.autograd.grad(_reference(given, *leaves), leaves, grad)
    offsets = given["cu_seqlens_q"], given["cu_seqlens_k"]
    where = [offsets, offsets[::-1], offsets[::-1]]
    return [_nan_outside(x, *pair) for x, pair in zip(grads, where, strict=True)]


def _function(name: str, parameters: str, call: Callable[[dict[str, Any]], Any]) -> Any:
    """A function of this signature, whose defaults are literals, that passes on what it binds."""
    pairs = [x.partition("=")[::2] for x in parameters.split()]
    signature = inspect.Signature(
        inspect.Parameter(
            key,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=ast.literal_eval(value) if value else inspect.Parameter.empty,
        )
        for key, value in pairs
    )

    def double(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return call(bound.arguments)

    double.__name__, double.__signature__ = name, signature  # type: ignore[attr-defined]
    return double


_OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SIGNATURES = {
    2: f"q k v {_OFFSETS} dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False block_table=None",
    3: f"q k v {_OFFSETS} seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None "
    "window_size=(-1,-1) num_splits=1 deterministic=False",
    # In version 4 the fourth argument is another one: only names are safe.
    4: "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None "
    "min_seqlen_k=None softmax_scale=None causal=False window_size=(None,None) "
    "deterministic=False score_mod=None",
}


def flash_attn(library: Library, version: int) -> Callable[..., Any]:
    def call(given: dict[str, Any]) -> Any:
        if version > 2:
            # Their loads run past the ends of sequences.
            assert not any(given[x].isnan().any() for x in "qkv")
            assert given["qv"] is None
        library.calls.append(given | {"q": given["q"].detach()})
        if version != 3:
            library.deterministic.append(given["deterministic"])
        y = _Double.apply(library.calls[-1], *(given[x] for x in "qkv"))
        return y if version == 2 else (y, torch.empty(0) if version == 3 else None)

    return _function("flash_attn_varlen_func", _SIGNATURES[version], call)


def torchs(library: Library) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`varlen_attn` of torch 2.11 to 2.13, and the backward beneath it."""

    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
    ):
        assert return_aux.lse
        given = {
            "cu_seqlens_q": cu_seq_q,
            "cu_seqlens_k": cu_seq_k,
            "max_seqlen_q": max_q,
            "max_seqlen_k": max_k,
            "softmax_scale": scale,
            "causal": {(-1, 0): True, (-1, -1): False}[window_size],
        }
        library.calls.append(given)
        y = _nan_outside(_reference(given, query, key, value), cu_seq_q, cu_seq_k)
        return y, torch.zeros(query.shape[1], query.shape[0])

    def backward(grad, q, k, v, y, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *_, **options):
        assert lse.shape == (q.shape[1], q.shape[0])
        assert dropout == 0
        assert not y[int(cu_q[-1]) :].isnan().any()
        assert options["window_size_right"] == (0 if causal else -1)
        library.deterministic.append(torch.are_deterministic_algorithms_enabled())
        given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        given |= {"causal": causal, "softmax_scale": options["scale"]}
        return _gradients(given, grad, q, k, v)

    return varlen_attn, backward
