"""Benchmarks of what lies between matrix products, against torch.compile and flash-attn."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, leaf
from bench.workload import Workload

_DROPOUT = 0.1
_EXPANSION = 4


def cases(workload: Workload, *, dropout: float = _DROPOUT) -> list[Case]:
    """Return cases of a residual addition with its norm, and of a feed-forward network's inside.

    Args:
        workload: Sizes and device.
        dropout: Probability to drop an element. Peers drop other elements than ours, so that their
            results can be compared only with 0.
    """
    return [residual(workload, dropout), activation(workload, dropout)]


def _peers(
    make: Callable[[Callable[..., object]], Contender],
) -> dict[str, Callable[[], Contender]]:
    """Return the same calls of PyTorch, as they are and compiled."""
    compiled = lambda call: torch.compile(call, dynamic=False)
    return {"torch": lambda: make(lambda call: call), "torch.compile": lambda: make(compiled)}


def residual(workload: Workload, dropout: float) -> Case:
    """Return dropout, addition to a float32 stream, and LayerNorm in the dtype of the branch."""
    layout, width = workload.frame_layout, workload.width
    x = workload.rows_of(layout, width)
    stream = leaf(workload.rows_of(layout, width).float())
    weight, bias = (leaf(workload.draw(width).float()) for _ in range(2))
    leaves = {"x": x, "residual": stream, "weight": weight, "bias": bias}
    upstream = [x.detach().roll(1, 1), stream.detach().roll(1, 1)]

    def ours(backend: str) -> Contender:
        return Contender(
            leaves,
            lambda: kernels.dropout_add_layer_norm(
                *leaves.values(), layout, dropout=dropout, seed=0, backend=backend
            ),
            upstream,
        )

    def torch_calls(wrap: Callable[..., object]) -> Contender:
        def call(x: Tensor, stream: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            added = stream + F.dropout(x, dropout)
            return F.layer_norm(added, (width,), weight, bias).to(x.dtype), added

        run = wrap(call)
        return Contender(leaves, lambda: run(*leaves.values()), upstream, exact=not dropout)

    def flash_attn() -> Contender:
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        return Contender(
            leaves,
            lambda: layer_norm_fn(
                x,
                weight,
                bias,
                residual=stream,
                eps=1e-5,
                dropout_p=dropout,
                prenorm=True,
                residual_in_fp32=True,
            ),
            upstream,
            exact=not dropout,
        )

    shape = f"{workload.describe()} C={width}"
    peers = {**_peers(torch_calls), "flash-attn layer_norm_fn": flash_attn}
    return Case("dropout_add_layer_norm", "", shape, ours, peers)


def activation(workload: Workload, dropout: float) -> Case:
    """Return bias, SiLU and dropout between the two products of a feed-forward network."""
    layout, width = workload.frame_layout, _EXPANSION * workload.width
    x, bias = workload.rows_of(layout, width), leaf(workload.draw(width).float())
    leaves = {"x": x, "bias": bias}
    upstream = [x.detach().roll(1, 1)]

    def ours(backend: str) -> Contender:
        return Contender(
            leaves,
            lambda: kernels.bias_activation_dropout(
                x, bias, layout, activation="silu", dropout=dropout, seed=0, backend=backend
            ),
            upstream,
        )

    def torch_calls(wrap: Callable[..., object]) -> Contender:
        def call(x: Tensor, bias: Tensor) -> Tensor:
            return F.dropout(F.silu(x + bias.to(x.dtype)), dropout)

        run = wrap(call)
        return Contender(leaves, lambda: run(x, bias), upstream, exact=not dropout)

    shape = f"{workload.describe()} C={width}"
    return Case("bias_activation_dropout", "silu", shape, ours, _peers(torch_calls))
