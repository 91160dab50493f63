"""The operations as torch.compile, FakeTensorMode and FlopCounterMode see them."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import (
    OPERATIONS,
    PackedLayout,
    RelativeBias,
    Rotary,
    attention,
    ctc_loss,
    depthwise_conv,
    guided_attention,
    linear_cross_entropy,
    strided_depthwise,
    subsampling_stem,
    transducer_loss,
)
from effasr_kernels.runtime.torch_op import Registered

HEADS, WIDTH, CLASSES = 2, 4, 6
FRAMES, TOKENS = (5, 0, 3), (2, 0, 1)
PAIRS = 5 * 2 + 3 * 1


def _registered(name: str) -> Registered:
    return importlib.import_module(f"effasr_kernels.{name}.torch_op").call


def _layouts() -> tuple[PackedLayout, PackedLayout]:
    return PackedLayout.from_lengths(FRAMES, rows=10), PackedLayout.from_lengths(TOKENS, rows=4)


def _targets(second: int) -> Tensor:
    return torch.tensor([1, second, 3, -100])


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


Call = tuple[Callable[..., Any], list[Tensor]]


def _attention(position: str, *, causal: bool = False) -> Call:
    leaves = [_leaf(10, HEADS, WIDTH) for _ in range(3)]
    if position == "relative":
        leaves += [_leaf(HEADS, WIDTH), _leaf(HEADS, WIDTH), _leaf(9, HEADS, WIDTH)]

    def call(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
        enters = RelativeBias(*biases) if biases else Rotary() if position == "rotary" else None
        return attention(q, k, v, _layouts()[0], position=enters, causal=causal)

    return call, leaves


def _guided() -> Call:
    call = lambda q, k, v: guided_attention(q, k, v, *reversed(_layouts()), sigma=0.3)
    return call, [_leaf(4, HEADS, WIDTH), _leaf(10, HEADS, WIDTH), _leaf(10, HEADS, WIDTH)]


def _cross_entropy() -> Call:
    return (
        lambda h, w, b: linear_cross_entropy(h, w, _targets(-100), bias=b, label_smoothing=0.1),
        [_leaf(4, WIDTH), _leaf(CLASSES, WIDTH), _leaf(CLASSES)],
    )


def _ctc() -> Call:
    return (
        lambda h, w, b: ctc_loss(h, w, _targets(2), *_layouts(), bias=b, blank_id=0),
        [_leaf(10, WIDTH), _leaf(CLASSES, WIDTH), _leaf(CLASSES)],
    )


def _transducer() -> Call:
    return (
        lambda f, g, w, b: transducer_loss(f, g, _targets(2), *_layouts(), w, b, blank_id=0),
        [_leaf(10, WIDTH), _leaf(7, WIDTH), _leaf(CLASSES, WIDTH), _leaf(CLASSES)],
    )


def _durations() -> Call:
    call = lambda f, g, w, b: transducer_loss(
        *(f, g, _targets(2), *_layouts(), w, b), blank_id=0, durations=(0, 1), sigma=0.05
    )
    rows = CLASSES + 2
    return call, [_leaf(10, WIDTH), _leaf(7, WIDTH), _leaf(rows, WIDTH), _leaf(rows)]


def _conv() -> Call:
    return (
        lambda x, w, b: depthwise_conv(x, w, _layouts()[0], bias=b),
        [_leaf(10, WIDTH), _leaf(WIDTH, 3), _leaf(WIDTH)],
    )


def _stem() -> Call:
    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return subsampling_stem(x, *parameters, _layouts()[0], torch.tensor([40, 0, 21]))

    return call, [_leaf(80, 4), _leaf(WIDTH, 9), _leaf(WIDTH), _leaf(WIDTH, 9), _leaf(WIDTH)]


def _strided() -> Call:
    return (
        lambda x, w, b: strided_depthwise(x, w, b, _layouts()[0], torch.tensor([10, 0, 5])),
        [_leaf(20, 4, WIDTH), _leaf(WIDTH, 9), _leaf(WIDTH)],
    )


CALLS: dict[str, tuple[Callable[[], Call], int]] = {
    "attention": (lambda: _attention("none"), 4 * HEADS * WIDTH * (5 * 5 + 3 * 3)),
    "attention, causal": (
        lambda: _attention("rotary", causal=True),
        4 * HEADS * WIDTH * (15 + 6),
    ),
    "attention, relative": (
        lambda: _attention("relative"),
        6 * HEADS * WIDTH * (5 * 5 + 3 * 3),
    ),
    "guided_attention": (_guided, 4 * HEADS * WIDTH * PAIRS),
    "linear_cross_entropy": (_cross_entropy, 2 * 2 * CLASSES * WIDTH),
    "ctc_loss": (_ctc, 2 * 8 * CLASSES * WIDTH),
    "transducer_loss": (_transducer, 2 * (5 * 3 + 3 * 2) * CLASSES * WIDTH),
    "transducer_loss, durations": (
        _durations,
        2 * (5 * 3 + 3 * 2) * (CLASSES + 2) * WIDTH,
    ),
    # Each of 8 frames is 4 rows of 2 columns after the first convolution, 2 of 1 after the second.
    "subsampling_stem": (_stem, 2 * 9 * WIDTH * (4 * 8 * 2 + 2 * 8)),
    "strided_depthwise": (_strided, 2 * 9 * WIDTH * 8 * 2),
    "depthwise_conv": (_conv, 2 * 8 * WIDTH * 3),
}
"""A call of each operation, and the floating-point operations of its real rows."""

each_call = pytest.mark.parametrize("name", CALLS)


def _results(outcome: Any) -> list[Tensor]:
    return [outcome] if isinstance(outcome, Tensor) else list(outcome)


def test_every_operation_is_here() -> None:
    """Or among those without a backward, in `test_forward_only`."""
    differentiable = {n for n in OPERATIONS if isinstance(_registered(n), Registered)}
    assert {name.split(",")[0] for name in CALLS} == differentiable


@pytest.mark.parametrize("name", OPERATIONS)
def test_schema_names_the_arguments_of_every_implementation(name: str) -> None:
    registered = _registered(name)
    assert registered.op is OPERATIONS[name]
    for module in registered.op.modules.values():
        run = importlib.import_module(module).run
        assert list(inspect.signature(run).parameters) == list(registered.arguments)


@each_call
def test_counts_the_work_of_real_rows_alone(name: str) -> None:
    make, flops = CALLS[name]
    call, leaves = make()
    with FlopCounterMode(display=False) as counter:
        results = _results(call(*leaves))
        assert counter.get_total_flops() == flops
        torch.autograd.grad(results, leaves, [torch.ones_like(result) for result in results])
    assert counter.get_total_flops() == 3 * flops


@each_call
def test_counts_fake_sequences_as_equal_shares(name: str) -> None:
    """Their lengths are not known; the count must be of the order of a full batch."""
    make, flops = CALLS[name]
    call, leaves = make()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(leaf) for leaf in leaves]
        with FlopCounterMode(display=False) as counter:
            call(*fake)
    assert flops / 4 < counter.get_total_flops() < 4 * flops


@each_call
def test_fake_results_are_like_real_ones(name: str) -> None:
    call, leaves = CALLS[name][0]()
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
    call, leaves = CALLS[name][0]()
    seen: list[list[Any]] = []

    def note(self: Registered, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.flatten(*args, **kwargs))
        return self.op(*args, **kwargs)

    monkeypatch.setattr(Registered, "__call__", note)
    call(*leaves)
    operation = getattr(torch.ops.effasr, name.split(",")[0])
    torch.library.opcheck(operation.default, seen[0])


@torch._dynamo.config.patch(error_on_recompile=True)
def test_other_lengths_need_no_other_graph() -> None:
    """With static shapes a training run compiles once, however its batches are made up."""
    torch._dynamo.reset()

    def block(x: Tensor, table: Tensor, weight: Tensor, layout: PackedLayout) -> Tensor:
        q = x.view(-1, HEADS, WIDTH)
        position = RelativeBias(table[0], table[1], table)
        y = attention(q, q, q, layout, position=position, dropout=0.1)
        return depthwise_conv(y.flatten(1), weight, layout)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for lengths in ([5, 3], [1, 2], [7, 0, 3]):
        layout = PackedLayout.from_lengths(lengths, rows=10, num_sequences=4)
        x = _leaf(10, HEADS * WIDTH)
        y = compiled(x, _leaf(13, HEADS, WIDTH), _leaf(HEADS * WIDTH, 3), layout)
        y.sum().backward()
        assert x.grad is not None
        assert bool((x.grad[: sum(lengths)] != 0).any())


def test_dropout_drops_the_same_in_a_compiled_backward() -> None:
    """The compiled backward computes the forward again; the same weights have to fall."""
    layout = PackedLayout.from_lengths([4, 3])
    q = _leaf(7, HEADS, WIDTH)
    call = lambda q: attention(q, q, q, layout, dropout=0.5, seed=3)
    expected = torch.autograd.grad(call(q).sum(), q)
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(call(q).sum(), q)
    torch.testing.assert_close(got, expected)


@each_call
def test_under_autocast_arguments_are_narrow_and_sums_are_not(name: str) -> None:
    call, leaves = CALLS[name][0]()
    narrow = [leaf.bfloat16() for leaf in leaves]
    expected = _results(call(*narrow))
    with torch.autocast("cpu", torch.bfloat16):
        got = _results(call(*leaves))
        with FlopCounterMode(display=False):
            got += _results(call(*leaves))
    for x, y in zip(got, expected * 2, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
