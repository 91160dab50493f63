"""`transducer_loss` in Triton, whose backward writes the gradients over the inputs."""

import pytest
import torch
from torch import Tensor

from effasr_kernels import transducer_loss
from effasr_kernels.transducer_loss import set_workspace
from tests.gpu.live_memory import Live
from tests.support.loss_calls import LEAVES, gradients, transducer_arguments


@pytest.mark.parametrize(
    ("size", "longest"),
    [(2**29, None), (2**14, None), (2**14, 9), (2**16, 9)],
    ids=["whole", "few", "kept", "many"],
)
@pytest.mark.representative(size=2**29)
@pytest.mark.representative(size=2**14, longest=9)
def test_gives_the_same_bits(
    size: int, longest: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """However nodes are divided, with sequences of no frames, and a tail."""
    set_workspace(size)
    frames, labels = (5, 0, 8, 0, 3), (2, 1, 4, 0, 0)
    arguments = transducer_arguments(frames, labels, device, dtype=dtype, spare=3, longest=longest)
    # The tail may hold anything.
    for name in LEAVES[:2]:
        arguments[name][-3:] = torch.nan
    upstream = torch.tensor([1.0, -3.0, 2.0, 1.0, 0.5])
    expected = gradients(arguments, upstream)
    overwritten = gradients(arguments, upstream, overwrite_inputs=True)
    for name, x in overwritten.items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("keeps_logits", [False, True])
def test_the_peak_has_no_gradients_of_the_inputs(keeps_logits: bool, device: torch.device) -> None:
    """All that is made from the call of the loss to the end of its backward."""
    sequences, frames, labels = 24, 16, 3
    set_workspace(2**18 if keeps_logits else 2**15)
    sizes = (frames,) * sequences, (labels,) * sequences
    arguments = transducer_arguments(*sizes, device)
    given = [x for x in arguments.values() if isinstance(x, Tensor)]
    inputs = arguments["encoded"].nbytes + arguments["predicted"].nbytes
    peaks = []
    for overwrite_inputs in (False, True):
        leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES}
        made = {name: leaves[name] * 1 for name in LEAVES[:2]}
        with Live(*given, *leaves.values(), *made.values()) as live:
            loss = transducer_loss(**(arguments | leaves | made), overwrite_inputs=overwrite_inputs)
            torch.autograd.grad(loss.sum(), [*made.values(), leaves["weight"], leaves["bias"]])
        peaks.append(live.peak)
    assert inputs > 2**15
    assert abs(peaks[0] - peaks[1] - inputs) < 2**8, (peaks, inputs)


def test_a_second_backward_is_refused(device: torch.device) -> None:
    arguments = transducer_arguments((3, 2), (1, 2), device)
    leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES}
    made = {name: leaves[name] * 1 for name in LEAVES[:2]}
    kept = made["encoded"].square().sum()
    loss = transducer_loss(**(arguments | leaves | made), overwrite_inputs=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward"):
        loss.backward()
    # A kernel counts versions as an operation of torch does.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
