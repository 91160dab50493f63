"""The kernels of relative positions, compiled for GPUs that need not be there."""

import random
import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from effasr_kernels import Context, RelativeBias
from effasr_kernels.attention.triton.relative import relative_backward, relative_scores
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import launch
from effasr_kernels.runtime.launch import Launch
from effasr_kernels.testing import aot

_KERNELS = ("scores", "grad_queries", "grad_table")


def _launches(
    width: int,
    dtype: torch.dtype,
    architecture: int,
    *,
    layout: PackedLayout | None = None,
    spare: int = 0,
    heads: int = 8,
    context: Context | None = None,
) -> list[Launch]:
    """What a forward and a backward launch, for slices of the products that models make."""
    layout = PackedLayout.from_lengths((37, 100, 5), rows=160) if layout is None else layout
    reach = layout.max_seqlen_bound + 1 + spare
    q, k, _ = torch.empty(layout.rows, 3, heads, width, dtype=dtype).unbind(1)
    bias, table = q.new_empty(heads, width), q.new_empty(2 * reach - 1, heads, width)
    with launch.recording(divmod(architecture, 10)) as launches:
        biased, result, grad_result = (q.new_empty(q.shape) for _ in range(3))
        scores = relative_scores(
            *(q, bias, table, layout, layout, context),
            content_bias=bias,
            biased=biased,
            result=result,
            grad_result=grad_result,
            delta=q.new_empty(heads, layout.rows, dtype=torch.float32),
        )
        position = RelativeBias(bias, bias, table)
        relative_backward(scores, q, k, position, layout, layout, 0.125, context=context)
    return launches


def _compiled(kernel: str) -> aot.Resources:
    launches = _launches(64, torch.bfloat16, 90)
    (one,) = (x for x in launches if x.kernel.fn.__name__ == kernel)
    return aot.compile_launch(one, 90)


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.representative(width=64)
def test_common_widths(width: int, architecture: int, compiled_ok: Callable) -> None:
    launches = _launches(width, torch.bfloat16, architecture)
    compiled_ok(launches, architecture, products=_KERNELS)


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("width", [48, 64, 128])
@pytest.mark.representative(width=64)
def test_contexts(width: int, architecture: int, compiled_ok: Callable) -> None:
    launches = _launches(width, torch.bfloat16, architecture, context=Context(64, 16, 16))
    compiled_ok(launches, architecture, products=_KERNELS)


@pytest.mark.extended
@pytest.mark.parametrize("width", [16, 36, 80, 256])
def test_other_widths(width: int, compiled_ok: Callable) -> None:
    compiled_ok(_launches(width, torch.bfloat16, 90), 90, products=_KERNELS)


@pytest.mark.extended
def test_float16(compiled_ok: Callable) -> None:
    compiled_ok(_launches(64, torch.float16, 90), 90, products=_KERNELS)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.representative(width=64)
def test_float32(width: int, compiled_ok: Callable) -> None:
    compiled_ok(_launches(width, torch.float32, 90), 90)


@pytest.mark.parametrize("kernel", _KERNELS)
def test_pairs_of_keys_move_together(kernel: str) -> None:
    """The skew takes no instructions on 16 bits."""
    ptx = _compiled(kernel).ptx
    access = "st" if kernel == "scores" else "ld"
    # One for each of the few that a program does once, none in a loop.
    assert len(re.findall(rf"{access}\.global\.b16", ptx)) <= 2
    assert len(re.findall(rf"{access}\.global\.b32", ptx)) >= 8


@pytest.mark.parametrize("kernel", _KERNELS)
def test_rows_are_addressed_in_64_bits(kernel: str) -> None:
    """A row times a stride: of the queries, of the buffer and of the table."""
    ttir = _compiled(kernel).ttir
    assert len(re.findall(r"arith\.muli [^\n]*: (?:tensor<[^>]*x)?i64", ttir)) >= 3


def test_nothing_compiles_anew_for_other_lengths() -> None:
    draw, keys = random.Random(0), set()
    for _ in range(200):
        lengths = [draw.randrange(1, 600) for _ in range(draw.randrange(1, 30))]
        layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + draw.randrange(50))
        for launched in _launches(
            64, torch.bfloat16, 90, layout=layout, spare=draw.randrange(40), heads=2
        ):
            keys.add(aot.key(launched))
    # And the sums of the biases' gradients.
    assert len(keys) == len(_KERNELS) + 1
