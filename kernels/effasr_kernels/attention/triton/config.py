"""How the kernels of attention are cut, by what they compute and where.

Sequences of speech have 50 to 500 rows, so tiles have 64: the last of a sequence is on average half
empty. Beyond that, choices are those that compile without spills for the GPU and all features
(``tests/compiled/test_attention.py``), with as many blocks on a multiprocessor as registers allow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


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


def next_power_of_two(x: int) -> int:
    """The least power of two that is not below ``x``, which is at least 1."""
    return 1 << (x - 1).bit_length()


@functools.cache
def padded_width(head_width: int) -> int:
    """What the channels of a head are padded to, inside a kernel."""
    return max(16, next_power_of_two(head_width))


@functools.cache
def configs(dtype: torch.dtype, head_width: int, major: int, *, plain: bool) -> Configs:
    """Choose for a dtype, D and a GPU; never for a length.

    Args:
        dtype: Of the inputs.
        head_width: D.
        major: The first number of the GPU's capability; one in no table takes the choice for 8.
        plain: Whether there are neither positions nor dropout, which take registers.
    """
    width = max(64, padded_width(head_width))
    if dtype == torch.float32:
        return _SINGLE[width]
    table = _HALF.get(major, _HALF[8])
    return table.get((width, plain)) or table[width, False]


# Not on tensor cores, whose float32 has 11 bits.
_SINGLE = {
    64: Configs(Config(32, 16, 4, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    128: Configs(Config(32, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    256: Configs(Config(16, 16, 4, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
}
# By the first number of the capability; then by the padded width, and whether the call is plain.
_HALF = {
    8: {
        (64, True): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 64, 4, 2)),
        (64, False): Configs(Config(64, 64, 4, 2), Config(64, 32, 4, 3), Config(64, 32, 4, 2)),
        (128, False): Configs(Config(64, 32, 4, 2), Config(32, 64, 8, 2), Config(64, 64, 8, 2)),
        (256, False): Configs(Config(64, 32, 8, 2), Config(16, 64, 8, 2), Config(64, 16, 8, 2)),
    },
    9: {
        (64, True): Configs(Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
        (64, False): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 64, 4, 2)),
        (128, False): Configs(Config(64, 64, 4, 2), Config(32, 64, 8, 2), Config(64, 32, 4, 2)),
        (256, False): Configs(Config(64, 64, 8, 2), Config(16, 64, 8, 2), Config(64, 32, 8, 2)),
    },
    10: {
        (64, True): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 64, 4, 2)),
        (64, False): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 32, 4, 3)),
        (128, False): Configs(Config(64, 32, 8, 2), Config(32, 64, 4, 2), Config(64, 64, 8, 3)),
        (256, False): Configs(Config(64, 64, 8, 2), Config(16, 64, 8, 2), Config(64, 16, 8, 2)),
    },
}
