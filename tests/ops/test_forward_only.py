"""The operations without a backward as compilers, fake tensors and counters of FLOPs see them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import effasr_kernels
from effasr_kernels import OPERATIONS
from effasr_kernels.runtime.example import ExampleInputs
from effasr_kernels.runtime.torch_op import ForwardOnlyOp

EXAMPLES = {
    example.label: (op, example)
    for op in OPERATIONS.values()
    if isinstance(op, ForwardOnlyOp)
    for example in op.examples
}


class _Inputs(ExampleInputs):
    """Makes floating tensors, or hands out those that are given instead."""

    def __init__(self, given: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._given = None if given is None else iter(given)

    def floating(self, *shape: int, differentiable: bool = True) -> Tensor:
        self.tensors.append(super().floating(*shape))
        return self.tensors[-1] if self._given is None else next(self._given)


@dataclass(frozen=True)
class Call:
    """A call of an operation.

    Attributes:
        call: Makes it, from floating tensors.
        tensors: These, by the names of the arguments.
        flops: Of its real rows.
        operation: As the dispatcher calls it.
        written: Which of the tensors it writes to.
    """

    call: Callable[..., Any]
    named: dict[str, Tensor]
    flops: int
    operation: str
    written: tuple[str, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.named.values())


def _case(name: str) -> Call:
    op, example = EXAMPLES[name]
    inputs = _Inputs()
    given = example.arguments(inputs)
    named = {next(key for key, value in given.items() if value is x): x for x in inputs.tensors}
    run = getattr(effasr_kernels, op.name)
    call = lambda *tensors: run(**example.arguments(_Inputs(tensors)))
    in_place = op.name == "decode_attention" and "new_k" in given
    written = op.written if op.name != "decode_attention" or in_place else ()
    return Call(call, named, example.flops, op.name + "_in_place" * in_place, written)


each_call = pytest.mark.parametrize("name", EXAMPLES)


def _results(outcome: Any) -> list[Tensor]:
    return [] if outcome is None else [outcome] if isinstance(outcome, Tensor) else list(outcome)


def _run(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Results, and what the arguments hold afterwards, of copies."""
    copies = [x.clone() for x in tensors]
    return [*_results(call(*copies)), *copies]


@each_call
def test_counts_the_work_of_real_rows_alone(name: str) -> None:
    case = _case(name)
    expected = _run(case.call, case.tensors)
    with FlopCounterMode(display=False) as counter:
        found = _run(case.call, case.tensors)
    assert counter.get_total_flops() == case.flops
    assert [str(op) for op in counter.get_flop_counts()["Global"]] == [f"effasr.{case.operation}"]
    assert all(map(torch.equal, found, expected))


@each_call
def test_fake_results_are_like_real_ones(name: str) -> None:
    case = _case(name)
    real = _results(case.call(*case.tensors))
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, counter:
        fake = _results(case.call(*(mode.from_tensor(x) for x in case.tensors)))
    for x, y in zip(fake, real, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    # Lengths that are not known count as the room that there is.
    assert case.flops <= counter.get_total_flops() <= 4 * case.flops


@each_call
def test_passes_the_checks_of_torch_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case(name)
    seen: list[list[Any]] = []

    def note(self: ForwardOnlyOp, arguments: Any, backend: Any = None) -> Any:
        seen.append(self.flatten(arguments, backend))

    monkeypatch.setattr(ForwardOnlyOp, "__call__", note)
    case.call(*case.tensors)
    torch.library.opcheck(getattr(torch.ops.effasr, case.operation).default, seen[0])


@each_call
def test_the_compiler_traces_it_and_what_it_writes(name: str) -> None:
    torch._dynamo.reset()
    case = _case(name)
    compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager")
    expected = _run(case.call, case.tensors)
    assert all(map(torch.equal, _run(compiled, case.tensors), expected))
    after = expected[-len(case.tensors) :]
    changed = [not torch.equal(x, y) for x, y in zip(case.tensors, after, strict=True)]
    assert changed == [name in case.written for name in case.named]


@each_call
def test_refuses_gradients(name: str) -> None:
    case = _case(name)
    leaves = [x.clone().requires_grad_(i == 0) for i, x in enumerate(case.tensors)]
    with pytest.raises(RuntimeError, match="requires a gradient, which this operation does not"):
        case.call(*leaves)
    with torch.no_grad():
        for result in _results(case.call(*leaves)):
            assert not result.requires_grad
    with torch.inference_mode():
        case.call(*leaves)


@pytest.fixture
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.usefixtures("autocast")
def test_under_autocast_a_query_takes_the_dtype_of_its_pages() -> None:
    case = _case("decode_attention, self")
    q, k, v, new_k, new_v = case.tensors
    expected = case.call(q.bfloat16().float(), k, v, new_k, new_v)
    assert torch.equal(case.call(q.bfloat16(), k, v, new_k, new_v), expected)


@pytest.mark.usefixtures("autocast")
def test_under_autocast_a_projection_is_narrow_and_its_sums_are_not() -> None:
    case = _case("projected_top_k")
    found = case.call(*case.tensors)
    with torch.autocast("cpu", enabled=False):
        expected = case.call(*(x.bfloat16() for x in case.tensors))
    assert found[0].dtype == torch.float32
    assert all(map(torch.equal, found, expected))
