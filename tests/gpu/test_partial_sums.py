"""The sum of partial sums, in one launch."""

from functools import partial

import pytest
import torch

from effasr_kernels.runtime.deferred_sums import PartialSums, waiting
from effasr_kernels.runtime.launch import recording
from effasr_kernels.shared.partial_sums import summed, summed_parts, sums_of_layer
from tests.gpu.conftest import EMULATED


def test_it_is_one_launch() -> None:
    with recording((9, 0)) as launches:
        found = summed(torch.empty(264, 2, 1000), torch.bfloat16)
    assert (found.shape, found.dtype) == ((2, 1000), torch.bfloat16)
    assert [(x.kernel.fn.__name__, x.grid) for x in launches] == [("sum_rows", (63,))]


def _of_a_layer(device: torch.device, narrow: torch.dtype) -> list[PartialSums]:
    """Partial sums of 14 launches, more than one addition has, of several dtypes and sizes."""
    with waiting() as found:
        for number in range(7):
            wide = torch.randint(-999, 999, (number * 30, 3, 41), device=device).float()
            summed_parts(wide, torch.float32, narrow)
            summed(torch.randint(-999, 999, (65, 7), device=device).float(), narrow)
    return found


def _with_rows(device: torch.device, dtype: torch.dtype) -> list[PartialSums]:
    """Tensors with many rows, few and none among partial sums, of which some are many, too."""
    with waiting() as found:
        summed(torch.randint(-999, 999, (1100, 9), device=device).float(), dtype)
        summed(torch.randint(-999, 999, (65, 7), device=device).float(), dtype)
        summed_parts(torch.randn(2, 3, 41, device=device), torch.float32, dtype)
    for shape in ((1060, 70), (3, 33), (0, 5), (1281, 8)):
        x = torch.randint(-9, 9, shape, device=device).to(dtype)
        out = x.new_empty(shape[1])
        found.insert(1, PartialSums(x, out, None, partial(torch.sum, x, 0, out=out)))
    return found


def test_programs_share_the_rows_of_long_tensors(dtype: torch.dtype, device: torch.device) -> None:
    found = _with_rows(device, dtype)
    sums = sums_of_layer(found)
    for x, got in zip(found, sums, strict=True):
        x.run()
        parts = [part.flatten().float() for part in (x.out, x.last) if part is not None]
        # Sums of integers are exact in float32, and rounded once.
        assert torch.equal(got, torch.cat(parts))
    # The counters are zeros again.
    for one, other in zip(sums, sums_of_layer(found), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not EMULATED, reason="only the emulator chooses the order of programs")
def test_the_order_of_programs_changes_no_bit() -> None:
    from emulator.emulate import emulated

    x = torch.randn(1300, 65)
    out = torch.empty(65)
    sums = PartialSums(x, out, None, partial(torch.sum, x, 0, out=out))
    found = []
    for seed in range(3):
        with emulated(EMULATED, seed):
            found.append(sums_of_layer([sums])[0])
    assert all(torch.equal(one, found[0]) for one in found[1:])
    # Each addition rounds by 2**-24 of a partial sum.
    bound = 1300 * 2**-24 * x.abs().sum(0)
    assert bool(((found[0] - x.double().sum(0)).abs() < bound).all())


def test_tensors_of_two_dtypes_are_two_launches() -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        x = torch.empty(300, 8, dtype=dtype)
        found.append(PartialSums(x, x[0], None, lambda: None))
    with recording((9, 0)) as launches:
        sums_of_layer(found)
    assert [launch.constants["NARROW"] for launch in launches] == ["bf16", "fp16"]
    assert [launch.args["rows1"] is None for launch in launches] == [False, True]


def test_sums_of_a_layer_are_few_launches() -> None:
    with recording((9, 0)) as launches:
        found = _of_a_layer(torch.device("cpu"), torch.bfloat16)
        assert launches == []
        sums_of_layer(found)
    assert [x.kernel.fn.__name__ for x in launches] == ["sum_segments"] * 2
