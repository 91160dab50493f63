"""The contract of operations on packed sequences, as checks for any implementation.

A test describes a call by a `Case`, which holds its inputs by sequence, so that a check can pack
them in another order, with a tail, or beside NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels.packed import PackedLayout, PackedSequence, pack
from tests.support.tolerance import assert_no_worse, poison

Packed = Mapping[str, PackedSequence]
Shared = Mapping[str, Tensor]
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Case:
    """A call of an operation.

    Attributes:
        run: Calls the operation with its packed and its shared tensors.
        packed: The packed arguments by name, one tensor per sequence; float64 or integer.
        shared: The other tensors, such as weights; float64.
        results: For each result, the packed argument whose layout it has; None if it has one
            number for each sequence.
        one_more: Packed arguments that have one more row than the others for each sequence,
            including empty ones.
        wide: Arguments that stay float32 beside narrow ones.
        has_true_gradient: Whether the gradient is the derivative of the value.
        rounds_inside: Whether the operation rounds intermediate results by definition.
        mixes_sequences: Whether the rows of a sequence depend on the other sequences, as with the
            statistics of a batch.
    """

    run: Callable[[Packed, Shared], Tensor | tuple[Tensor, ...]]
    packed: Mapping[str, Sequence[Tensor]]
    shared: Shared = field(default_factory=dict)
    results: tuple[str | None, ...] = (None,)
    one_more: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()
    has_true_gradient: bool = True
    rounds_inside: bool = False
    mixes_sequences: bool = False

    @property
    def sequences(self) -> int:
        return len(next(iter(self.packed.values())))

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of an argument where most have ``dtype``."""
        return torch.promote_types(dtype, torch.float32) if name in self.wide else dtype


CaseFor = Callable[[str | None], Case]
"""Returns the case that calls a given backend, with the same tensors each time."""


@dataclass(frozen=True, slots=True)
class Variation:
    """A way to pack a case; by default in order, in float64, on a CPU.

    Attributes:
        order: The sequence at each position.
        tail: Number of rows past the last sequence; they hold NaN or the ignored class.
        extra: Number of empty sequences at the end.
        poisoned: A sequence to fill with NaN.
        strides: How the tensors lie in larger ones: every other channel, or as parts of wider rows.
        nan_upstream: Whether the upstream gradient of the tail is NaN.
    """

    order: tuple[int, ...] | None = None
    tail: int = 0
    extra: int = 0
    poisoned: int | None = None
    strides: Literal["", "channels", "rows"] = ""
    nan_upstream: bool = False
    dtype: torch.dtype = torch.float64
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a constant)


_PLAIN = Variation()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results and gradients, each by name and sequence, in the order of the case.

    Attributes:
        rows: Results and gradients of packed arguments, for each sequence.
        tails: The same past the last sequence of the case.
        shared: Gradients of the shared tensors.
    """

    rows: dict[str, list[Tensor]]
    tails: dict[str, Tensor]
    shared: dict[str, Tensor]


def evaluate(
    case: Case, variation: Variation, wrap: Callable[..., object] | None = None
) -> Outcome:
    """Run a case forward and backward; ``wrap`` is applied to ``case.run``, such as a compiler."""
    # The upstream gradient of each sequence is the same in every variation.
    order = tuple(range(case.sequences)) if variation.order is None else variation.order
    packed = {name: _pack(case, name, order, variation) for name in case.packed}
    shared = {
        name: _leaf(x.to(variation.device, case.dtype_of(name, variation.dtype)), variation.strides)
        for name, x in case.shared.items()
    }
    run = case.run if wrap is None else wrap(case.run)
    results = run(packed, shared)  # type: ignore[operator]
    results = (results,) if isinstance(results, Tensor) else results
    leaves = {name: x.values for name, x in packed.items() if x.values.requires_grad} | shared
    upstream = [_upstream(case, i, result, order, variation) for i, result in enumerate(results)]
    grads = torch.autograd.grad(results, list(leaves.values()), upstream, materialize_grads=True)
    outcome = Outcome({}, {}, {})
    for i, result in enumerate(results):
        lengths = _lengths(case, case.results[i], order)
        _record(outcome, f"result {i}", result.detach().cpu(), lengths, order)
    for name, gradient in zip(leaves, grads, strict=True):
        if name in shared:
            outcome.shared[f"gradient of {name}"] = gradient.cpu()
        else:
            lengths = _lengths(case, name, order)
            _record(outcome, f"gradient of {name}", gradient.cpu(), lengths, order)
    return outcome


def check_order(case: Case, base: Variation = _PLAIN) -> None:
    """Check that permuting the sequences permutes the results."""
    order = tuple(reversed(range(case.sequences)))
    _assert_same(evaluate(case, replace(base, order=order)), evaluate(case, base))


def check_static_shape(case: Case, base: Variation = _PLAIN) -> None:
    """Check that a tail of NaN and further empty sequences change nothing, and become zeros."""
    outcome = evaluate(case, replace(base, tail=5, extra=2))
    _assert_same(outcome, evaluate(case, base))
    assert all(tail.numel() for tail in outcome.tails.values())
    _assert_tails_are_zero(outcome)


def check_no_sequences(case: Case, base: Variation = _PLAIN) -> None:
    """Check a batch without a sequence: without a row, and with a tail alone."""
    for tail in (0, 3):
        outcome = evaluate(case, replace(base, order=(), tail=tail))
        _assert_tails_are_zero(outcome)
        for name, gradient in outcome.shared.items():
            assert bool((gradient == 0).all()), f"{name} is not zero"


def check_neighbours(case: Case, base: Variation = _PLAIN) -> None:
    """Check that NaN in one sequence affects no other, forward or backward."""
    if case.mixes_sequences:
        return
    plain = evaluate(case, base)
    for n in range(case.sequences):
        for name, pieces in evaluate(case, replace(base, poisoned=n)).rows.items():
            for other, expected in enumerate(plain.rows[name]):
                if other != n:
                    _assert_close(f"{name} of {other} beside {n}", pieces[other], expected)


def check_strides(case: Case, base: Variation = _PLAIN) -> None:
    """Check that tensors need not be contiguous."""
    expected = evaluate(case, base)
    for strides in ("channels", "rows"):
        _assert_same(evaluate(case, replace(base, strides=strides)), expected)


def check_repeats(case: Case, base: Variation = _PLAIN) -> None:
    """Check that two runs are bitwise equal."""
    first, second = evaluate(case, base), evaluate(case, base)
    for name, pieces in first.rows.items():
        assert all(map(torch.equal, pieces, second.rows[name])), name
    for name, gradient in first.shared.items():
        assert torch.equal(gradient, second.shared[name]), name


def check_values(
    case_for: CaseFor,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    backend: str = "triton",
    *,
    tail: int = 0,
    cancelled: float = 0.0,
) -> None:
    """Check that results and gradients are as accurate as the dtype allows."""
    # Their errors against the reference in float64 are at most twice those of the reference in the
    # same dtype, plus two ulp. The kernel gets a tail of NaN, which becomes zeros.
    reference = case_for("reference")
    gold = evaluate(_rounded(reference, dtype), _PLAIN)
    baseline = evaluate(reference, Variation(dtype=dtype))
    with_tail = Variation(
        dtype=dtype, device=torch.device(device), tail=tail, nan_upstream=tail > 0
    )
    actual = evaluate(case_for(backend), with_tail)
    pairs = zip(_pairs(actual, gold), _pairs(baseline, gold), strict=True)
    for (name, x, exact), (_, same_dtype, _) in pairs:
        finite = exact.isfinite()
        assert torch.equal(x.isfinite(), finite), f"{name} in {dtype}: not finite elsewhere"
        try:
            assert_no_worse(x[finite], exact[finite], same_dtype[finite], cancelled=cancelled)
        except AssertionError as error:
            raise AssertionError(f"{name} in {dtype}: {error}") from None
    _assert_tails_are_zero(actual)


def check_kernel(
    case_for: CaseFor,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    backend: str = "triton",
    *,
    cancelled: float = 0.0,
) -> None:
    """`check_values`, and the checks of the contract that need no derivative."""
    check_values(case_for, dtype, device, backend, cancelled=cancelled)
    kernel, base = case_for(backend), Variation(dtype=dtype, device=torch.device(device))
    for check in (
        *(check_order, check_static_shape, check_no_sequences),
        *(check_neighbours, check_strides, check_repeats),
    ):
        check(kernel, base)


def check_gradients(case: Case) -> None:
    """Check every gradient against finite differences along random directions."""
    if not case.has_true_gradient:
        return
    order = tuple(range(case.sequences))
    packed = {name: _pack(case, name, order, Variation()) for name in case.packed}
    leaves = {name: x.values for name, x in packed.items() if x.values.requires_grad}
    leaves |= {name: _leaf(x, "") for name, x in case.shared.items()}

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        new = dict(zip(leaves, values, strict=True))
        inputs = {
            name: PackedSequence(new.get(name, x.values), x.layout) for name, x in packed.items()
        }
        results = case.run(inputs, {name: new[name] for name in case.shared})
        results = (results,) if isinstance(results, Tensor) else results
        # The difference of two infinite losses would be NaN.
        return tuple(torch.where(result.isinf(), 0, result) for result in results)

    torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=True)


def check_dtypes(case: Case) -> None:
    """Check that narrow inputs are summed in float32, so that only the results are rounded."""
    if case.rounds_inside:
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gold = evaluate(_rounded(case, dtype), _PLAIN)
        pairs = list(_pairs(evaluate(case, Variation(dtype=dtype)), gold))
        largest = max(
            (y[y.isfinite()].abs().max().item() for _, _, y in pairs if y.isfinite().any()),
            default=0.0,
        )
        for name, x, y in pairs:
            finite = y.isfinite()
            assert torch.equal(x.isfinite(), finite), f"{name} in {dtype}"
            x, y = x[finite], y[finite]
            rounding = _spacing(y, x.dtype) + 2**-18 * y.abs().amax() if y.numel() else y
            # Of terms that cancel, the rounding is left: they are as large as other results.
            rounding = rounding + 2**-21 * min(largest, 1.0)
            error = (x.double() - y).abs()
            assert bool((error <= rounding).all()), f"{name} in {dtype} errs by {error.max()}"


def check_dispatcher(case: Case) -> None:
    """Check that a call through torch.library under FlopCounterMode has the same results."""
    plain = evaluate(case, Variation())
    _assert_same(evaluate(case, Variation(), _counted), plain)


def check_compiler(case: Case, base: Variation = _PLAIN) -> None:
    """Check that torch.compile traces the call without a graph break, with the same results."""
    torch._dynamo.reset()
    compile_whole = lambda run: torch.compile(run, fullgraph=True, backend="aot_eager")
    variation = replace(base, tail=3, extra=1)
    _assert_same(evaluate(case, variation, compile_whole), evaluate(case, variation))


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_order,
    check_static_shape,
    check_no_sequences,
    check_neighbours,
    check_strides,
    check_repeats,
    check_gradients,
    check_dtypes,
    check_dispatcher,
)
"""The fast checks; `check_compiler` takes a second or two."""


def _rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case with inputs rounded to their dtypes, as float64."""

    def rounded(name: str, x: Tensor) -> Tensor:
        return x.to(case.dtype_of(name, dtype)).double() if x.is_floating_point() else x

    packed = {name: [rounded(name, x) for x in pieces] for name, pieces in case.packed.items()}
    shared = {name: rounded(name, x) for name, x in case.shared.items()}
    return replace(case, packed=packed, shared=shared)


def _counted(run: Callable[..., object]) -> Callable[..., object]:
    def call(packed: Packed, shared: Shared) -> object:
        with FlopCounterMode(display=False) as counter:
            results = run(packed, shared)
        counts = counter.get_flop_counts()["Global"]
        assert all("effasr" in str(op) for op in counts), f"counted past the operation: {counts}"
        return results

    return call


def _pack(case: Case, name: str, order: Sequence[int], variation: Variation) -> PackedSequence:
    pieces = [case.packed[name][n].to(variation.device) for n in order]
    like = case.packed[name][0]
    total = sum(piece.shape[0] for piece in pieces)
    tail = variation.tail + (variation.extra if name in case.one_more else 0)
    if pieces:
        packed = pack(pieces, rows=total + tail, num_sequences=len(pieces) + variation.extra)
    else:
        values = like.new_zeros(tail, *like.shape[1:], device=variation.device)
        packed = PackedSequence(values, PackedLayout.from_lengths((), values.device, rows=tail))
    if not like.is_floating_point():
        packed.values[total:] = _IGNORED
        return packed
    values = poison(packed.values, packed.layout)
    if variation.poisoned is not None:
        values = poison(values, packed.layout, order.index(variation.poisoned))
    values = values.to(case.dtype_of(name, variation.dtype))
    return PackedSequence(_leaf(values, variation.strides), packed.layout)


def _leaf(x: Tensor, strides: str) -> Tensor:
    beside = torch.full_like(x, torch.nan)
    if strides == "channels":
        x = torch.stack([x, beside], dim=-1)[..., 0]
    elif strides == "rows":
        x = torch.cat([x, beside], dim=-1)[..., : x.shape[-1]]
    return x.detach().requires_grad_()


def _lengths(case: Case, name: str | None, order: Sequence[int]) -> list[int]:
    """Rows of each sequence, in order; one each if ``name`` is None."""
    return [1 if name is None else case.packed[name][n].shape[0] for n in order]


def _upstream(
    case: Case, index: int, result: Tensor, order: Sequence[int], variation: Variation
) -> Tensor:
    pieces = []
    for n, length in zip(order, _lengths(case, case.results[index], order), strict=True):
        generator = torch.Generator().manual_seed(1000 * index + n)
        shape = length, *result.shape[1:]
        pieces.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    missing = result.shape[0] - sum(piece.shape[0] for piece in pieces)
    is_nan = variation.nan_upstream and case.results[index] is not None
    fill = torch.nan if is_nan else 1.0
    pieces.append(torch.full((missing, *result.shape[1:]), fill, dtype=torch.float64))
    # Exact in both narrow dtypes, so that only the rounding of the outcome is measured.
    exact = torch.cat(pieces).to(torch.bfloat16).to(torch.float16)
    return exact.to(result.device, result.dtype)


def _record(
    outcome: Outcome, name: str, values: Tensor, lengths: Sequence[int], order: Sequence[int]
) -> None:
    *pieces, tail = values.split([*lengths, values.shape[0] - sum(lengths)])
    by_sequence = dict(zip(order, pieces, strict=True))
    outcome.rows[name] = [by_sequence[n] for n in range(len(order))]
    outcome.tails[name] = tail


def _spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One step of a dtype at each value: twice the error of rounding to it."""
    limits = torch.finfo(dtype)
    return limits.eps * x.abs().clamp_min(limits.smallest_normal)


def _pairs(actual: Outcome, expected: Outcome) -> list[tuple[str, Tensor, Tensor]]:
    packed = [
        (name, torch.cat(pieces), torch.cat(expected.rows[name]))
        for name, pieces in actual.rows.items()
    ]
    return packed + [(name, x, expected.shared[name]) for name, x in actual.shared.items()]


def _assert_tails_are_zero(outcome: Outcome) -> None:
    for name, tail in outcome.tails.items():
        assert bool((tail == 0).all()), f"{name} is not zero in the tail: {tail}"


def _assert_same(actual: Outcome, expected: Outcome) -> None:
    for name, x, y in _pairs(actual, expected):
        _assert_close(name, x, y)


def _assert_close(name: str, actual: Tensor, expected: Tensor) -> None:
    # Allows only another order of the same sum.
    eps = torch.finfo(expected.dtype).eps
    rtol = 2**22 * eps if expected.dtype == torch.float64 else 64 * eps
    finite = expected[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    torch.testing.assert_close(
        actual,
        expected,
        rtol=rtol,
        atol=max(1e-11, rtol * largest),
        msg=lambda text: f"{name}: {text}",
    )
