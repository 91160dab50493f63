"""How the kernels of attention are cut, by what they compute and where.

Sequences of speech have 50 to 500 rows, so tiles have 64: the last of a sequence is on average half
empty. Beyond that, choices are those that compile without spills for the GPU and all features
(``tests/compiled/test_attention.py``), with as many blocks on a multiprocessor as registers allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is cut: queries and keys of a tile, warps, stages of its loads."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Configs:
    """One for each kernel."""

    forward: Config
    backward_kv: Config
    backward_q: Config


def padded_width(head_width: int) -> int:
    """What the channels of a head are padded to, inside a kernel."""
    return max(16, triton.next_power_of_2(head_width))


def configs(
    dtype: torch.dtype, head_width: int, capability: tuple[int, int], *, plain: bool
) -> Configs:
    """Choose for a dtype, D and a GPU; never for a length.

    Args:
        dtype: Of the inputs.
        head_width: D.
        capability: Of the GPU.
        plain: Whether there is neither dropout nor a bias, which take registers.
    """
    width = padded_width(head_width)
    if dtype == torch.float32:
        small = Config(32, 32, 4, 1) if width <= 64 else Config(16, 16, 8, 1)
        return Configs(small, small, small)
    major = capability[0]
    if width <= 64:
        return _narrow(major, plain)
    if width <= 128:
        if major == 9:
            return Configs(Config(64, 64, 4, 2), Config(32, 64, 8, 2), Config(64, 32, 4, 2))
        if major == 10:
            return Configs(Config(64, 64, 8, 2), Config(32, 64, 4, 2), Config(64, 32, 4, 2))
        return Configs(Config(64, 32, 4, 2), Config(32, 64, 8, 2), Config(64, 64, 8, 2))
    if major == 9:
        return Configs(Config(64, 64, 8, 2), Config(16, 64, 8, 2), Config(64, 32, 8, 2))
    return Configs(Config(64, 32, 8, 2), Config(16, 64, 8, 2), Config(64, 32, 8, 2))


def _narrow(major: int, plain: bool) -> Configs:
    square = Config(64, 64, 4, 2)
    if major == 9:
        return Configs(square, square if plain else Config(32, 64, 4, 2), square)
    queries = square if plain else Config(64, 32, 4, 2)
    if major == 10:
        return Configs(square, Config(32, 64, 4, 2), queries)
    return Configs(square, Config(32, 64, 4, 2) if plain else Config(64, 32, 4, 2), queries)
