"""`transducer_loss` in Triton, whose backward writes the gradients over the inputs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, transducer_loss
from effasr_kernels.transducer_loss import set_workspace
from tests.gpu.live_memory import Live

WIDTH, CLASSES = 24, 6
LEAVES = "encoded", "predicted", "weight", "bias"


@pytest.fixture(autouse=True)
def _workspace() -> Iterator[None]:
    before = set_workspace(2**29)
    yield
    set_workspace(before)


def _arguments(
    frames: tuple[int, ...],
    labels: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    spare: int = 0,
    longest: int | None = None,
) -> dict[str, Any]:
    rows = sum(frames) + spare, sum(labels) + len(labels) + spare
    targets = torch.randint(2, CLASSES, (sum(labels) + spare,))
    layouts = (
        PackedLayout.from_lengths(
            lengths, device, rows=sum(lengths) + spare, static_max_seqlen=longest
        )
        for lengths in (frames, labels)
    )
    layout_frames, layout_targets = layouts
    return {
        "encoded": torch.randn(rows[0], WIDTH).to(device, dtype),
        "predicted": torch.randn(rows[1], WIDTH).to(device, dtype),
        "targets": targets.to(device),
        "layout_frames": layout_frames,
        "layout_targets": layout_targets,
        "weight": torch.randn(CLASSES, WIDTH).div(4).to(device, dtype),
        "bias": torch.randn(CLASSES).to(device, dtype),
        "blank_id": 1,
        "backend": "triton",
    }


def _gradients(arguments: dict[str, Any], upstream: Tensor, **options: Any) -> list[Tensor]:
    """Those of leaves of which encoded and predicted are made, without loss."""
    leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES}
    made = {name: leaves[name] * 1 for name in LEAVES[:2]}
    loss = transducer_loss(**(arguments | leaves | made), **options)
    found = torch.autograd.grad(loss, list(leaves.values()), upstream.to(loss))
    if options.get("overwrite_inputs"):
        assert torch.equal(made["encoded"], found[0])
        assert torch.equal(made["predicted"], found[1])
    return [*found]


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
    arguments = _arguments(frames, labels, device, dtype, spare=3, longest=longest)
    # The tail may hold anything.
    for name in LEAVES[:2]:
        arguments[name][-3:] = torch.nan
    upstream = torch.tensor([1.0, -3.0, 2.0, 1.0, 0.5])
    expected = _gradients(arguments, upstream)
    found = _gradients(arguments, upstream, overwrite_inputs=True)
    for name, x, y in zip(LEAVES, found, expected, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("keeps_logits", [False, True])
def test_the_peak_has_no_gradients_of_the_inputs(keeps_logits: bool, device: torch.device) -> None:
    """All that is made from the call of the loss to the end of its backward."""
    sequences, frames, labels = 24, 16, 3
    set_workspace(2**18 if keeps_logits else 2**15)
    sizes = (frames,) * sequences, (labels,) * sequences
    arguments = _arguments(*sizes, device, torch.float32)
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
    arguments = _arguments((3, 2), (1, 2), device, torch.float32)
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
