"""The backend ``cpp`` of attention: through the public functions, against the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels import (
    BackendUnavailable,
    PackedLayout,
    RelativeBias,
    Rotary,
    attention,
    guided_attention,
)
from effasr_kernels.attention import OPERATION as attention_op
from effasr_kernels.guided_attention import OPERATION as guided_op
from effasr_kernels.runtime import native
from effasr_kernels.shared.cpu.attention import Call
from effasr_kernels.testing.conformance import (
    Case,
    Packed,
    Shared,
    Variation,
    check_dispatcher,
    check_kernel,
    evaluate,
)
from effasr_kernels.testing.tolerance import AWKWARD_LENGTHS
from tests.support.attention_arguments import attention_arguments

HEADS, WIDTH = 2, 24
LENGTHS = (5, 0, 33, 1, 70)
KINDS = ("plain", "causal", "cross", "rotary", "rotary_cross", "relative", "relative_causal")
EVERY = (*KINDS, "relative_cross", "guided")
each_kind = pytest.mark.parametrize("kind", EVERY)


@pytest.fixture(scope="module", autouse=True)
def _library(cpp_extension: Path) -> Iterator[None]:
    """That of a build of these sources."""
    effasr_kernels.__path__.append(str(cpp_extension / "effasr_kernels"))
    caches = native._load, native.unsupported_reason
    for cache in caches:
        cache.cache_clear()
    assert native.unsupported_reason() is None
    yield
    effasr_kernels.__path__.pop()
    for cache in caches:
        cache.cache_clear()


def _case_for(kind: str, lengths: tuple[int, ...], **options: Any) -> Callable[[str], Case]:
    """Calls by a backend; the gradient is by the tensors of the position as well."""
    lengths_k = lengths[::-1] if "cross" in kind or kind == "guided" else lengths
    rows = lambda counts: [torch.randn(n, HEADS, WIDTH, dtype=torch.float64) for n in counts]
    packed = {"q": rows(lengths), "k": rows(lengths_k), "v": rows(lengths_k)}
    shared = {}
    if "relative" in kind:
        sizes = {"content_bias": (), "position_bias": (), "table": (2 * max(lengths) + 3,)}
        for name, size in sizes.items():
            shared[name] = torch.randn(*size, HEADS, WIDTH, dtype=torch.float64)
    results = ("q", "q") if kind == "guided" else ("q",)

    def case_for(backend: str | None) -> Case:
        def run(packed: Packed, shared: Shared) -> Tensor | tuple[Tensor, ...]:
            q, k, v = packed["q"], packed["k"], packed["v"]
            values = q.values, k.values, v.values
            given = options | {"backend": backend}
            if kind == "guided":
                return guided_attention(*values, q.layout, k.layout, sigma=0.3, **given)
            position = RelativeBias(**shared) if shared else None
            if "rotary" in kind:
                position = Rotary(base=100.0, fraction=0.5)
            layouts = (q.layout, k.layout) if "cross" in kind else (q.layout,)
            return attention(*values, *layouts, causal="causal" in kind, position=position, **given)

        return Case(run, packed, shared, results=results)

    return case_for


@each_kind
@pytest.mark.parametrize("name", [*AWKWARD_LENGTHS, "mixed"])
def test_keeps_the_contract(name: str, kind: str) -> None:
    lengths = tuple(AWKWARD_LENGTHS.get(name, LENGTHS))
    check_kernel(_case_for(kind, lengths), torch.float32, backend="cpp")


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keeps_the_contract_in_narrow_types(kind: str, dtype: torch.dtype) -> None:
    check_kernel(_case_for(kind, LENGTHS), dtype, backend="cpp")


@each_kind
@pytest.mark.representative(kind=["plain", "rotary_cross", "relative_causal", "guided"])
def test_compiles(kind: str) -> None:
    """In types that `check_compiler` does not take."""
    case = _case_for(kind, (5, 0, 2))("cpp")
    torch._dynamo.reset()
    compiled = lambda run: torch.compile(run, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        how = Variation(tail=3, extra=1, dtype=dtype)
        _assert_close(evaluate(case, how, compiled), evaluate(case, how))


@each_kind
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_company_and_threads_change_no_bit(kind: str, dropout: float) -> None:
    """By default, on one thread and on three, beside others, before a tail, and alone."""
    options = {"dropout": dropout, "seed": 7} if dropout else {}
    case = _case_for(kind, LENGTHS, **options)(None)
    plain = Variation(dtype=torch.float32)
    expected = evaluate(case, plain)
    torch.set_num_threads(3)
    try:
        _assert_equal(evaluate(case, plain), expected)
    finally:
        torch.set_num_threads(1)
    _assert_equal(evaluate(case, replace(plain, tail=9, extra=4)), expected)
    if dropout:
        return
    if kind != "guided":
        # `evaluate` draws upstream gradients by a sequence's place, so forward only.
        order = (4, 2, 0, 1, 3)
        found = evaluate(case, replace(plain, order=order)).rows["result 0"]
        assert all(map(torch.equal, found, expected.rows["result 0"]))
    for n in range(len(LENGTHS)):
        alone = replace(case, packed={name: [x[n]] for name, x in case.packed.items()})
        found = evaluate(alone, plain)
        for i in range(len(case.results)):
            assert torch.equal(found.rows[f"result {i}"][0], expected.rows[f"result {i}"][n])


def _assert_equal(actual: Any, expected: Any) -> None:
    for name, pieces in expected.rows.items():
        assert all(map(torch.equal, actual.rows[name], pieces)), name
    for name, gradient in expected.shared.items():
        assert torch.equal(actual.shared[name], gradient), name


def _assert_close(actual: Any, expected: Any) -> None:
    for name, pieces in expected.rows.items():
        for x, y in zip(actual.rows[name], pieces, strict=True):
            torch.testing.assert_close(x, y, msg=name)
    for name, gradient in expected.shared.items():
        torch.testing.assert_close(actual.shared[name], gradient, msg=name)


def test_parts_of_one_projection_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout.from_lengths(LENGTHS)
    projection = torch.randn(layout.rows, 3, HEADS, WIDTH)
    q, k, v = projection.unbind(1)
    expected = attention(*(x.contiguous() for x in (q, k, v)), layout, backend="cpp")

    def copied(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a copy was made")

    monkeypatch.setattr(Tensor, "contiguous", copied)
    assert torch.equal(attention(q, k, v, layout, backend="cpp"), expected)


def test_is_the_first_on_a_cpu_except_for_float64() -> None:
    layout = PackedLayout.from_lengths([3])
    serving_by_dtype = {
        **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), "_cpp"),
        torch.float64: "reference",
    }
    for dtype, serving in serving_by_dtype.items():
        q = torch.randn(3, HEADS, WIDTH, dtype=dtype)
        found = attention_op.select(attention_arguments(q, q, q, layout, layout))
        assert found.__name__.rsplit(".", 1)[1] == serving
    x, reason = torch.zeros(3, HEADS, WIDTH).double(), "float64 is for the reference"
    with pytest.raises(BackendUnavailable, match=f"cpp: {reason}"):
        attention(x, x, x, layout, backend="cpp")
    with pytest.raises(BackendUnavailable, match=f"cpp: {reason}"):
        guided_attention(x, x, x, layout, layout, sigma=0.3, backend="cpp")
    assert guided_op.backends.keys() >= {"cpp"}


def test_autocast_to_bfloat16_rounds_the_inputs_and_the_result_alone() -> None:
    layout = PackedLayout.from_lengths([3, 5])
    q = torch.randn(8, HEADS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(q, q, q, layout)
    rounded = q.bfloat16().float()
    expected = attention(rounded, rounded, rounded, layout, backend="cpp")
    assert torch.equal(y, expected.bfloat16())


@pytest.mark.parametrize("kind", ["plain", "guided"])
def test_dropout_is_repeated_by_its_seed(kind: str) -> None:
    """Some weights fall, others are scaled: the mean stays; another seed drops others."""
    layout = PackedLayout.from_lengths([64, 64])
    q, v = torch.zeros(128, HEADS, WIDTH), torch.ones(128, HEADS, WIDTH)

    def call(seed: int) -> Tensor:
        options: dict[str, Any] = {"dropout": 0.25, "seed": seed, "backend": "cpp"}
        if kind == "guided":
            return guided_attention(q, q, v, layout, layout, sigma=0.3, **options)[0]
        return attention(q, q, v, layout, **options)

    first = call(2**61 + 5)
    assert torch.equal(first, call(2**61 + 5))
    assert not torch.equal(first, call(5))
    # 4 x 64 x 64 weights of variance (1 - p) / p / 64^2 each.
    assert abs(float(first.mean()) - 1) < 5 * (0.25 / 0.75 / (2 * HEADS * 64 * 64)) ** 0.5
    assert float(first.std()) > 0.01


@pytest.mark.parametrize("kind", ["plain", "relative", "rotary", "guided"])
def test_counts_the_flops_of_the_definition(kind: str) -> None:
    """And works under a dispatch mode, in the dtype that the kernels serve."""
    check_dispatcher(_case_for(kind, (5, 0, 3))(None))


def _call(**changed: Any) -> Call:
    layout = PackedLayout.from_lengths(LENGTHS, rows=111)
    q, k, v = torch.randn(111, 3, HEADS, WIDTH).unbind(1)
    given = {"op": "attention", "q": q, "k": k, "v": v, "layout_q": layout, "layout_k": layout}
    return Call(**(given | {"scale": 1.0, "dropout": 0.0, "seed": None} | changed))


def _layout(*offsets: int, dtype: torch.dtype = torch.int32) -> PackedLayout:
    return PackedLayout(torch.tensor(offsets, dtype=dtype), offsets, 111)


BIAS = torch.zeros(HEADS, WIDTH)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": torch.zeros(111, 2, 24).double()}, "`k` must be float32, but is torch.float64"),
        ({"k": torch.zeros(111, 2, 24, device="meta")}, "`k` must be on a CPU, but is on meta"),
        ({"v": torch.zeros(110, 2, 24)}, r"`v` must have shape \(111, 2, 24\), but is \(110, 2, "),
        (
            {"layout_q": _layout(0, 5, 5, 38, 39, 109, dtype=torch.int64)},
            "`layout_q.cu_seqlens` must be int32|`layout_q.cu_seqlens` must be int32",
        ),
        ({"layout_k": _layout(0, 9, 5, 39, 40, 109)}, "must rise from 0 to at most 111 rows"),
        ({"layout_k": _layout(0, 9, 15, 39, 40, 112)}, "must rise from 0 to at most 111 rows"),
        ({"layout_k": _layout(1, 9, 15, 39, 40, 41)}, "must rise from 0 to at most 111 rows"),
        ({"layout_k": _layout(0, 9)}, "`layout_k` must have 5 sequences, as `layout_q` does"),
        (
            {"position": (BIAS, BIAS, torch.zeros(137, HEADS, WIDTH))},
            r"`position.table` must have an odd number of at least 2 \* 70 - 1 rows",
        ),
        (
            {"position": (BIAS, BIAS, torch.zeros(142, HEADS, WIDTH))},
            r"`position.table` must have an odd number of at least 2 \* 70 - 1 rows",
        ),
        (
            {"position": (BIAS[:1], BIAS, torch.zeros(139, HEADS, WIDTH))},
            r"`position.content_bias` must have shape \(2, 24\)",
        ),
    ],
    ids=lambda x: None if isinstance(x, dict) else x[:40],
)
def test_what_the_library_could_not_read_is_named(changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changed).forward()


def test_a_backward_of_other_shapes_is_refused() -> None:
    call = _call()
    out, softmax, _ = call.forward()
    for wrong, message in (
        ((out[1:], None, out, softmax, None), "`d_out` must have shape"),
        ((out, None, out, softmax[..., 0], None), "`softmax` must have shape"),
        ((out.mT.contiguous().mT, None, out, softmax, None), "`d_out` must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            call.backward(*wrong)
