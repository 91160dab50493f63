"""Gradients written over the inputs of `transducer_loss`: the same numbers, and honest autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import PackedLayout, transducer_loss
from effasr_kernels.transducer_loss import OPERATION, TransducerArguments

FRAMES, LABELS, WIDTH, CLASSES = (4, 0, 3, 5), (2, 1, 0, 3), 3, 9
SPARE = 2
ROWS = sum(FRAMES) + SPARE, sum(LABELS) + len(LABELS) + SPARE
UPSTREAM = torch.tensor([1.0, 2.0, -0.5, 0.25], dtype=torch.float64)


def _leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What becomes encoded, predicted, weight and bias, the first two with a tail."""
    generator = torch.Generator().manual_seed(1)
    shapes = (ROWS[0], WIDTH), (ROWS[1], WIDTH), (CLASSES, WIDTH), (CLASSES,)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def _loss(encoded: Tensor, predicted: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Any:
    layouts = (
        PackedLayout.from_lengths(FRAMES, rows=ROWS[0]),
        PackedLayout.from_lengths(LABELS, rows=sum(LABELS) + SPARE),
    )
    targets = torch.tensor([1, 2, 3, 5, 1, 1, 0, 0])
    arguments = encoded, predicted, targets, *layouts, weight, bias
    return transducer_loss(*arguments, blank_id=4, **options)


def _made(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Encoded and predicted as an operation makes them."""
    return leaves[0] * 2, leaves[1] * 0.5


def _gradients(leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    encoded, predicted = _made(leaves)
    loss = _loss(encoded, predicted, *leaves[2:], **options)
    upstream = UPSTREAM.to(loss)
    # Without frames, but with a label: a loss of +inf, which has no gradient.
    return torch.autograd.grad(loss, leaves, upstream)


def _counted(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with FlopCounterMode(display=False) as counter:
        found = call()
    assert counter.get_total_flops() > 0
    return found


@pytest.mark.parametrize("durations", [None, (0, 1, 3)], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "dispatcher"])
def test_gives_the_same_gradients(
    dtype: torch.dtype, watched: bool, durations: tuple[int, ...] | None
) -> None:
    leaves = _leaves(dtype)
    options: dict[str, Any] = {"durations": durations, "backend": "reference"}
    expected = _gradients(leaves, **options)
    options["overwrite_inputs"] = True
    call = lambda: _gradients(leaves, **options)
    found = _counted(call) if watched else call()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("watched", [False, True], ids=["eager", "dispatcher"])
def test_the_gradients_lie_where_the_inputs_were(watched: bool) -> None:
    leaves = _leaves()
    expected = _gradients(leaves)
    encoded, predicted = _made(leaves)

    def call() -> tuple[Tensor, ...]:
        loss = _loss(encoded, predicted, *leaves[2:], overwrite_inputs=True)
        return torch.autograd.grad(loss, [encoded, predicted], UPSTREAM)

    found = _counted(call) if watched else call()
    for gradient, x, expect, factor in zip(
        found, (encoded, predicted), expected[:2], (2, 0.5), strict=True
    ):
        assert gradient.data_ptr() == x.data_ptr()
        torch.testing.assert_close(x.detach() * factor, expect)
        assert bool((x[-SPARE:] == 0).all())


def test_only_what_requires_a_gradient_is_overwritten() -> None:
    leaves = _leaves()
    encoded, predicted = leaves[0].detach(), leaves[1] * 1
    before = encoded.clone()
    _loss(encoded, predicted, *leaves[2:], overwrite_inputs=True).sum().backward()
    assert torch.equal(encoded, before)
    assert leaves[1].grad is not None
    with torch.no_grad():
        _loss(*leaves, overwrite_inputs=True)


@pytest.mark.parametrize("watched", [False, True], ids=["eager", "dispatcher"])
def test_a_second_backward_is_refused(watched: bool) -> None:
    leaves = _leaves()

    def call() -> tuple[Tensor, ...]:
        loss = _loss(*_made(leaves), *leaves[2:], overwrite_inputs=True).nan_to_num(posinf=0).sum()
        loss.backward(retain_graph=True)
        message = "no second backward .* replaced `encoded` and `predicted`"
        with pytest.raises(RuntimeError, match=message):
            loss.backward()
        return ()

    _counted(call) if watched else call()


def test_autograd_reports_that_somebody_else_needs_the_values() -> None:
    leaves = _leaves()
    encoded, predicted = _made(leaves)
    # Its backward comes after that of the loss, which was made later.
    squares = encoded.square().sum()
    loss = _loss(encoded, predicted, *leaves[2:], overwrite_inputs=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (squares + loss.sum()).backward()
    # As is that the layer before keeps its output.
    loss = _loss(leaves[0].exp(), leaves[1] * 1, *leaves[2:], overwrite_inputs=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    # And that the input changed between forward and backward.
    encoded, predicted = _made(leaves)
    loss = _loss(encoded, predicted, *leaves[2:], overwrite_inputs=True)
    with torch.no_grad():
        encoded.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_refuses_memory_that_is_not_its_own() -> None:
    leaves = _leaves()
    encoded, predicted = _made(leaves)
    both = torch.cat([encoded, predicted])
    wide = torch.stack([encoded, encoded], -1)
    first, second = both[: ROWS[0]], both[ROWS[0] :]
    for pair, message in (
        ((leaves[0], predicted), "`encoded` must be what an operation made, not a leaf"),
        ((leaves[0].view_as(encoded), predicted), "`encoded` .* is a leaf or a view of one"),
        ((encoded, leaves[1]), "`predicted` must be what an operation made"),
        ((wide[..., 0], predicted), r"`encoded` must be contiguous .* with strides \(6, 2\)"),
        ((encoded, predicted[:1].expand(predicted.shape)), "`predicted` must be contiguous"),
        ((both[: ROWS[0]], both[1 : 1 + ROWS[1]]), "`encoded` must have memory of its own"),
    ):
        with pytest.raises(ValueError, match="^transducer_loss: " + message):
            _loss(*pair, *leaves[2:], overwrite_inputs=True)
    # Side by side is fine.
    _loss(first, second, *leaves[2:], overwrite_inputs=True).sum().backward()


def test_the_schema_says_what_is_written() -> None:
    """`torch.library` compares the arguments before and after with what the schema declares."""
    leaves = [x.detach() for x in _leaves()]
    layouts = (
        PackedLayout.from_lengths(FRAMES, rows=ROWS[0]),
        PackedLayout.from_lengths(LABELS, rows=sum(LABELS) + SPARE),
    )
    given = leaves[0], leaves[1], torch.tensor([1, 2, 3, 5, 1, 1, 0, 0]), *layouts, *leaves[2:]
    options = {"activation": "tanh", "fastemit": 0.0, "durations": None, "sigma": 0.0}
    for overwritten in ((), ("predicted",), ("encoded", "predicted")):
        arguments = TransducerArguments(*given, blank_id=4, overwritten=overwritten, **options)
        flat = OPERATION.flatten(arguments)
        wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in flat]
        over = torch.ops.effasr.transducer_loss_backward_over
        copies = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        found = over([UPSTREAM], [], wanted, *copies)
        assert len(found) == 4 - len(overwritten)
        checks = "test_schema", "test_faketensor"
        torch.library.opcheck(over.default, ([UPSTREAM], [], wanted, *flat), test_utils=checks)


def test_compiled_code_refuses_it() -> None:
    torch._dynamo.reset()
    leaves = _leaves()
    call = lambda: _loss(*_made(leaves), *leaves[2:], overwrite_inputs=True)
    with pytest.raises(Exception, match="`overwrite_inputs` must be False in compiled code"):
        torch.compile(call, fullgraph=True, backend="eager")()


def test_under_autocast_the_narrow_copies_are_overwritten() -> None:
    leaves = _leaves(torch.float32)
    before = [leaf.detach().clone() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(*leaves, overwrite_inputs=True)
        expected = _loss(*leaves)
    found = torch.autograd.grad(loss, leaves, UPSTREAM.to(loss))
    for x, y in zip(found, torch.autograd.grad(expected, leaves, UPSTREAM.to(loss)), strict=True):
        torch.testing.assert_close(x, y)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))
