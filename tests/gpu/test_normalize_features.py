import pytest
import torch

from effasr_kernels import PackedLayout, normalize_features
from effasr_kernels.normalize_features import _triton
from effasr_kernels.testing.tolerance import assert_no_worse


@pytest.mark.parametrize(("slot", "channels"), [(8, 20), (2, 5)])
@pytest.mark.representative(slot=8)
def test_is_as_accurate_as_the_reference(
    lengths: tuple[int, ...], slot: int, channels: int, dtype: torch.dtype, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + 9)
    x = (torch.randn(slot * layout.rows, channels) + 5).to(dtype)
    # One row of the last slot of every other sequence is not real; neither is the tail.
    real = torch.tensor([max(0, slot * n - i % 2) for i, n in enumerate(lengths)])
    for begin, length in zip(layout.cu_seqlens_host, real.tolist(), strict=False):
        x[slot * begin + length : slot * begin + length + (length % 2)] = torch.nan
    x[slot * layout.total :] = torch.nan

    def call(x: torch.Tensor, where: torch.device, backend: str) -> torch.Tensor:
        given = x.to(where), real.to(where), layout.to(where)
        return normalize_features(*given, rows_per_slot=slot, backend=backend).cpu()

    here = torch.device("cpu")
    found = call(x, device, "triton")
    gold = call(x.double(), here, "reference")
    assert_no_worse(found, gold, call(x, here, "reference"))
    assert torch.equal(found, call(x, device, "triton"))
    assert not found[slot * layout.total :].any()


def test_a_tail_longer_than_all_programs_of_it_is_zero(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_TAIL_PROGRAMS", 2)
    layout = PackedLayout.from_lengths((1,), device, rows=1 + 2 * 128 // 8 + 3)
    x = torch.full((8 * layout.rows, 1), torch.nan, device=device)
    x[:8, 0] = torch.arange(8.0)
    real = torch.tensor([8], device=device)
    found = normalize_features(x, real, layout, rows_per_slot=8, backend="triton").cpu()
    torch.testing.assert_close(found[:8].mean(), torch.zeros(()), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[:8].std(), torch.ones(()), atol=1e-4, rtol=0)
    assert not found[8:].any()
