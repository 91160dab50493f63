"""The operations as torch.compile, FakeTensorMode and FlopCounterMode see them.

The calls are the examples of each operation's definition.
"""

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import effasr_kernels
from effasr_kernels import OPERATIONS, PackedLayout, RelativeBias, attention, depthwise_conv
from effasr_kernels.runtime import launch as launching
from effasr_kernels.runtime.dispatch import Backend, load
from effasr_kernels.runtime.example import Example, ExampleInputs
from effasr_kernels.runtime.torch_op import DifferentiableOp, TorchOp

HEADS, WIDTH = 2, 4
DIFFERENTIABLE = {
    example.label: (op, example)
    for op in OPERATIONS.values()
    if isinstance(op, DifferentiableOp)
    for example in op.examples
}

WIDE_UNDER_AUTOCAST = {"batch_norm": ("weight", "bias"), "bias_activation_dropout": ("bias",)}
"""Parameters that keep their dtype under autocast, by the operations that say so."""


class _Leaves(ExampleInputs):
    """Makes leaves that require gradients, or hands out those that are given instead."""

    def __init__(self, given: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []
        self._given = None if given is None else iter(given)

    def floating(self, *shape: int, differentiable: bool = True) -> Tensor:
        if self._given is not None:
            return next(self._given)
        self.leaves.append(super().floating(*shape).requires_grad_())
        return self.leaves[-1]


def _call(name: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """An example as a function of its leaves, and these."""
    op, example = DIFFERENTIABLE[name]
    inputs = _Leaves()
    example.arguments(inputs)
    run = getattr(effasr_kernels, op.name)
    return lambda *leaves: run(**example.arguments(_Leaves(leaves))), inputs.leaves


each_call = pytest.mark.parametrize("name", DIFFERENTIABLE)

_OF_SEVERAL_DTYPES = {"dropout_add_layer_norm", "rms_norm"}
"""Operations that also under autocast keep the dtypes of some arguments; their tests check it."""


def _results(outcome: Any) -> list[Tensor]:
    """The results that an example asks for: statistics that are not wanted are not returned."""
    return [outcome] if isinstance(outcome, Tensor) else list(outcome)


def test_every_operation_has_examples_that_name_it() -> None:
    for name, op in OPERATIONS.items():
        assert op.examples
        assert all(example.label.split(",")[0] == name for example in op.examples)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_backend_takes_the_arguments_object(name: str) -> None:
    for module in map(load, OPERATIONS[name].backends.values()):
        computes = {"run"} if not hasattr(module, "backward") else {"forward", "saved_like"}
        assert all(hasattr(module, x) for x in computes)
        assert not (hasattr(module, "run") and hasattr(module, "backward"))


@each_call
def test_counts_the_work_of_real_rows_alone(name: str) -> None:
    call, leaves = _call(name)
    flops = DIFFERENTIABLE[name][1].flops
    with FlopCounterMode(display=False) as counter:
        results = _results(call(*leaves))
        assert counter.get_total_flops() == flops
        torch.autograd.grad(results, leaves, [torch.ones_like(result) for result in results])
    assert counter.get_total_flops() == 3 * flops


@each_call
def test_counts_fake_sequences_as_equal_shares(name: str) -> None:
    """Their lengths are not known; the count must be of the order of a full batch."""
    call, leaves = _call(name)
    flops = DIFFERENTIABLE[name][1].flops
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(leaf) for leaf in leaves]
        with FlopCounterMode(display=False) as counter:
            call(*fake)
    assert flops / 4 <= counter.get_total_flops() <= 4 * flops


@each_call
def test_fake_results_are_like_real_ones(name: str) -> None:
    call, leaves = _call(name)
    real = _results(call(*leaves))
    gradients = torch.autograd.grad(real, leaves, [torch.ones_like(result) for result in real])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_leaves = [mode.from_tensor(leaf) for leaf in leaves]
        fake = _results(call(*fake_leaves))
        ones = [torch.ones_like(result) for result in fake]
        fake += torch.autograd.grad(fake, fake_leaves, ones)
    for x, y in zip(fake, [*real, *gradients], strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.contiguous().stride())


@each_call
def test_passes_the_checks_of_torch_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, leaves = _call(name)
    seen: list[list[Any]] = []

    def note(self: TorchOp, arguments: Any, backend: Any = None) -> Any:
        seen.append(self.flatten(arguments, backend))
        return self.eager(arguments, backend)

    monkeypatch.setattr(TorchOp, "__call__", note)
    call(*leaves)
    operation = getattr(torch.ops.effasr, name.split(",")[0])
    torch.library.opcheck(operation.default, seen[0])


@pytest.mark.parametrize(
    ("op", "example"),
    [(op, example) for op in OPERATIONS.values() for example in op.examples],
    ids=lambda x: x.label if isinstance(x, Example) else "",
)
def test_a_schema_flattens_and_rebuilds_its_arguments(
    op: TorchOp, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(type(op), "__call__", lambda self, arguments, _: seen.append(arguments))
    unpacks = op.name in ("depthwise_conv", "dropout_add_layer_norm")
    with pytest.raises(TypeError) if unpacks else torch.no_grad():
        getattr(effasr_kernels, op.name)(**example.arguments(ExampleInputs()))
    (arguments,) = seen
    flat = op.schema.flatten(arguments)
    assert len(flat) == len(op.schema.names)
    again = op.schema.restore(flat)
    for x, y in zip(op.schema.tensors(arguments), op.schema.tensors(again), strict=True):
        assert x is y
    for x, y in zip(op.schema.other_values(arguments), op.schema.other_values(again), strict=True):
        if isinstance(x, PackedLayout):
            assert (x.cu_seqlens is y.cu_seqlens, x.rows) == (True, y.rows)
            assert x.lengths == y.lengths
        else:
            assert x == y
    joined = op.schema.join(op.schema.tensors(arguments), op.schema.other_values(arguments))
    for name in arguments.__dataclass_fields__:
        assert getattr(joined, name) is getattr(arguments, name)


@each_call
def test_a_kernel_saves_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, call, leaves = DIFFERENTIABLE[name][0], *_call(name)
    seen: list[Any] = []

    def note(self: TorchOp, arguments: Any, backend: Any = None) -> Any:
        seen.append(arguments)
        return self.eager(arguments, "reference")

    monkeypatch.setattr(TorchOp, "__call__", note)
    call(*leaves)
    kernel = load(op.backends[Backend.TRITON])
    with launching.recording():
        _, saved = kernel.forward(seen[0])
    like = kernel.saved_like(seen[0])
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in like]


def test_a_call_reaches_its_launch_through_few_functions() -> None:
    """As docs/architecture.md lists them: 7 on the stack, in 4 files."""
    root = Path(effasr_kernels.__file__).parent
    stacks: list[list[traceback.FrameSummary]] = []
    with launching.diverted(lambda _: stacks.append(traceback.extract_stack())):
        call, leaves = _call("attention, causal")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OPERATIONS["attention"], "order", None)
            call(*leaves)
    (stack,) = stacks
    own = [frame for frame in stack if root in Path(frame.filename).parents]
    assert [frame.name for frame in own] == [
        *("attention", "__call__", "eager", "_compute", "forward", "forward", "launch")
    ]
    assert len({frame.filename for frame in own}) == 4


@torch._dynamo.config.patch(error_on_recompile=True)
def test_other_lengths_need_no_other_graph() -> None:
    """With static shapes a training run compiles once, however its batches are made up."""
    torch._dynamo.reset()

    def block(x: Tensor, table: Tensor, weight: Tensor, layout: PackedLayout) -> Tensor:
        q = x.view(-1, HEADS, WIDTH)
        position = RelativeBias(table[0], table[1], table)
        y = attention(q, q, q, layout, position=position, dropout=0.1)
        return depthwise_conv(y.flatten(1), weight, layout)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, requires_grad=True)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for lengths in ([5, 3], [1, 2], [7, 0, 3]):
        layout = PackedLayout.from_lengths(lengths, rows=10, num_sequences=4)
        # As an eager call leaves it.
        assert layout.max_seqlen == max(lengths)
        x = leaf(10, HEADS * WIDTH)
        y = compiled(x, leaf(13, HEADS, WIDTH), leaf(HEADS * WIDTH, 3), layout)
        y.sum().backward()
        assert x.grad is not None
        assert bool((x.grad[: sum(lengths)] != 0).any())


def test_dropout_drops_the_same_in_a_compiled_backward() -> None:
    """The compiled backward computes the forward again; the same weights have to fall."""
    layout = PackedLayout.from_lengths([4, 3])
    q = torch.randn(7, HEADS, WIDTH, requires_grad=True)
    call = lambda q: attention(q, q, q, layout, dropout=0.5, seed=3)
    expected = torch.autograd.grad(call(q).sum(), q)
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(call(q).sum(), q)
    torch.testing.assert_close(got, expected)


@each_call
def test_under_autocast_arguments_are_narrow_and_sums_are_not(name: str) -> None:
    if DIFFERENTIABLE[name][0].name in _OF_SEVERAL_DTYPES:
        pytest.skip("keeps the dtypes of some arguments")
    call, leaves = _call(name)
    op, example = DIFFERENTIABLE[name]
    given = example.arguments(_Leaves(leaves))
    wide = [given[parameter] for parameter in WIDE_UNDER_AUTOCAST.get(op.name, ())]
    narrow = [leaf if any(leaf is x for x in wide) else leaf.bfloat16() for leaf in leaves]
    expected = _results(call(*narrow))
    with torch.autocast("cpu", torch.bfloat16):
        got = _results(call(*leaves))
        with FlopCounterMode(display=False):
            got += _results(call(*leaves))
    for x, y in zip(got, expected * 2, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
