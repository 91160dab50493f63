"""The Triton backend of `linear_cross_entropy` against the reference."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import linear_cross_entropy
from effasr_kernels.shared import projection
from tests.support.operation_cases import ignored_targets
from tests.support.tolerance import assert_no_worse

WIDTH, CLASSES = 24, 43


def _summed(
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    *,
    uniform: bool,
    exact: bool = False,
    **options,
) -> tuple[Tensor, ...]:
    """Losses, and gradients of 0.37 times their sum, of 61 rows, a third of them ignored.

    With ``exact``, they are computed in float64 from inputs of the given dtype.
    """
    torch.manual_seed(3)
    rows, width, classes = 61, options.pop("width", WIDTH), options.pop("classes", CLASSES)
    leaves = [torch.randn(rows, width), torch.randn(classes, width) / width**0.5]
    leaves += [torch.randn(classes)] if options.pop("bias", True) else []
    targets = ignored_targets(rows, classes).to(device)
    leaves = [x.to(device, dtype) for x in leaves]
    leaves = [(x.double() if exact else x).requires_grad_() for x in leaves]
    leaves[0].data[targets == -100] = torch.nan
    losses = linear_cross_entropy(
        leaves[0],
        leaves[1],
        targets,
        bias=leaves[2] if len(leaves) > 2 else None,
        uniform_gradient=uniform,
        backend=backend,
        **options,
    )
    return losses.detach(), *torch.autograd.grad(0.37 * losses.sum(), leaves)


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1, "z_loss": 0.01},
        {"bias": False},
        {"label_smoothing": 1.0},
        {"width": 130, "classes": 300, "label_smoothing": 0.1},
        {"width": 16, "classes": 1100},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [16, 1024])
def test_gradients_of_the_forward_are_those_of_the_backward(
    options: dict, chunk: int, monkeypatch, dtype: torch.dtype, device: torch.device
) -> None:
    """Against the reference in float64, no less exact than gradients of the backward."""
    monkeypatch.setattr(projection, "chunk_rows", lambda width: chunk)
    exact = _summed(dtype, device, "reference", uniform=True, exact=True, **options)
    late = _summed(dtype, device, "triton", uniform=False, **options)
    early = _summed(dtype, device, "triton", uniform=True, **options)
    again = _summed(dtype, device, "triton", uniform=True, **options)
    plain = _summed(dtype, device, "reference", uniform=True, **options)
    for truth, old, new, other, same in zip(exact, late, early, plain, again, strict=True):
        assert torch.equal(new, same)
        assert new.dtype == old.dtype
        assert bool((new == 0).where(old == 0, True).all())
        assert_no_worse(new, truth, other)


@pytest.mark.parametrize("uniform", [False, True])
def test_frozen_classes_leave_out_one_product(
    uniform: bool, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: torch.device
) -> None:
    """And the gradient of the rows is the same, to the bit."""
    monkeypatch.setattr(projection, "chunk_rows", lambda width: 16)
    hidden = torch.randn(21, WIDTH, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, device=device, dtype=dtype)
    bias = torch.randn(CLASSES, device=device, dtype=dtype)
    targets = ignored_targets(21, CLASSES).to(device)
    options = {"uniform_gradient": uniform, "label_smoothing": 0.1, "backend": "triton"}
    found = []
    for trained in (True, False):
        if not trained:
            # It is the product for the gradient of the weight alone.
            monkeypatch.setattr(projection, "multiply_add", lambda *_: pytest.fail("computed"))
        own = [x.clone().requires_grad_(trained) for x in (weight, bias)]
        losses = linear_cross_entropy(hidden, own[0], targets, bias=own[1], **options)
        found.append(torch.autograd.grad(losses.sum(), hidden)[0])
    assert torch.equal(*found)


def test_rows_with_several_upstream_gradients_have_none(
    dtype: torch.dtype, device: torch.device
) -> None:
    """NaN, and not a gradient that is wrong; what is ignored may differ."""
    hidden = torch.randn(6, WIDTH, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, device=device, dtype=dtype, requires_grad=True)
    targets = torch.tensor([1, -100, 5, 7, -100, 2], device=device)
    losses = linear_cross_entropy(hidden, weight, targets, uniform_gradient=True, backend="triton")
    for upstream, is_uniform in (
        ([2.0, 9.0, 2.0, 2.0, torch.nan, 2.0], True),
        ([2.0, 2.0, 2.0, 3.0, 2.0, 2.0], False),
        ([2.0, 2.0, torch.nan, 2.0, 2.0, 2.0], False),
    ):
        given = torch.tensor(upstream, device=device)
        found = torch.autograd.grad(losses, (hidden, weight), given, retain_graph=True)
        assert all(bool(x.isfinite().all()) for x in found) == is_uniform
        assert bool(found[1].isnan().all()) != is_uniform


def test_nothing_is_differentiated_without_a_backward(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: torch.device
) -> None:
    def refuse(*args, **options) -> None:
        raise AssertionError("gradients were computed")

    monkeypatch.setattr(projection, "project_backward", refuse)
    hidden = torch.randn(6, WIDTH, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, device=device, dtype=dtype)
    targets = torch.tensor([1, -100, 5, 7, -100, 2], device=device)
    options = {"uniform_gradient": True, "backend": "triton"}
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, targets, **options)
    linear_cross_entropy(hidden.detach(), weight, targets, **options)
    with pytest.raises(AssertionError, match="were computed"):
        linear_cross_entropy(hidden, weight, targets, **options)


@pytest.mark.parametrize("count", [1, 30, 1025, 8192, 16_384, 262_144])
def test_chunks_fit_the_workspace(count: int) -> None:
    rows = projection.chunk_rows(count)
    assert rows % 128 == 0
    assert rows >= 1024
    assert rows == 1024 or rows * count * 4 <= 64 * 2**20
    assert rows == 1024 or (rows + 128) * count * 4 > 64 * 2**20


def test_a_target_out_of_range_is_nan_and_alone(dtype: torch.dtype, device: torch.device) -> None:
    hidden = torch.randn(4, WIDTH, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, device=device, dtype=dtype)
    targets = torch.tensor([1, CLASSES, -1, 2**31 - 1], device=device)
    losses = linear_cross_entropy(hidden, weight, targets, backend="triton")
    assert losses.isnan().tolist() == [False, True, True, True]
    (gradient,) = torch.autograd.grad(losses.sum(), hidden)
    assert gradient.isnan().any(1).tolist() == [False, True, True, True]


def test_a_class_may_be_impossible(dtype: torch.dtype, device: torch.device) -> None:
    """A bias of -inf takes a class out, in forward and backward."""
    hidden = torch.randn(5, WIDTH, device=device, dtype=dtype)
    weight = torch.randn(CLASSES, WIDTH, device=device, dtype=dtype)
    bias = torch.zeros(CLASSES, device=device, dtype=dtype)
    bias[7:] = -torch.inf
    targets = torch.tensor([0, 6, 3, 2, 1], device=device)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    got = linear_cross_entropy(*leaves, targets, bias=bias, backend="triton")
    fewer = [x.detach().double().requires_grad_() for x in (hidden, weight[:7])]
    expected = F.cross_entropy(fewer[0] @ fewer[1].t(), targets, reduction="none")
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    d_hidden, d_weight = torch.autograd.grad(got.sum(), leaves)
    exact_hidden, exact_weight = torch.autograd.grad(expected.sum(), fewer)
    torch.testing.assert_close(d_hidden.double(), exact_hidden, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(d_weight[:7].double(), exact_weight, rtol=1e-2, atol=2e-2)
    assert bool((d_weight[7:] == 0).all())


def test_all_rows_may_be_ignored(dtype: torch.dtype, device: torch.device) -> None:
    """With targets of 32 bits, and another number for what is ignored."""
    hidden = torch.full((3, WIDTH), torch.nan, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, device=device, dtype=dtype, requires_grad=True)
    targets = torch.full((3,), 5, device=device, dtype=torch.int32)
    options = {"z_loss": 0.1, "ignore_index": 5, "backend": "triton"}
    losses = linear_cross_entropy(hidden, weight, targets, **options)
    upstream = torch.full((3,), torch.nan, device=device)
    for x in (losses, *torch.autograd.grad(losses, (hidden, weight), upstream)):
        assert bool((x == 0).all())
