"""The Triton backend of `projected_top_k` against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import projected_top_k
from effasr_kernels.projected_top_k import _triton
from tests.support.tolerance import assert_no_worse


def _check(
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: int,
    width: int = 24,
    count: int = 75,
    k: int = 1,
    classes: int | None = None,
    bias: bool = True,
) -> None:
    hidden = torch.randn(rows, width).to(dtype)
    weight = (torch.randn(count, width) / width**0.5).to(dtype)
    offsets = torch.randn(count).to(dtype) if bias else None

    def run(backend: str, where: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        h, w = (x.to(where, dtype) for x in (hidden, weight))
        b = None if offsets is None else offsets.to(where, dtype)
        found = projected_top_k(h, w, bias=b, k=k, classes=classes, backend=backend)
        return found[0].cpu(), found[1].cpu()

    gold, order = run("reference", "cpu", torch.float64)
    baseline, _ = run("reference", "cpu", dtype)
    log_probs, indices = run("triton", device, dtype)
    assert_no_worse(log_probs, gold, baseline)
    # Where two differ by less than a sum in float32 errs, either may come first.
    logits = hidden.double() @ weight.double().t() + (0 if offsets is None else offsets.double())
    chosen, best = logits.gather(1, indices), logits.gather(1, order)
    torch.testing.assert_close(chosen, best, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == k for row in indices.tolist())


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 70])
@pytest.mark.representative(rows=[0, 1, 17])
def test_matches_the_reference(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(dtype, device, rows=rows, count=40)


_PUSHED = [{"k": 2, "bias": False}, {"k": 16, "width": 144}, {"k": 7, "count": 7}]


@pytest.mark.parametrize(
    "options",
    [
        *(*_PUSHED, {"k": 5, "classes": 40}, {"width": 1, "count": 1}),
        {"k": 3, "count": 300, "width": 128},
    ],
    ids=str,
)
@pytest.mark.representative(options=_PUSHED)
def test_serves_any_options_and_widths(options: dict[str, Any], device: torch.device) -> None:
    _check(torch.float32, device, rows=3, **options)


@pytest.mark.parametrize(
    ("options", "patches"),
    [
        ({"count": 150, "k": 4}, {"_PROGRAMS": 1, "multiprocessors": lambda _: 2}),
        ({"count": 100, "k": 5}, {"_BLOCK": 8}),
    ],
    ids=["parts of several tiles", "several loads to merge"],
)
def test_matches_the_reference_in_parts(
    options: dict[str, int],
    patches: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    for name, value in patches.items():
        monkeypatch.setattr(_triton, name, value)
    _check(torch.float32, device, rows=2, **options)


def test_of_equal_logits_the_lower_class_comes_first(device: torch.device) -> None:
    """Within tiles and across; both zeros are equal, and the least numbers have an order too."""
    hidden = torch.tensor([[1.0], [-1.0], [0.0]], device=device)
    weight = torch.randint(-1, 2, (100, 1)).float()
    weight[::7] *= -0.0
    for k in (1, 4, 16):
        expected = projected_top_k(hidden.cpu(), weight, k=k, backend="reference")
        found = projected_top_k(hidden, weight.to(device), k=k, backend="triton")
        assert torch.equal(found[1].cpu(), expected[1])


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_classes_may_be_impossible(device: torch.device, backend: str) -> None:
    bias = torch.full((40,), -torch.inf, device=device)
    bias[37] = 0
    given = torch.ones(1, 2, device=device), torch.ones(40, 2, device=device)
    log_probs, indices = projected_top_k(*given, bias=bias, k=3, backend=backend)
    assert indices.tolist() == [[37, 0, 1]]
    assert log_probs.tolist() == [[0.0, -torch.inf, -torch.inf]]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_row_with_a_nan_is_nan_and_alone(
    dtype: torch.dtype, device: torch.device, backend: str
) -> None:
    hidden = torch.randn(3, 8, device=device).to(dtype)
    weight = torch.randn(50, 8, device=device).to(dtype)
    expected = projected_top_k(hidden, weight, k=2, backend=backend)
    hidden[1] = torch.nan
    log_probs, indices = projected_top_k(hidden, weight, k=2, backend=backend)
    assert log_probs[1].isnan().all()
    assert bool(((indices >= 0) & (indices < 50)).all())
    for found, wanted in zip((log_probs, indices), expected, strict=True):
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])


def test_a_row_depends_on_itself_alone_to_the_bit(dtype: torch.dtype, device: torch.device) -> None:
    hidden = torch.randn(18, 32, device=device).to(dtype)
    weight = torch.randn(40, 32, device=device).to(dtype)
    expected = projected_top_k(hidden, weight, k=3, backend="triton")
    kept = [0, 5, 17]
    others = torch.randn(18, 32, device=device).to(dtype)
    others[kept] = hidden[kept]
    found = projected_top_k(others, weight, k=3, backend="triton")
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[kept], y[kept])
    if device.type != "cuda":
        # NumPy's matrix product sums rows at the edge of its tiles in another order.
        return
    order = torch.randperm(18).tolist()
    found = projected_top_k(hidden[order], weight, k=3, backend="triton")
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y[order])


def test_tensors_need_not_be_contiguous(dtype: torch.dtype, device: torch.device) -> None:
    """Columns apart, and rows of wider tensors."""
    hidden, weight = torch.randn(24, 48, device=device), torch.randn(50, 48, device=device)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    for pair in ((hidden.t()[:3], weight[:, ::2]), (hidden[:3, :24], weight[:, :24])):
        strided = projected_top_k(*pair, k=2, backend="triton")
        whole = projected_top_k(*(x.contiguous() for x in pair), k=2, backend="triton")
        assert all(map(torch.equal, strided, whole))


def test_a_graph_follows_its_input(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    hidden, weight = torch.randn(5, 64, device=device), torch.randn(900, 64, device=device)
    call = lambda: projected_top_k(hidden, weight, k=3, backend="triton")
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for _ in range(3):
        hidden.normal_()
        graph.replay()
        assert all(map(torch.equal, found, call()))
