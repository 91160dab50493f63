"""Gradients written over the inputs of `transducer_loss`: the same numbers, and honest autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import transducer_loss
from effasr_kernels.transducer_loss import OPERATION, TransducerArguments
from tests.support.loss_calls import LEAVES, gradients, transducer_arguments

FRAMES, LABELS, SPARE = (4, 0, 3, 5), (2, 1, 0, 3), 2
# Without frames, but with a label: a loss of +inf, which has no gradient.
UPSTREAM = torch.tensor([1.0, 2.0, -0.5, 0.25], dtype=torch.float64)


def _arguments(dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return transducer_arguments(FRAMES, LABELS, dtype=dtype, width=3, spare=SPARE, **options)


def _leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What becomes encoded, predicted, weight and bias, the first two with a tail."""
    arguments = _arguments(dtype)
    return [arguments[name].requires_grad_() for name in LEAVES]


def _loss(*leaves: Tensor, **options: Any) -> Tensor:
    return transducer_loss(**(_arguments() | dict(zip(LEAVES, leaves, strict=True))), **options)


def _made(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Encoded and predicted as an operation makes them."""
    return leaves[0] * 2, leaves[1] * 0.5


def _counted(call: Callable[[], Any]) -> Any:
    with FlopCounterMode(display=False) as counter:
        found = call()
    assert counter.get_total_flops() > 0
    return found


@pytest.mark.parametrize("durations", [None, (0, 1, 3)], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "dispatcher"])
def test_gives_the_same_gradients_where_the_inputs_were(
    dtype: torch.dtype, watched: bool, durations: tuple[int, ...] | None
) -> None:
    arguments = _arguments(dtype, durations=durations)
    expected = gradients(arguments, UPSTREAM, "reference")
    call = lambda: gradients(arguments, UPSTREAM, "reference", overwrite_inputs=True)
    found = _counted(call) if watched else call()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name])
    for name in LEAVES[:2]:
        assert bool((found[name][-SPARE:] == 0).all())
    made = _made(_leaves())
    loss = _loss(*made, *_leaves()[2:], overwrite_inputs=True)
    for gradient, x in zip(torch.autograd.grad(loss, made, UPSTREAM), made, strict=True):
        assert gradient.data_ptr() == x.data_ptr()


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
    first, second = both.split([len(encoded), len(predicted)])
    for pair, message in (
        ((leaves[0], predicted), "`encoded` must be what an operation made, not a leaf"),
        ((leaves[0].view_as(encoded), predicted), "`encoded` .* is a leaf or a view of one"),
        ((encoded, leaves[1]), "`predicted` must be what an operation made"),
        ((wide[..., 0], predicted), r"`encoded` must be contiguous .* with strides \(6, 2\)"),
        ((encoded, predicted[:1].expand(predicted.shape)), "`predicted` must be contiguous"),
        ((first, both[1 : 1 + len(predicted)]), "`encoded` must have memory of its own"),
    ):
        with pytest.raises(ValueError, match="^transducer_loss: " + message):
            _loss(*pair, *leaves[2:], overwrite_inputs=True)
    # Side by side is fine.
    _loss(first, second, *leaves[2:], overwrite_inputs=True).sum().backward()


def test_the_schema_says_what_is_written() -> None:
    """`torch.library` compares the arguments before and after with what the schema declares."""
    for overwritten in ((), ("predicted",), ("encoded", "predicted")):
        flat = OPERATION.flatten(TransducerArguments(**_arguments(), overwritten=overwritten))
        wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in flat]
        over = torch.ops.effasr.transducer_loss_backward_over
        copies = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        found = over([UPSTREAM], [], wanted, *copies)
        assert len(found) == 4 - len(overwritten)
        checks = "test_schema", "test_faketensor"
        torch.library.opcheck(over.default, ([UPSTREAM], [], wanted, *flat), test_utils=checks)


def test_compiled_code_refuses_it() -> None:
    torch._dynamo.reset()
    arguments = _arguments()
    call = lambda: transducer_loss(**arguments, overwrite_inputs=True)
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
