import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from effasr_kernels import (
    OPERATIONS,
    Backend,
    BackendUnavailable,
    Op,
    PackedLayout,
    ReferenceOnGPUWarning,
    RelativeBias,
    allow_reference_on_gpu,
    attention,
)

CPU = torch.zeros(1)


def _backend(monkeypatch: pytest.MonkeyPatch, name: str, reason: str | None) -> str:
    """A module that says whether it can serve, and answers with its own name."""
    module = ModuleType(f"fake_{name}")
    module.why_not = lambda *args, **kwargs: reason  # type: ignore[attr-defined]
    module.run = lambda *args, **kwargs: name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Op:
    """C++ cannot be imported, Triton refuses, the reference serves."""
    return Op(
        "sum",
        {
            Backend.CPP: "effasr_kernels.no_such_module",
            Backend.TRITON: _backend(monkeypatch, "triton", "head width 7 is odd"),
            Backend.REFERENCE: _backend(monkeypatch, "reference", None),
        },
    )


@pytest.fixture
def gpu() -> Iterator[Tensor]:
    """A tensor that says it is on a GPU, on a machine that need not have one."""
    with FakeTensorMode():
        yield torch.empty(1, device="cuda")


@pytest.fixture
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("effasr_kernels.runtime.dispatch._ReferenceOnGPU.warned", set())
    before = allow_reference_on_gpu()
    yield
    allow_reference_on_gpu(before)


def test_takes_the_first_that_can_serve(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    assert op(CPU) == "reference"
    ready = Op("sum", op.modules | {Backend.TRITON: _backend(monkeypatch, "ready", None)})
    assert ready(CPU) == "ready"


def test_the_order_may_depend_on_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (Backend.TRITON, Backend.VARLEN, Backend.REFERENCE)
    modules = {name: _backend(monkeypatch, f"ordered_{name}", None) for name in names}
    asked = []

    def order(x: Tensor, *, backwards: bool) -> list[Backend]:
        asked.append(backwards)
        # Not implemented here; the operation may come to have it.
        known = [Backend.CPP, *names]
        return known[::-1] if backwards else known

    op = Op("sum", modules, order)
    assert op(CPU, backwards=False) == "ordered_triton"
    assert op(CPU, backwards=True) == "ordered_reference"
    assert asked == [False, True]
    assert op(CPU, backwards=True, backend="varlen") == "ordered_varlen"
    assert len(asked) == 2


@pytest.mark.parametrize("backend", ["triton", Backend.TRITON])
def test_a_requested_backend_is_never_replaced(op: Op, backend: Backend | str) -> None:
    message = r"^sum: no backend can run this call \(triton: head width 7 is odd\)\.$"
    with pytest.raises(BackendUnavailable, match=message):
        op(CPU, backend=backend)


def test_says_what_cannot_be_imported(op: Op) -> None:
    with pytest.raises(BackendUnavailable, match=r"cpp: cannot be imported: No module named"):
        op(CPU, backend="cpp")


def test_names_the_backends_that_exist(op: Op) -> None:
    message = "sum: `backend` must be one of triton, varlen, .*, reference, but is 'trito'"
    with pytest.raises(ValueError, match=message):
        op(CPU, backend="trito")


def test_the_reference_is_not_taken_by_itself_on_a_gpu(op: Op, gpu: Tensor) -> None:
    message = r"triton: head width 7 is odd; reference: slow on a GPU, so only on request"
    with pytest.raises(BackendUnavailable, match=message):
        op(gpu)
    assert op(gpu, backend="reference") == "reference"


@dataclass(frozen=True)
class _Holder:
    tensor: Tensor


@dataclass(frozen=True)
class _Nested:
    holder: _Holder


@pytest.mark.parametrize("hidden", ["keyword", "dataclass", "nested dataclass"])
def test_finds_the_gpu_wherever_a_tensor_is(op: Op, gpu: Tensor, hidden: str) -> None:
    holder = _Holder(gpu)
    values = {"keyword": gpu, "dataclass": holder, "nested dataclass": _Nested(holder)}
    with pytest.raises(BackendUnavailable, match="slow on a GPU"):
        op(CPU, value=values[hidden])
    if hidden != "keyword":
        with pytest.raises(BackendUnavailable, match="slow on a GPU"):
            op(CPU, values[hidden])


@pytest.mark.usefixtures("_allowed")
def test_the_reference_serves_a_gpu_once_allowed_and_says_so_once(op: Op, gpu: Tensor) -> None:
    message = r"^sum: runs its slow reference on a GPU, as allowed \(cpp: .*odd\)\.$"
    with pytest.warns(ReferenceOnGPUWarning, match=message):
        assert op(gpu) == "reference"
    # A second warning would be an error, as every warning is in these tests.
    assert op(gpu) == "reference"
    other = Op("product", op.modules)
    with pytest.warns(ReferenceOnGPUWarning, match="^product: "):
        other(gpu)


@pytest.mark.usefixtures("_allowed")
def test_allowing_the_reference_replaces_no_requested_backend(op: Op, gpu: Tensor) -> None:
    with pytest.raises(BackendUnavailable, match="odd"):
        op(gpu, backend="triton")


def test_allowing_the_reference_tells_what_was_allowed_before() -> None:
    assert allow_reference_on_gpu() is False
    assert allow_reference_on_gpu(False) is True
    assert allow_reference_on_gpu(False) is False


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_reference(name: str) -> None:
    op = OPERATIONS[name]
    assert op.name == name
    assert list(op.modules)[-1] is Backend.REFERENCE


def test_an_operation_refuses_what_it_does_not_have() -> None:
    q = torch.zeros(3, 1, 4)
    layout = PackedLayout.from_lengths([3])
    missing = next(b for b in Backend if b not in OPERATIONS["attention"].modules)
    with pytest.raises(BackendUnavailable, match=f"attention: .*{missing}: not implemented"):
        attention(q, q, q, layout, backend=missing)


def test_an_operation_is_not_served_by_its_reference_on_a_gpu() -> None:
    """The real thing, through its checks: every tensor of the call is on the GPU."""
    with FakeTensorMode():
        # No kernel computes in float64.
        there = {"device": "cuda", "dtype": torch.float64}
        q, bias = torch.empty(3, 1, 4, **there), torch.empty(1, 4, **there)
        position = RelativeBias(bias, bias, torch.empty(5, 1, 4, **there))
        layout = PackedLayout(torch.zeros(2, dtype=torch.int32, device="cuda"), (0, 3), 3)
        op = OPERATIONS["attention"]
        arguments = {"causal": False, "scale": 1.0, "dropout": 0.0, "seed": None}
        with pytest.raises(BackendUnavailable, match="slow on a GPU"):
            op.select(q, q, q, layout, layout, position=position, **arguments)
