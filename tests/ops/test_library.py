"""The operations as torch.compile, FakeTensorMode and FlopCounterMode see them.

The calls are the examples of each operation's definition.
"""

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
EXAMPLES = {x.label: (op, x) for op in OPERATIONS.values() for x in op.examples}
DIFFERENTIABLE = [name for name, (op, _) in EXAMPLES.items() if isinstance(op, DifferentiableOp)]
FORWARD_ONLY = [name for name in EXAMPLES if name not in DIFFERENTIABLE]
WIDE_UNDER_AUTOCAST = {"batch_norm": ("weight", "bias"), "bias_activation_dropout": ("bias",)}
"""Parameters that keep their dtype under autocast, by the operations that say so."""
_OF_SEVERAL_DTYPES = {"dropout_add_layer_norm", "rms_norm"}
"""Operations that also under autocast keep the dtypes of some arguments; their tests check it."""

each_call = pytest.mark.parametrize("name", EXAMPLES)
each_differentiable = pytest.mark.parametrize("name", DIFFERENTIABLE)
each_forward_only = pytest.mark.parametrize("name", FORWARD_ONLY)


class _Inputs(ExampleInputs):
    """Makes floating tensors, or hands out those that are given instead."""

    def __init__(self, given: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._given = None if given is None else iter(given)

    def floating(self, *shape: int, differentiable: bool = True) -> Tensor:
        if self._given is not None:
            return next(self._given)
        self.tensors.append(super().floating(*shape))
        return self.tensors[-1]


@dataclass(frozen=True)
class Call:
    """An example as a function of its floating tensors."""

    op: TorchOp
    example: Example
    named: dict[str, Tensor]  # by the argument; those in a position by a number

    @classmethod
    def from_name(cls, name: str) -> "Call":
        op, example = EXAMPLES[name]
        inputs = _Inputs()
        arguments = example.arguments(inputs)
        named = {
            next((key for key, value in arguments.items() if value is x), str(i)): x
            for i, x in enumerate(inputs.tensors)
        }
        if name in DIFFERENTIABLE:
            for x in inputs.tensors:
                x.requires_grad_()
        return cls(op, example, named)

    def __call__(self, *tensors: Tensor) -> Any:
        return getattr(effasr_kernels, self.op.name)(**self.example.arguments(_Inputs(tensors)))

    @property
    def tensors(self) -> list[Tensor]:
        return list(self.named.values())

    @property
    def library_name(self) -> str:
        return self.op.name + "_in_place" * ("new_k" in self.named)

    @property
    def written(self) -> tuple[str, ...]:
        """The arguments that it writes to."""
        may_read_only = self.op.name == "decode_attention" and "new_k" not in self.named
        return () if may_read_only else getattr(self.op, "written", ())

    def capture(self) -> Any:
        """The object with which the public function calls the operation."""
        seen: list[Any] = []

        def note(op: TorchOp, arguments: Any, backend: Any = None) -> Any:
            seen.append(arguments)
            return op.eager(arguments, backend)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.op), "__call__", note)
            self(*self.tensors)
        return seen[0]


def _results(outcome: Any) -> list[Tensor]:
    return [] if outcome is None else [outcome] if isinstance(outcome, Tensor) else list(outcome)


def _run(call: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    """Results, and what the arguments hold afterwards, of copies."""
    copies = [x.clone() for x in tensors]
    return [*_results(call(*copies)), *copies]


def _ones(results: list[Tensor]) -> list[Tensor]:
    return [torch.ones_like(x) for x in results]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_backend_takes_the_arguments_object(name: str) -> None:
    for module in map(load, OPERATIONS[name].backends.values()):
        assert hasattr(module, "forward" if hasattr(module, "backward") else "run")
        assert not (hasattr(module, "run") and hasattr(module, "backward"))


@each_call
def test_counts_the_work_of_real_rows_alone(name: str) -> None:
    call = Call.from_name(name)
    if name in FORWARD_ONLY:
        expected = _run(call, call.tensors)
        with FlopCounterMode(display=False) as counter:
            actual = _run(call, call.tensors)
        counts = counter.get_flop_counts()["Global"]
        assert [str(op) for op in counts] == [f"effasr.{call.library_name}"]
        assert all(map(torch.equal, actual, expected))
        assert counter.get_total_flops() == call.example.flops
        return
    with FlopCounterMode(display=False) as counter:
        results = _results(call(*call.tensors))
        assert counter.get_total_flops() == call.example.flops
        torch.autograd.grad(results, call.tensors, _ones(results))
    assert counter.get_total_flops() == 3 * call.example.flops


@each_call
def test_fake_results_are_like_real_ones(name: str) -> None:
    """Lengths that are not known count as the room that there is, or as equal shares."""
    call, is_differentiable = Call.from_name(name), name in DIFFERENTIABLE
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(x) for x in call.tensors]
        with counter:
            fake = _results(call(*leaves))
        if is_differentiable:
            fake += torch.autograd.grad(fake, leaves, _ones(fake))
    least = call.example.flops / 4 if is_differentiable else call.example.flops
    assert least <= counter.get_total_flops() <= 4 * call.example.flops
    real = _results(call(*call.tensors))
    if is_differentiable:
        real += torch.autograd.grad(real, call.tensors, _ones(real))
    for x, y in zip(fake, real, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.contiguous().stride())


@each_call
def test_passes_the_checks_of_torch_library(name: str) -> None:
    call = Call.from_name(name)
    operation = getattr(torch.ops.effasr, call.library_name)
    torch.library.opcheck(operation.default, call.op.flatten(call.capture()))


@each_call
def test_a_schema_flattens_and_rebuilds_its_arguments(name: str) -> None:
    call = Call.from_name(name)
    arguments, schema = call.capture(), call.op.schema
    flat = schema.flatten(arguments)
    assert len(flat) == len(schema.names)
    again = schema.restore(flat)
    for x, y in zip(schema.tensors(arguments), schema.tensors(again), strict=True):
        assert x is y
    for x, y in zip(schema.other_values(arguments), schema.other_values(again), strict=True):
        if isinstance(x, PackedLayout):
            assert (x.cu_seqlens is y.cu_seqlens, x.rows) == (True, y.rows)
            assert x.lengths == y.lengths
        else:
            assert x == y
    joined = schema.join(schema.tensors(arguments), schema.other_values(arguments))
    for field in arguments.__dataclass_fields__:
        assert getattr(joined, field) is getattr(arguments, field)


@each_differentiable
def test_a_kernel_saves_what_it_says(name: str) -> None:
    call = Call.from_name(name)
    arguments = call.capture()
    kernel = load(call.op.backends[Backend.TRITON])
    with launching.recording():
        _, saved = kernel.forward(arguments)
    like = getattr(kernel, "saved_like", lambda _: ())(arguments)
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in like]


@each_differentiable
def test_under_autocast_arguments_are_narrow_and_sums_are_not(name: str) -> None:
    call = Call.from_name(name)
    if call.op.name in _OF_SEVERAL_DTYPES:
        pytest.skip("keeps the dtypes of some arguments")
    wide = WIDE_UNDER_AUTOCAST.get(call.op.name, ())
    expected = _results(call(*(x if k in wide else x.bfloat16() for k, x in call.named.items())))
    with torch.autocast("cpu", torch.bfloat16):
        actual = _results(call(*call.tensors))
        with FlopCounterMode(display=False):
            actual += _results(call(*call.tensors))
    for x, y in zip(actual, expected * 2, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@each_forward_only
def test_the_compiler_traces_it_and_what_it_writes(name: str) -> None:
    torch._dynamo.reset()
    call = Call.from_name(name)
    compiled = torch.compile(lambda *x: call(*x), fullgraph=True, backend="aot_eager")
    expected = _run(call, call.tensors)
    assert all(map(torch.equal, _run(compiled, call.tensors), expected))
    after = expected[-len(call.tensors) :]
    changed = [not torch.equal(x, y) for x, y in zip(call.tensors, after, strict=True)]
    assert changed == [argument in call.written for argument in call.named]


@each_forward_only
def test_refuses_gradients(name: str) -> None:
    call = Call.from_name(name)
    leaves = [x.clone().requires_grad_(i == 0) for i, x in enumerate(call.tensors)]
    with pytest.raises(RuntimeError, match="requires a gradient, which this operation does not"):
        call(*leaves)
    with torch.no_grad():
        assert not any(x.requires_grad for x in _results(call(*leaves)))
    with torch.inference_mode():
        call(*leaves)


def test_under_autocast_a_query_takes_the_dtype_of_its_pages() -> None:
    call = Call.from_name("decode_attention, self")
    q, k, v, new_k, new_v = call.tensors
    with torch.autocast("cpu", torch.bfloat16):
        expected = call(q.bfloat16().float(), k, v, new_k, new_v)
        assert torch.equal(call(q.bfloat16(), k, v, new_k, new_v), expected)


def test_under_autocast_a_projection_is_narrow_and_its_sums_are_not() -> None:
    call = Call.from_name("projected_top_k")
    with torch.autocast("cpu", torch.bfloat16):
        actual = call(*call.tensors)
    expected = call(*(x.bfloat16() for x in call.tensors))
    assert actual[0].dtype == torch.float32
    assert all(map(torch.equal, actual, expected))


def test_a_call_reaches_its_launch_through_few_functions() -> None:
    """As docs/architecture.md lists them: 7 on the stack, in 4 files."""
    root = Path(effasr_kernels.__file__).parent
    stacks: list[list[traceback.FrameSummary]] = []
    call = Call.from_name("attention, causal")
    record = launching.diverted(lambda _: stacks.append(traceback.extract_stack()))
    with record, pytest.MonkeyPatch.context() as patch:
        patch.setattr(OPERATIONS["attention"], "order", None)
        call(*call.tensors)
    (stack,) = stacks
    frames = [frame for frame in stack if root in Path(frame.filename).parents]
    assert [frame.name for frame in frames] == [
        *("attention", "__call__", "eager", "_compute", "forward", "forward", "launch")
    ]
    assert len({frame.filename for frame in frames}) == 4


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
