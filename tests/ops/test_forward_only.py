"""The operations without a backward as compilers, fake tensors and counters of FLOPs see them."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import OPERATIONS, append_to_pages, decode_attention, projected_top_k
from effasr_kernels.runtime.forward_only import ForwardOnly

HEADS, WIDTH, CLASSES = 2, 4, 6
KEYS = (3, 0, 6)


@dataclass(frozen=True)
class Call:
    """A call of an operation.

    Attributes:
        call: Makes it, from floating tensors.
        tensors: These.
        flops: Of its real rows.
        written: Which of the tensors it writes to.
        operation: As the dispatcher calls it.
    """

    call: Callable[..., Any]
    tensors: list[Tensor]
    flops: int
    operation: str
    written: tuple[int, ...] = ()


def _pages() -> list[Tensor]:
    return [torch.randn(7, 2, HEADS, WIDTH) for _ in range(2)]


def _table() -> Tensor:
    return torch.tensor([[5, 1, 0], [0, 0, 0], [2, 6, 3]], dtype=torch.int32)


def _cross() -> Call:
    call = lambda q, k, v: decode_attention(q, k, v, _table(), torch.tensor(KEYS).int())
    tensors = [torch.randn(6, HEADS, WIDTH), *_pages()]
    return Call(call, tensors, 4 * HEADS * WIDTH * 2 * sum(KEYS), "decode_attention")


def _self() -> Call:
    call = lambda q, k, v, new_k, new_v: decode_attention(
        q, k, v, _table(), torch.tensor(KEYS).int(), new_k=new_k, new_v=new_v, splits=2
    )
    q, new_k, new_v = torch.randn(3, 3, HEADS, WIDTH)
    flops = 4 * HEADS * WIDTH * sum(KEYS)
    return Call(
        call, [q, *_pages(), new_k, new_v], flops, "decode_attention_in_place", written=(1, 2)
    )


def _append() -> Call:
    call = lambda k, v, k_pages, v_pages: append_to_pages(
        k, v, k_pages, v_pages, _table(), torch.tensor(KEYS).int() - 1
    )
    tensors = [*torch.randn(2, 3, HEADS, WIDTH), *_pages()]
    return Call(call, tensors, 0, "append_to_pages", written=(2, 3))


def _top_k() -> Call:
    call = lambda h, w, b: projected_top_k(h, w, bias=b, k=2, classes=CLASSES - 1)
    tensors = [torch.randn(4, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)]
    return Call(call, tensors, 2 * 4 * (CLASSES - 1) * WIDTH, "projected_top_k")


CALLS = {"cross": _cross, "self": _self, "append": _append, "top_k": _top_k}
each_call = pytest.mark.parametrize("name", CALLS)


def _registered(name: str) -> Any:
    return importlib.import_module(f"effasr_kernels.{name}.torch_op").call


def _results(outcome: Any) -> list[Tensor]:
    return [] if outcome is None else [outcome] if isinstance(outcome, Tensor) else list(outcome)


def _run(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Results, and what the arguments hold afterwards, of copies."""
    copies = [x.clone() for x in tensors]
    return [*_results(call(*copies)), *copies]


def test_every_operation_is_here() -> None:
    forward_only = {n for n in OPERATIONS if isinstance(_registered(n), ForwardOnly)}
    assert {make().operation.removesuffix("_in_place") for make in CALLS.values()} == forward_only


@each_call
def test_counts_the_work_of_real_rows_alone(name: str) -> None:
    case = CALLS[name]()
    expected = _run(case.call, case.tensors)
    with FlopCounterMode(display=False) as counter:
        found = _run(case.call, case.tensors)
    assert counter.get_total_flops() == case.flops
    assert [str(op) for op in counter.get_flop_counts()["Global"]] == [f"effasr.{case.operation}"]
    assert all(map(torch.equal, found, expected))


@each_call
def test_fake_results_are_like_real_ones(name: str) -> None:
    case = CALLS[name]()
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
    case = CALLS[name]()
    seen: list[list[Any]] = []

    def note(self: ForwardOnly, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.flatten(*args, **kwargs))

    monkeypatch.setattr(ForwardOnly, "__call__", note)
    case.call(*case.tensors)
    torch.library.opcheck(getattr(torch.ops.effasr, case.operation).default, seen[0])


@each_call
def test_the_compiler_traces_it_and_what_it_writes(name: str) -> None:
    torch._dynamo.reset()
    case = CALLS[name]()
    compiled = torch.compile(case.call, fullgraph=True, backend="aot_eager")
    expected = _run(case.call, case.tensors)
    assert all(map(torch.equal, _run(compiled, case.tensors), expected))
    after = expected[-len(case.tensors) :]
    changed = [not torch.equal(x, y) for x, y in zip(case.tensors, after, strict=True)]
    assert changed == [i in case.written for i in range(len(changed))]


@each_call
def test_refuses_gradients(name: str) -> None:
    case = CALLS[name]()
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
    case = _self()
    q, k, v, new_k, new_v = case.tensors
    expected = case.call(q.bfloat16().float(), k, v, new_k, new_v)
    assert torch.equal(case.call(q.bfloat16(), k, v, new_k, new_v), expected)


@pytest.mark.usefixtures("autocast")
def test_under_autocast_a_projection_is_narrow_and_its_sums_are_not() -> None:
    case = _top_k()
    found = case.call(*case.tensors)
    with torch.autocast("cpu", enabled=False):
        expected = case.call(*(x.bfloat16() for x in case.tensors))
    assert found[0].dtype == torch.float32
    assert all(map(torch.equal, found, expected))
