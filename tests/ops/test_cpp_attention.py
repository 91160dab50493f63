"""The backend ``cpp`` of attention, through the public functions, for each instruction set."""

import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import (
    BackendUnavailable,
    PackedLayout,
    RelativeBias,
    attention,
    guided_attention,
)
from effasr_kernels.attention import OPERATION, reference
from effasr_kernels.guided_attention import OPERATION as GUIDED
from effasr_kernels.guided_attention import reference as guided_reference
from effasr_kernels.shared.cpu import attention as cpu_attention
from effasr_kernels.shared.cpu.attention import Call
from tests.support import operation_cases
from tests.support.attention_arguments import attention_arguments
from tests.support.conformance import (
    CaseFor,
    Outcome,
    Variation,
    check_kernel,
    check_values,
    evaluate,
)
from tests.support.philox import PhiloxDropout
from tests.support.tolerance import AWKWARD_LENGTHS

pytestmark = pytest.mark.usefixtures("cpp_library")
HEADS, WIDTH = 2, 24
LENGTHS = (5, 0, 33, 1, 70)
KINDS = (
    *("none", "none_causal", "none_cross", "part", "part_cross"),
    *("relative", "relative_causal", "relative_cross", "guided", "guided_cross"),
)
PLAIN = Variation(dtype=torch.float32)
Check = Callable[..., None]


@pytest.fixture
def each_instruction_set(instructions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_BEST_INSTRUCTIONS", instructions)


def _case_for(
    kind: str, lengths: tuple[int, ...], lengths_k: tuple[int, ...] | None = None, **options: Any
) -> CaseFor:
    """The table of relative positions has more rows than any sequence needs."""
    lengths_k = lengths_k or (lengths[::-1] if "cross" in kind else None)
    options = {"width": WIDTH} | options
    if kind.startswith("guided"):
        return operation_cases.guided_attention(lengths, lengths_k or lengths, **options)
    if "causal" in kind:
        options["causal"] = True
    position = kind.partition("_")[0]
    options["reach"] = max(*lengths, *(lengths_k or (0,))) + 2
    return operation_cases.attention(lengths, position, lengths_k=lengths_k, **options)


def _check(check: Check, *given: Any, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    check(_case_for(*given, **options), dtype, backend="cpp")


@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [*AWKWARD_LENGTHS.values(), LENGTHS], ids=str)
@pytest.mark.representative(lengths=[(0, 0), (1, 37, 2, 1), LENGTHS])
def test_contract(lengths: tuple[int, ...], kind: str) -> None:
    _check(check_kernel, kind, lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contract_in_narrow_types(kind: str, dtype: torch.dtype) -> None:
    _check(check_kernel, kind, LENGTHS, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS[:-2])
@pytest.mark.parametrize("length", [31, 32, 33, 127, 128, 129, 161, 513])
def test_the_edges_of_tiles(length: int, kind: str) -> None:
    """Of panels of queries, tiles of keys, and parts of the backward."""
    lengths_k = (2 * length - 20, 40) if "cross" in kind else None
    _check(check_values, kind, (length, 1), lengths_k, width=16)


@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(
            (kind, {"width": width})
            for kind in ("none", "relative")
            for width in (1, 5, 8, 16, 17, 32, 64, 80, 256)
        ),
        # Heads of queries share heads of keys; tasks add up the gradients of these.
        *(
            (kind, {"lengths": lengths, "heads": 6, "group": 3, "width": 8})
            for kind in ("none_causal", "rotary", "none_cross")
            for lengths in ((5, 0, 40, 1), (1300, 9))
            if lengths[0] < 99 or kind == "none_causal"
        ),
        # A long sequence is divided.
        *((kind, {"lengths": (3, 1100), "width": 8}) for kind in ("relative", "relative_causal")),
        *(("relative", {"scale": scale}) for scale in (0.03, -0.4)),
        # A wide diagonal's penalties are small: their digits must not be lost beside 1.
        *((kind, {"sigma": x}) for kind in KINDS[-2:] for x in (0.05, 0.4, 30.0)),
    ],
    ids=str,
)
def test_values(kind: str, options: dict[str, Any]) -> None:
    _check(check_values, kind, **({"lengths": LENGTHS} | options))


@pytest.mark.usefixtures("each_instruction_set")
def test_large_scores_do_not_overflow() -> None:
    case_for = _case_for("relative", LENGTHS, width=32, scale=100.0)
    gold = evaluate(case_for("reference"), Variation())
    actual = evaluate(case_for("cpp"), PLAIN)
    for x, y in zip(actual.rows["result 0"], gold.rows["result 0"], strict=True):
        # The rounding of scores of several hundred depends on the order of their sums.
        torch.testing.assert_close(x.double(), y, rtol=0, atol=2e-2)
    assert all(bool(x.isfinite().all()) for pieces in actual.rows.values() for x in pieces)


@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("kind", ["none", "relative_causal", "none_cross", "guided_cross"])
def test_drops_what_the_gpu_kernels_drop(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reference, guided_reference):
        monkeypatch.setattr(module, "Dropout", PhiloxDropout)
    lengths = ((5, 33, 1, 70), (150, 17, 35, 1)) if "cross" in kind else ((5, 33, 140), None)
    options = {"dropout": 0.25, "seed": 2**61 + 12345, "width": 16}
    _check(check_values, kind, *lengths, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representative(kind=["none", "part_cross", "relative_causal", "guided_cross"])
def test_compiles(kind: str) -> None:
    """In types that `check_compiler` does not take."""
    case = _case_for(kind, (5, 0, 2))("cpp")
    torch._dynamo.reset()
    compiled = lambda run: torch.compile(run, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        variation = Variation(tail=3, extra=1, dtype=dtype)
        actual, expected = evaluate(case, variation, compiled), evaluate(case, variation)
        torch.testing.assert_close(actual.rows, expected.rows)
        torch.testing.assert_close(actual.shared, expected.shared)


def _assert_equal(actual: Outcome, expected: Outcome) -> None:
    for name, pieces in expected.rows.items():
        assert all(map(torch.equal, actual.rows[name], pieces)), name
    for name, gradient in expected.shared.items():
        assert torch.equal(actual.shared[name], gradient), name


@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_company_changes_no_bit(kind: str, dropout: float) -> None:
    """Beside others, before a tail, and alone; empty sequences leave the sums of the shared."""
    case = _case_for(kind, LENGTHS, dropout=dropout, seed=7)(None)
    expected = evaluate(case, PLAIN)
    _assert_equal(evaluate(case, replace(PLAIN, tail=9, extra=4)), expected)
    if dropout:
        return
    permuted = evaluate(case, replace(PLAIN, order=(4, 2, 0, 1, 3))).rows
    for name in ("result 0", *(f"gradient of {x}" for x in "qkv")):
        assert all(map(torch.equal, permuted[name], expected.rows[name])), name
    for n in range(len(LENGTHS)):
        alone = replace(case, packed={name: [x[n]] for name, x in case.packed.items()})
        rows = evaluate(alone, PLAIN).rows
        for i in range(len(case.results)):
            assert torch.equal(rows[f"result {i}"][0], expected.rows[f"result {i}"][n])


@pytest.mark.usefixtures("each_instruction_set")
@pytest.mark.parametrize("lengths", [LENGTHS, (900, 3, 600), (40,) * 30], ids=str)
@pytest.mark.parametrize("kind", ["relative", "guided"])
def test_threads_change_no_bit(kind: str, lengths: tuple[int, ...]) -> None:
    case = _case_for(kind, lengths, dropout=0.1, seed=3)(None)
    expected = evaluate(case, PLAIN)
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            _assert_equal(evaluate(case, PLAIN), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("each_instruction_set")
def test_parts_of_one_projection_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows and heads lie apart, bitwise as copies."""
    layout = PackedLayout.from_lengths(LENGTHS)
    for shape, dim in (((3, HEADS), 1), ((HEADS, 3), 2)):
        leaf = torch.randn(layout.rows, *shape, WIDTH).requires_grad_()
        results = []
        for parts in (leaf.unbind(dim), [x.contiguous() for x in leaf.unbind(dim)]):
            y = attention(*parts, layout, backend="cpp")
            results.append((y, *torch.autograd.grad(y.square().sum(), leaf)))
        assert all(map(torch.equal, *results))
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "contiguous", lambda *_, **__: pytest.fail("a copy was made"))
        attention(*leaf.detach().unbind(2), layout, backend="cpp")


def test_memory_grows_with_rows_not_pairs() -> None:
    """Nine thousand rows would have 324 MB of scores."""
    layout = PackedLayout.from_lengths([9000])
    q, k, v = (torch.randn(9000, 1, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(2 * 9000 - 1, 1, 8, requires_grad=True)
    position = RelativeBias(torch.randn(1, 8), torch.randn(1, 8), table)
    old = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 100 * 2**20, old[1]))
        y = attention(q, k, v, layout, position=position, backend="cpp")
        gradients = torch.autograd.grad(y.sum(), [q, k, v, table])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
    assert all(bool(x.isfinite().all()) for x in gradients)


def test_instructions_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_BEST_INSTRUCTIONS", 9)
    x = torch.zeros(3, HEADS, WIDTH)
    with pytest.raises(RuntimeError, match="failed with code 2"):
        attention(x, x, x, PackedLayout.from_lengths([3]), backend="cpp")


def test_is_the_first_on_a_cpu_except_for_float64() -> None:
    layout = PackedLayout.from_lengths([3])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        q = torch.randn(3, HEADS, WIDTH, dtype=dtype)
        implementation = OPERATION.select(attention_arguments(q, q, q, layout, layout))
        expected = "reference" if dtype == torch.float64 else "_cpp"
        assert implementation.__name__.rsplit(".", 1)[1] == expected
    x, reason = torch.zeros(3, HEADS, WIDTH).double(), "cpp: float64 is for the reference"
    with pytest.raises(BackendUnavailable, match=reason):
        attention(x, x, x, layout, backend="cpp")
    with pytest.raises(BackendUnavailable, match=reason):
        guided_attention(x, x, x, layout, layout, sigma=0.3, backend="cpp")
    assert GUIDED.backends.keys() >= {"cpp"}


def _call(**changed: Any) -> Call:
    layout = PackedLayout.from_lengths(LENGTHS, rows=111)
    q, k, v = torch.randn(111, 3, HEADS, WIDTH).unbind(1)
    arguments = {"op": "attention", "q": q, "k": k, "v": v, "layout_q": layout, "layout_k": layout}
    return Call(**(arguments | {"scale": 1.0, "dropout": 0.0, "seed": None} | changed))


def _layout(*offsets: int, dtype: torch.dtype = torch.int32) -> PackedLayout:
    return PackedLayout(torch.tensor(offsets, dtype=dtype), offsets, 111)


BIAS = torch.zeros(HEADS, WIDTH)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"layout_q": _layout(0, 5, 5, 38, 39, 109, dtype=torch.int64)},
            "`layout_q.cu_seqlens` must be int32",
        ),
        *(
            ({"layout_k": _layout(*offsets)}, "must rise from 0 to at most 111 rows")
            for offsets in (
                *((0, 9, 5, 39, 40, 109), (0, 9, 15, 39, 40, 112), (1, 9, 15, 39, 40, 41)),
            )
        ),
        (
            {"position": (BIAS, BIAS, torch.zeros(137, HEADS, WIDTH))},
            r"`position.table` must have an odd number of at least 2 \* 70 - 1 rows",
        ),
    ],
    ids=lambda x: None if isinstance(x, dict) else x[:40],
)
def test_error_messages(changed: Any, message: str) -> None:
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
