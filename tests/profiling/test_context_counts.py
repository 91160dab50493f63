"""The work of attention falls with its context: instructions that kernels issue, counted."""

from array import array

import pytest
import torch
from emulator.emulate import binaries, emulated
from emulator.machine import COUNTS

from effasr_kernels import Context, PackedLayout, RelativeBias, attention
from tests.profiling.test_emulator import pytestmark  # noqa: F401 (where it can run)

ROWS, WIDTH = 512, 64


def _instructions(context: Context | None) -> int:
    """Those of forward and backward with relative positions, in all kernels."""
    torch.manual_seed(0)
    layout = PackedLayout.from_lengths([ROWS])
    draw = lambda *shape: torch.randn(shape).bfloat16().requires_grad_()
    q, k, v = (draw(ROWS, 1, WIDTH) for _ in range(3))
    reach = ROWS if context is None else context.reach
    position = RelativeBias(draw(1, WIDTH), draw(1, WIDTH), draw(2 * reach - 1, 1, WIDTH))
    for binary in binaries():
        binary.counts[:] = array("Q", bytes(8 * len(binary.counts)))
    with emulated(90, counted=True):
        y = attention(q, k, v, layout, context=context, position=position, backend="triton")
        y.float().sum().backward()
    return sum(sum(binary.counts[:: len(COUNTS)]) for binary in binaries())


@pytest.mark.extended
def test_instructions_fall_with_the_context() -> None:
    full, wide, narrow = map(_instructions, (None, Context(112, 0, 16), Context(48, 0, 16)))
    # Tiles of 64 queries and 64 keys: 8 of 8 tiles of keys, at most 3 of 8, and at most 2 of 8.
    assert narrow < wide < 0.55 * full
    assert narrow < 0.4 * full
