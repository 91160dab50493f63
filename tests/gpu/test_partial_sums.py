"""The sum of partial sums, in one launch."""

import pytest
import torch

from effasr_kernels.runtime.launch import recording
from effasr_kernels.shared.partial_sums import summed


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("shape", [(1, 5), (63, 32), (130, 2, 3, 50), (0, 7)])
def test_it_is_the_sum_rounded_once(
    shape: tuple[int, ...], rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    # Sums of these integers are exact in float32, and few of them in 16 bits.
    partials = torch.randint(-999, 999, shape, device=device).float()
    got = summed(partials, dtype, rows=rows)
    assert got.is_contiguous()
    assert got.dtype == dtype
    assert torch.equal(got, partials.double().sum(0).to(dtype))


def test_it_is_one_launch() -> None:
    with recording((9, 0)) as launches:
        found = summed(torch.empty(264, 2, 1000), torch.bfloat16)
    assert (found.shape, found.dtype) == ((2, 1000), torch.bfloat16)
    assert [(x.kernel.fn.__name__, x.grid) for x in launches] == [("sum_rows", (63,))]
