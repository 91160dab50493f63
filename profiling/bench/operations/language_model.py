"""Benchmarks of what lies between the products of a language model's layer.

Sizes are those of the model behind a speech encoder in the census: Qwen3 of 1.7 billion weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, leaf
from bench.workload import Workload

_EPS = 1e-6
_EXPANSION = 3


def cases(workload: Workload) -> list[Case]:
    """Return cases of an RMS norm and of the inside of a gated feed-forward network."""
    return [norm(workload), gated(workload)]


def _by_torch(
    workload: Workload, make: Callable[[Callable[[Any], Any]], Contender]
) -> dict[str, Callable[[], Contender]]:
    """Return the same calls of PyTorch, as they are and compiled; eager twice without a GPU."""
    on_gpu = workload.device.type == "cuda"
    compiled = lambda call: torch.compile(call, dynamic=False) if on_gpu else call
    return {"torch eager": lambda: make(lambda call: call), "torch.compile": lambda: make(compiled)}


def norm(workload: Workload) -> Case:
    """Return the norm of Llama, whose row is rounded before it is multiplied by the weight."""
    width = 2 * workload.width
    x, weight = workload.draw(workload.rows, width), leaf(workload.draw(width).roll(1))
    leaves = {"x": x, "weight": weight}
    upstream = [x.detach().roll(1, 1)]

    def ours(backend: str) -> Contender:
        return Contender(
            leaves, lambda: kernels.rms_norm(x, weight, eps=_EPS, backend=backend), upstream
        )

    def by_torch(wrap: Callable[[Any], Any]) -> Contender:
        def call(x: Tensor, weight: Tensor) -> Tensor:
            wide = x.float()
            normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
            return weight * normal.to(x.dtype)

        run = wrap(call)
        return Contender(leaves, lambda: run(x, weight), upstream)

    def liger() -> Contender:
        from liger_kernel.ops.rms_norm import (  # pyright: ignore[reportMissingImports]
            LigerRMSNormFunction,
        )

        # In place it would write the gradient over that of the result, which is used again here.
        run = lambda: LigerRMSNormFunction.apply(x, weight, _EPS, 0.0, "llama", False)
        return Contender(leaves, run, upstream)

    peers = {**_by_torch(workload, by_torch), "Liger": liger}
    return Case("rms_norm", "llama", f"{workload.describe()} W={width}", ours, peers)


def gated(workload: Workload) -> Case:
    """Return SiLU of the gates times the values.

    Liger's function is not among the peers: its backward writes over the gates and values, which
    other calls read here.
    """
    width = 2 * workload.width * _EXPANSION
    gate, up = (
        workload.draw(workload.rows, width),
        leaf(workload.draw(workload.rows, width).roll(1)),
    )
    leaves = {"gate": gate, "up": up}
    upstream = [gate.detach().roll(1, 1)]

    def ours(backend: str) -> Contender:
        return Contender(
            leaves,
            lambda: kernels.gated_activation(gate, up, activation="silu", backend=backend),
            upstream,
        )

    def by_torch(wrap: Callable[[Any], Any]) -> Contender:
        run = wrap(lambda gate, up: F.silu(gate) * up)
        return Contender(leaves, lambda: run(gate, up), upstream)

    shape = f"{workload.describe()} W={width}"
    return Case("gated_activation", "silu", shape, ours, _by_torch(workload, by_torch))
