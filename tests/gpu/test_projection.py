"""The projection that losses share, against torch in float64."""

import pytest
import torch
from torch import Tensor

from effasr_kernels.shared import projection
from effasr_kernels.shared.projection import row_statistics
from tests.support.tolerance import assert_no_worse


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("how", ["columns", "rows", "offset", "transposed", "wide"])
@pytest.mark.representative(how=["columns", "transposed", "wide"])
def test_any_strides(how: str, dtype: torch.dtype, device: torch.device) -> None:
    def lay(x: Tensor) -> Tensor:
        rows, width = x.shape
        if how == "columns":
            return torch.stack([x, x * torch.nan], -1)[..., 0]
        if how == "rows":
            return torch.stack([x, x * torch.nan], 1)[:, 0]
        if how == "offset":
            return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(rows, width)
        if how == "transposed":
            return x.t().contiguous().t()
        return torch.cat([x, x.new_full((rows, 3), torch.nan)], 1)[:, :width]

    hidden = _random(20, 32, dtype=dtype, device=device)
    weight = _random(24, 32, dtype=dtype, device=device)
    plain = row_statistics(hidden, weight, None).log_normalizer
    assert torch.equal(row_statistics(lay(hidden), lay(weight), None).log_normalizer, plain)


@pytest.mark.usefixtures("small_tiles")
def test_large_logits_and_impossible_classes(device: torch.device) -> None:
    """The pivot is the largest logit of the tiles so far, which may all be -inf."""
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], device=device)
    weight = torch.linspace(-1, 1, 40, device=device)[:, None]
    bias = torch.zeros(40, device=device)
    bias[:20] = -torch.inf
    got = row_statistics(hidden, weight, bias).log_normalizer
    expected = (hidden.double() @ weight.double().t() + bias.double()).logsumexp(1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pitch", [33, 48])
def test_products_are_wide_and_keep_to_their_rows(
    pitch: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Results in float32 for narrow factors, also in rows that are apart; sums start from them."""
    left, right = (_random(*shape, dtype=dtype, device=device) for shape in ((20, 40), (33, 40)))
    exact = left.double() @ right.double().t()
    plain = left.float() @ right.float().t()
    buffer = torch.full((20, pitch), 7.0, device=device)
    out = buffer[:, :33]
    projection.multiply(left, right.t(), out)
    assert_no_worse(out, exact, plain)
    # What is between the rows stays, and an unwritten element is not part of the first product.
    assert bool((buffer[:, 33:] == 7).all())
    buffer[:, :33] = torch.nan
    projection.multiply(left, right.t(), out)
    assert_no_worse(out, exact, plain)
    total = torch.randn(40, 33, device=device)
    gradient = buffer[:, :33].to(dtype)
    started = total.double()
    projection.multiply_add(left.t(), gradient, total)
    addend = left.double().t() @ gradient.double()
    assert_no_worse(total, started + addend, started.float() + left.float().t() @ gradient.float())
