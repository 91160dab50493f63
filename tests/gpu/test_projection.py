"""The projection that losses share, against torch in float64."""

import pytest
import torch
from torch import Tensor

from effasr_kernels.shared import projection
from effasr_kernels.shared.projection import project_backward, row_statistics
from effasr_kernels.testing.tolerance import assert_no_worse

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles in a small matrix, and up to six programs that share a row."""
    small = {"BLOCK_R": 16, "BLOCK_V": 16, "BLOCK_C": 16, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(projection, "product_tiles", lambda *_: small)
    monkeypatch.setattr(projection, "_PROGRAMS", 6)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def _expected(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> list[Tensor]:
    z = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    return [z.logsumexp(1), z.gather(1, classes.long()[:, None])[:, 0], z.mean(1)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("rows", "count", "width"), [(1, 1, 1), (3, 97, 16), (50, 33, 40), (100, 16, 48), (17, 250, 7)]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.representative(rows=[1, 50], with_bias=True)
@pytest.mark.representative(rows=17, with_bias=False)
def test_statistics(
    rows: int, count: int, width: int, with_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    hidden = _random(rows, width, dtype=dtype, device=device)
    weight = _random(count, width, dtype=dtype, device=device)
    bias = _random(count, dtype=dtype, device=device) if with_bias else None
    classes = torch.randint(count, (rows,), device=device)
    ignored = torch.arange(rows, device=device) % 4 == 3
    hidden[ignored] = torch.nan
    got = row_statistics(
        hidden, weight, bias, classes.masked_fill(ignored, -1), ignore_index=-1, with_mean=True
    )
    wide = [None if x is None else x.double() for x in (hidden, weight, bias)]
    exact = _expected(*wide, classes)
    plain = [None if x is None else x.float() for x in (hidden, weight, bias)]
    baseline = _expected(*plain, classes)
    for x, y, z in zip(got, exact, baseline, strict=True):
        assert x is not None
        assert bool((x[ignored] == 0).all())
        assert_no_worse(x[~ignored], y[~ignored], z[~ignored])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("total", [0, 5, 16, 17, 40])
@pytest.mark.representative(total=[0, 16, 17])
def test_rows_past_the_total_are_zero(total: int, dtype: torch.dtype, device: torch.device) -> None:
    hidden = _random(40, 20, dtype=dtype, device=device)
    weight = _random(35, 20, dtype=dtype, device=device)
    expected = (hidden.double() @ weight.double().t()).logsumexp(1)
    hidden[total:] = torch.nan
    end = torch.tensor([0, total], dtype=torch.int32, device=device)[-1:]
    got = row_statistics(hidden, weight, None, total=end)
    assert got.class_logit is None
    assert got.mean is None
    found = got.log_normalizer[:total].double()
    torch.testing.assert_close(found, expected[:total], rtol=1e-6, atol=1e-6)
    assert bool((got.log_normalizer[total:] == 0).all())


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


def test_no_rows(dtype: torch.dtype, device: torch.device) -> None:
    hidden = torch.empty(0, 8, dtype=dtype, device=device)
    weight = torch.ones(5, 8, dtype=dtype, device=device)
    counted = torch.empty(0, dtype=torch.bool, device=device)
    assert row_statistics(hidden, weight, None).log_normalizer.shape == (0,)
    d_hidden, d_weight, d_bias = project_backward(
        hidden, weight, weight[:, 0], counted, lambda *_: pytest.fail("there is nothing to fill")
    )
    assert d_hidden.shape == (0, 8)
    assert d_bias is not None
    assert bool((d_weight == 0).all() & (d_bias == 0).all())


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


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.representative(chunk=16, padded=True)
@pytest.mark.representative(chunk=1024, padded=False)
def test_backward(
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    padded: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """With squares of the logits as the loss, so that the gradient is twice the logits."""
    monkeypatch.setattr(projection, "chunk_rows", lambda width: chunk)
    hidden = _random(41, 20, dtype=dtype, device=device)
    weight = _random(33, 20, dtype=dtype, device=device) / 20
    bias = _random(33, dtype=dtype, device=device)
    counted = torch.rand(41, device=device) < 0.7
    firsts = []

    def fill(first: int, logits: Tensor, d_logits: Tensor) -> None:
        firsts.append(first)
        assert logits.dtype == torch.float32
        assert logits.stride() == d_logits.stride() == ((48 if padded else 33), 1)
        mask = counted[first : first + logits.shape[0], None]
        d_logits.copy_(torch.where(mask, 2 * (logits + bias.float()), 0))

    clean = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    z = clean[0] @ clean[1].t() + clean[2]
    exact = torch.autograd.grad((z * counted[:, None]).square().sum(), clean)
    hidden[~counted] = torch.nan
    got = project_backward(hidden, weight, bias, counted, fill, padded=padded)
    assert firsts == list(range(0, 41, chunk))
    for x, y in zip(got, exact, strict=True):
        assert x is not None
        assert x.dtype == dtype
        # The gradient of the logits is rounded once, and so is the result.
        slack = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
        assert float((x.double() - y).abs().max()) <= slack * float(y.abs().max())
