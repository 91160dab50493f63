import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import linear_cross_entropy
from effasr_kernels.testing.conformance import Case, check_compiler

WIDTH, CLASSES = 4, 6


def _targets(length: int) -> Tensor:
    """Classes, and about a third of rows that do not count."""
    targets = torch.randint(CLASSES, (length,))
    return targets.masked_fill(torch.rand(length) < 0.3, -100)


def _case(lengths: tuple[int, ...]) -> Case:
    return Case(
        lambda packed, shared: linear_cross_entropy(
            packed["hidden"].values,
            shared["weight"],
            packed["targets"].values,
            bias=shared["bias"],
            label_smoothing=0.1,
            z_loss=0.01,
        ),
        {
            "hidden": [torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths],
            "targets": [_targets(n) for n in lengths],
        },
        {
            "weight": torch.randn(CLASSES, WIDTH, dtype=torch.float64),
            "bias": torch.randn(CLASSES, dtype=torch.float64),
        },
        results=("hidden",),
    )


def test_keeps_the_contract(check: Callable[[Case], None], lengths: tuple[int, ...]) -> None:
    check(_case(lengths))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2)))


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
    targets, upstream = _targets(23), torch.randn(23, dtype=torch.float64)
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


def test_losses_of_narrow_inputs_are_float32() -> None:
    hidden, weight = torch.randn(3, WIDTH).bfloat16(), torch.randn(CLASSES, WIDTH).bfloat16()
    assert linear_cross_entropy(hidden, weight, torch.zeros(3).long()).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": torch.zeros(3)}, r"`hidden` must have shape \(U, C\)"),
        ({"weight": torch.zeros(6, 5)}, r"`weight` must have shape \(V, C\) = \(any, 4\)"),
        ({"targets": torch.zeros(2).long()}, r"`targets` must have shape \(U,\) = \(3,\)"),
        ({"targets": torch.zeros(3)}, "`targets` must be int32 or int64, but is torch.float32"),
        ({"targets": torch.tensor([0, 6, 1])}, r"`targets` must hold .* \[0, 6\) .*, but is 6"),
        ({"targets": torch.tensor([0, -1, 1])}, r"`targets` must hold .* or be -100, but is -1"),
        ({"bias": torch.zeros(4)}, r"`bias` must have shape \(V,\) = \(6,\), but is \(4,\)"),
        ({"weight": torch.zeros(6, 4).half()}, "`weight` must be torch.float32, as `hidden` is"),
        ({"label_smoothing": 1.5}, r"`label_smoothing` must be in \[0, 1\], but is 1.5"),
        ({"z_loss": -1.0}, "`z_loss` must be at least 0, but is -1.0"),
    ],
)
def test_says_what_is_wrong(arguments: dict, message: str) -> None:
    given = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(6, 4)}
    given |= {"targets": torch.zeros(3).long()} | arguments
    with pytest.raises(ValueError, match="^linear_cross_entropy: " + message):
        linear_cross_entropy(**given)
