"""No warp of an attention kernel computes a product that another one computes too.

Warps of a product whose result is an operand of the next lie along its rows, 16 or more for each:
with more warps than that, some repeat the work of others, which no result shows.
"""

from collections.abc import Callable, Sequence

import pytest

from effasr_kernels.runtime.launch import Launch
from effasr_kernels.testing import aot
from tests.compiled import test_attention as attention
from tests.compiled import test_guided_attention as guided

CompiledOk = Callable[..., dict[str, aot.Resources]]
FEATURES = ("plain", "dropout", "relative", "all_with_rotary", "all_with_relative")
WIDE = {
    attention: {"attention_forward", "attention_backward_kv", "attention_backward_q"},
    guided: {"attention_forward", "attention_backward_q"},
}
"""Kernels that repeat products at a head width of 256, which no recipe has: 4 warps, or tiles of
128 rows, take every register of a thread there, or more."""


def repeated(
    compiled_ok: CompiledOk, launches: Sequence[Launch], kernels: set[str]
) -> dict[str, list[aot.Product]]:
    """The repeated products of each kernel, all of which have products."""
    chosen = [x for x in launches if x.kernel.fn.__name__ in kernels]
    found = {}
    for name, needs in compiled_ok(chosen, 90, products=kernels).items():
        products = aot.products(needs.ttgir)
        assert len(products) >= 2, name
        found[name] = [x for x in products if x.is_repeated]
    return found


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.representative(width=64, features=["plain", "all_with_rotary", "all_with_relative"])
@pytest.mark.representative(width=128, features="all_with_relative")
def test_attention_computes_each_score_once(
    compiled_ok: CompiledOk, width: int, features: str
) -> None:
    given = attention.FEATURES[features]
    kernels = attention._kernels(**given)
    found = repeated(compiled_ok, attention._launches(width=width, **given), kernels)
    assert found == {name: [] for name in kernels}


@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.representative(width=64)
def test_guided_attention_computes_each_score_once(
    compiled_ok: CompiledOk, width: int, dropout: float
) -> None:
    launches = guided._launches(width=width, dropout=dropout)
    found = repeated(compiled_ok, launches, guided.KERNELS)
    assert found == {name: [] for name in guided.KERNELS}


@pytest.mark.extended
def test_the_exceptions_are_known(compiled_ok: CompiledOk) -> None:
    """What no longer repeats a product must leave the list."""
    for operation, expected in WIDE.items():
        found = repeated(compiled_ok, operation._launches(width=256), operation.KERNELS)
        assert {name for name, products in found.items() if products} == expected


def test_a_repeated_product_is_found() -> None:
    """The text of the compiler for 64 x 32 scores in 8 warps, and for 128 x 32."""
    ttgir = """
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = []}>
#blocked = #ttg.blocked<{warpsPerCTA = [8, 1], order = [1, 0]}>
    %1 = ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<64x128> -> tensor<64x32xf32, #mma> loc(#1)
    %2 = tt.dot %a, %b, %c : tensor<128x16xf16> -> tensor<128x32xf32, #mma> loc(#2)
    %3 = tt.dot %a, %b, %c : tensor<128x16xf16> -> tensor<128x32xf32, #blocked> loc(#2)
"""
    first, second = aot.products(ttgir)
    assert first == aot.Product(64, 32, 8, 1)
    assert first.is_repeated
    assert not second.is_repeated
