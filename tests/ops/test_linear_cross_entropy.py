import importlib

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import linear_cross_entropy
from tests.support.operation_cases import ignored_targets

WIDTH, CLASSES = 4, 6


@pytest.mark.parametrize("largest", [2**24, 4 * CLASSES])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_torch(
    monkeypatch: pytest.MonkeyPatch, bias: bool, smoothing: float, largest: int
) -> None:
    """In one piece, and in chunks of four rows."""
    reference = importlib.import_module("effasr_kernels.linear_cross_entropy.reference")
    monkeypatch.setattr(reference, "_LARGEST", largest)
    leaves = [torch.randn(23, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)]
    leaves = [leaf.double().requires_grad_() for leaf in leaves[: 3 if bias else 2]]
    targets, upstream = ignored_targets(23, CLASSES), torch.randn(23, dtype=torch.float64)
    hidden, weight, offset = (*leaves, None)[:3]
    got = linear_cross_entropy(hidden, weight, targets, bias=offset, label_smoothing=smoothing)
    logits = F.linear(hidden, weight, offset)
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(got, expected)
    for x, y in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_z_loss_adds_the_square_of_the_log_partition() -> None:
    hidden, weight = torch.randn(5, WIDTH).double(), torch.randn(CLASSES, WIDTH).double()
    targets = torch.tensor([0, 3, -100, 5, 1])
    plain = linear_cross_entropy(hidden, weight, targets)
    added = linear_cross_entropy(hidden, weight, targets, z_loss=0.5) - plain
    expected = 0.5 * torch.stack([torch.exp(weight @ h).sum().log() ** 2 for h in hidden])
    expected[2] = 0
    torch.testing.assert_close(added, expected)


def test_ignored_rows_may_hold_anything() -> None:
    hidden = torch.randn(4, WIDTH)
    hidden[1] = torch.nan
    hidden.requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)
    targets = torch.tensor([2, 7, 0, 1], dtype=torch.int32)
    losses = linear_cross_entropy(hidden, weight, targets, ignore_index=7, label_smoothing=0.1)
    losses.sum().backward()
    assert losses[1] == 0
    assert hidden.grad is not None
    assert bool((hidden.grad[1] == 0).all())
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())


def test_all_rows_may_be_ignored() -> None:
    hidden = torch.full((3, WIDTH), torch.nan, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.full((3,), -100)).sum().backward()
    assert hidden.grad is not None
    assert bool((hidden.grad == 0).all())
