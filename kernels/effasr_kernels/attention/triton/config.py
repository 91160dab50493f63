"""Tile sizes of the attention kernels, by dtype, head width and GPU.

Sequences of speech have 50 to 500 rows, so tiles have 64: the last tile of a sequence is on average
half empty. Beyond that, the choices compile without spills for the GPU and all features
(``tests/compiled/test_attention.py``), with as many blocks on a multiprocessor as registers allow.

If one product takes the result of another, the warps of the first lie along its rows:
queries, and in the gradient of keys and values keys. With more than one warp for 16 of these rows,
several compute the same scores, so 8 warps are for 128 rows, where registers allow
(``tests/compiled/test_attention.py``).
"""

import functools
from dataclasses import dataclass, replace

import torch

WIDEST = 256
"""Largest head width of the kernels."""


@dataclass(frozen=True, slots=True)
class Config:
    """Queries and keys of a tile, warps, and pipeline stages of the loads of a kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Configs:
    forward: Config
    backward_kv: Config
    backward_q: Config


def next_power_of_two(x: int) -> int:
    """The smallest power of two that is at least ``x``, for ``x`` of at least 1."""
    return 1 << (x - 1).bit_length()


@functools.cache
def padded_width(head_width: int) -> int:
    """The width that kernels pad a head to: a power of two, at least 16."""
    return max(16, next_power_of_two(head_width))


@functools.cache
def configs(
    dtype: torch.dtype,  # dtype of the inputs
    head_width: int,  # D
    major: int,  # major compute capability; one that is not in the table uses the choice for 8
    *,
    plain: bool,  # whether there are neither positions nor dropout, which need registers
    guided: bool = False,  # whether the kernels compute `guided_attention`
    context: bool = False,  # whether keys are masked by a context, which needs registers, too
    grouped: bool = False,  # whether heads of queries share heads of keys, which needs registers
) -> Configs:
    """Select the configurations of the kernels; they do not depend on lengths."""
    width = max(64, padded_width(head_width))
    if guided:
        if dtype == torch.float32:
            return _SINGLE_GUIDED[width]
        return _HALF_GUIDED.get((major, width)) or _HALF_GUIDED[8, width]
    if dtype == torch.float32:
        return _SINGLE[width]
    table = _HALF.get(major, _HALF[8])
    chosen = table.get((width, plain and not context)) or table[width, False]
    for applies, changes in ((context, _HALF_CONTEXT), (grouped, _HALF_GROUPED)):
        if applies:
            chosen = replace(chosen, **changes.get((major, width), {}))
    return chosen


# float32 does not use tensor cores: their TF32 has only 11 bits of precision.
_SINGLE = {
    # With 32 queries a step, the gradient of keys and values spills on sm_90: with 4 warps with
    # dropout, with 8 warps with relative positions, dropout and a causal mask.
    64: Configs(Config(32, 16, 4, 1), Config(16, 32, 4, 1), Config(32, 32, 4, 1)),
    128: Configs(Config(16, 32, 8, 1), Config(16, 16, 4, 1), Config(16, 32, 8, 1)),
    # With 16 keys a tile, the gradient of keys and values spills on sm_90 with dropout.
    256: Configs(Config(16, 16, 4, 1), Config(16, 32, 8, 1), Config(16, 16, 8, 1)),
}
# By major compute capability, then by padded width and ``plain``.
_HALF = {
    8: {
        (64, True): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 64, 4, 2)),
        (64, False): Configs(Config(64, 64, 4, 2), Config(64, 32, 4, 3), Config(64, 32, 4, 2)),
        (128, False): Configs(Config(64, 32, 4, 2), Config(32, 64, 8, 2), Config(64, 64, 8, 2)),
        (256, False): Configs(Config(64, 32, 8, 2), Config(16, 64, 8, 2), Config(64, 16, 8, 2)),
    },
    9: {
        (64, True): Configs(Config(64, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
        # Measured on an H200, with relative positions and dropout.
        (64, False): Configs(Config(64, 32, 4, 3), Config(32, 64, 4, 3), Config(64, 64, 4, 2)),
        (128, False): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 32, 4, 2)),
        (256, False): Configs(Config(64, 64, 8, 2), Config(16, 64, 8, 2), Config(64, 32, 8, 2)),
    },
    10: {
        (64, True): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 64, 4, 2)),
        (64, False): Configs(Config(64, 64, 4, 2), Config(32, 64, 4, 2), Config(64, 32, 4, 3)),
        (128, False): Configs(Config(64, 32, 8, 2), Config(32, 64, 4, 2), Config(64, 64, 8, 3)),
        (256, False): Configs(Config(64, 64, 8, 2), Config(16, 64, 8, 2), Config(64, 16, 8, 2)),
    },
}
# By major compute capability and padded width, where the choices above spill with a context.
_HALF_CONTEXT = {
    (8, 64): {"forward": Config(64, 32, 4, 2)},
    (8, 128): {"forward": Config(64, 32, 8, 2)},
    (9, 128): {"backward_kv": Config(16, 64, 4, 2)},
    (9, 256): {"forward": Config(64, 32, 8, 2)},
    (10, 64): {"forward": Config(64, 32, 4, 3), "backward_kv": Config(64, 32, 4, 3)},
    (10, 128): {"forward": Config(64, 32, 4, 3)},
    (10, 256): {"forward": Config(64, 32, 8, 2)},
}
# The same for heads in groups, where Triton 3.6 spills; 3.7 does not.
_HALF_GROUPED = {
    (8, 64): {"forward": Config(64, 32, 4, 2)},
    (9, 64): {"backward_kv": Config(32, 64, 4, 2)},
    (9, 128): {"backward_kv": Config(16, 128, 8, 2)},
    (10, 64): {"backward_kv": Config(64, 32, 4, 3), "backward_q": Config(64, 32, 4, 3)},
}
# Of guided attention. Its queries are the tokens of transcripts, which are few, so the kernel that
# loops over them has small steps.
_SINGLE_GUIDED = {
    64: Configs(Config(16, 16, 4, 2), Config(16, 16, 4, 1), Config(16, 32, 4, 1)),
    128: Configs(Config(16, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
    256: Configs(Config(16, 16, 4, 2), Config(16, 16, 8, 1), Config(16, 16, 4, 2)),
}
# By major compute capability and padded width; other GPUs use the entries of 8.
_HALF_GUIDED = {
    (8, 64): Configs(Config(64, 32, 4, 3), Config(16, 64, 4, 2), Config(64, 32, 4, 2)),
    (8, 128): Configs(Config(64, 32, 8, 2), Config(16, 64, 8, 2), Config(64, 32, 8, 2)),
    # Eight warps would compute each score twice; four spill on Ampere.
    (9, 128): Configs(Config(64, 32, 4, 2), Config(16, 64, 4, 2), Config(64, 32, 4, 2)),
    # Eight warps spill on Blackwell.
    (10, 128): Configs(Config(64, 32, 8, 2), Config(16, 64, 8, 2), Config(64, 32, 4, 2)),
    (8, 256): Configs(Config(64, 32, 8, 2), Config(16, 32, 8, 2), Config(64, 16, 8, 2)),
}
