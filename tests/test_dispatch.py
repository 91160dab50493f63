import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from effasr_kernels import (
    OPERATIONS,
    Backend,
    BackendUnavailable,
    PackedLayout,
    ReferenceOnGPUWarning,
    RelativeBias,
    allow_reference_on_gpu,
    linear_cross_entropy,
)
from effasr_kernels.runtime import launch
from effasr_kernels.runtime.dispatch import Dispatcher
from tests.support.attention_arguments import attention_arguments

CPU = torch.zeros(1)
Holder = make_dataclass("Holder", ["content"], frozen=True)
TRITON_REFUSES = r"^sum: no backend can run this call \(triton: head width 7 is odd\)\.$"


def _run(op: Dispatcher, arguments: Any, backend: Backend | str | None = None) -> Any:
    return op.select(arguments, backend).run(arguments)


def _backend(monkeypatch: pytest.MonkeyPatch, name: str, reason: str | None) -> str:
    """A module that says whether it can serve, and answers with its own name."""
    module = ModuleType(f"fake_{name}")
    module.unsupported_reason = lambda arguments: reason  # type: ignore[attr-defined]
    module.run = lambda arguments: name  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


@pytest.fixture
def op(monkeypatch):
    """C++ cannot be imported, Triton refuses, the reference serves."""
    return Dispatcher(
        "sum",
        {
            Backend.CPP: "effasr_kernels.no_such_module",
            Backend.TRITON: _backend(monkeypatch, "triton", "head width 7 is odd"),
            Backend.REFERENCE: _backend(monkeypatch, "reference", None),
        },
    )


@pytest.fixture
def gpu():
    """A tensor that says it is on a GPU, on a machine that need not have one."""
    with FakeTensorMode():
        yield torch.empty(1, device="cuda")


@pytest.fixture
def _allowed(monkeypatch):
    monkeypatch.setattr("effasr_kernels.runtime.dispatch._ReferenceOnGPU.warned", set())
    before = allow_reference_on_gpu()
    yield
    allow_reference_on_gpu(before)


def test_takes_the_first_that_can_serve(op, monkeypatch):
    assert _run(op, CPU) == "reference"
    ready = Dispatcher("sum", op.backends | {Backend.TRITON: _backend(monkeypatch, "ready", None)})
    assert _run(ready, CPU) == "ready"


def test_the_order_may_depend_on_the_call(monkeypatch):
    names = (Backend.TRITON, Backend.VARLEN, Backend.REFERENCE)
    modules = {name: _backend(monkeypatch, f"ordered_{name}", None) for name in names}
    requested = []

    def order(backwards: bool) -> list[Backend]:
        requested.append(backwards)
        # Not implemented here; the operation may come to have it.
        existing = [Backend.CPP, *names]
        return existing[::-1] if backwards else existing

    op = Dispatcher("sum", modules, order)
    assert _run(op, False) == "ordered_triton"
    assert _run(op, True) == "ordered_reference"
    assert requested == [False, True]
    assert _run(op, True, backend="varlen") == "ordered_varlen"
    assert len(requested) == 2


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        ("triton", BackendUnavailable, TRITON_REFUSES),
        (Backend.TRITON, BackendUnavailable, TRITON_REFUSES),
        ("cpp", BackendUnavailable, "cpp: cannot be imported: No module named"),
        (
            "trito",
            ValueError,
            "sum: `backend` must be one of triton, .*reference, but is 'trito'",
        ),
    ],
)
def test_a_requested_backend_is_never_replaced(op, backend, error, message):
    with pytest.raises(error, match=message):
        _run(op, CPU, backend=backend)


def test_the_reference_is_not_taken_by_itself_on_a_gpu(op, gpu):
    message = r"triton: head width 7 is odd; reference: slow on a GPU, so only on request"
    with pytest.raises(BackendUnavailable, match=message):
        _run(op, gpu)
    assert _run(op, gpu, backend="reference") == "reference"


@pytest.mark.parametrize("depth", range(3))
def test_finds_the_gpu_wherever_a_tensor_is(op, gpu, depth):
    """In a dataclass, also one in another."""
    arguments = gpu
    for _ in range(depth):
        arguments = Holder(arguments)
    with pytest.raises(BackendUnavailable, match="slow on a GPU"):
        _run(op, arguments)


@pytest.mark.usefixtures("_allowed")
def test_the_reference_serves_a_gpu_once_allowed_and_says_so_once(op, gpu):
    message = r"^sum: runs its slow reference on a GPU, as allowed \(cpp: .*odd\)\.$"
    with pytest.warns(ReferenceOnGPUWarning, match=message):
        assert _run(op, gpu) == "reference"
    # A second warning would be an error, as every warning is in these tests.
    assert _run(op, gpu) == "reference"
    other = Dispatcher("product", op.backends)
    with pytest.warns(ReferenceOnGPUWarning, match="^product: "):
        _run(other, gpu)
    with pytest.raises(BackendUnavailable, match="odd"):
        _run(op, gpu, backend="triton")


def test_allowing_the_reference_tells_what_was_allowed_before():
    assert allow_reference_on_gpu() is False
    assert allow_reference_on_gpu(False) is True
    assert allow_reference_on_gpu(False) is False


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_reference(name):
    op = OPERATIONS[name]
    assert op.name == name
    assert list(op.backends)[-1] is Backend.REFERENCE


def test_an_operation_refuses_what_it_does_not_have():
    hidden, weight, targets = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3).long()
    missing = next(b for b in Backend if b not in OPERATIONS["linear_cross_entropy"].backends)
    with pytest.raises(BackendUnavailable, match=f"entropy: .*{missing}: not implemented"):
        linear_cross_entropy(hidden, weight, targets, backend=missing)


def test_an_operation_is_not_served_by_its_reference_on_a_gpu():
    """The real thing, through its checks: every tensor of the call is on the GPU."""
    with FakeTensorMode():
        # No kernel computes in float64.
        there = {"device": "cuda", "dtype": torch.float64}
        q, bias = torch.empty(3, 1, 4, **there), torch.empty(1, 4, **there)
        position = RelativeBias(bias, bias, torch.empty(5, 1, 4, **there))
        layout = PackedLayout(torch.zeros(2, dtype=torch.int32, device="cuda"), (0, 3), 3)
        op = OPERATIONS["attention"]
        arguments = attention_arguments(q, q, q, layout, layout, position=position)
        with pytest.raises(BackendUnavailable, match="slow on a GPU"):
            op.select(arguments)


def test_kernels_in_triton_refuse_a_gpu_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has 7.5; `effasr doctor` prints the reason."""
    x: Any = SimpleNamespace(dtype=torch.float16, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, reason in (
        ((7, 5), "needs compute capability 8.0, an A100, or later"),
        ((8, 0), None),
    ):
        monkeypatch.setattr(launch, "capability", lambda _, version=version: version)
        assert launch.refusal(x) == reason
