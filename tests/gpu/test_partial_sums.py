"""The sum of partial sums, in one launch."""

import pytest
import torch

from effasr_kernels.runtime.deferred_sums import PartialSums, waiting
from effasr_kernels.runtime.launch import recording
from effasr_kernels.shared.partial_sums import summed, summed_parts, sums_of_layer


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


def _of_a_layer(device: torch.device, narrow: torch.dtype) -> list[PartialSums]:
    """Partial sums of ten launches, more than one addition has, of several dtypes and sizes."""
    with waiting() as found:
        for number in range(5):
            wide = torch.randint(-999, 999, (number * 30, 3, 41), device=device).float()
            summed_parts(wide, torch.float32, narrow)
            summed(torch.randint(-999, 999, (65, 7), device=device).float(), narrow)
    return found


def test_sums_of_a_layer_are_those_of_each(dtype: torch.dtype, device: torch.device) -> None:
    found = _of_a_layer(device, dtype)
    assert len(found) == 10
    for sums, got in zip(found, sums_of_layer(found), strict=True):
        sums.run()
        parts = [x.flatten().float() for x in (sums.out, sums.last) if x is not None]
        assert torch.equal(got, torch.cat(parts))
        exact = sums.partials.double().sum(0).flatten()
        assert torch.equal(parts[-1], exact[-len(parts[-1]) :].to(dtype).float())


def test_sums_of_a_layer_are_few_launches() -> None:
    with recording((9, 0)) as launches:
        found = _of_a_layer(torch.device("cpu"), torch.bfloat16)
        assert launches == []
        sums_of_layer(found)
    assert [x.kernel.fn.__name__ for x in launches] == ["sum_segments"] * 2
