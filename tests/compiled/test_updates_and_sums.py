"""The kernel of the optimizer, and that which adds the partial sums of a layer, compiled."""

import re

import pytest
import torch

from effasr.optim.fused_adamw import FusedAdamW
from effasr_kernels.runtime import launch
from effasr_kernels.runtime.deferred_sums import PartialSums, waiting
from effasr_kernels.shared.partial_sums import summed, summed_parts, sums_of_layer
from tests.compiled.conftest import ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adamw(architecture: int, compiled_ok) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (70_000, 3)]
    optimizer = FusedAdamW([{"params": parameters}])
    optimizer.follow(
        {p: p.detach().clone() for p in parameters}, {p: p.detach().half() for p in parameters}
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.norm = torch.ones(())
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        optimizer.step()
    (made,) = launches
    # A chunk of 16,384 elements has a program of its own.
    assert made.grid == (6,)
    assert [len(made.read), len(made.written)] == [10, 10]
    (needs,) = compiled_ok(launches, architecture).values()
    # Room for five programs on a multiprocessor; loads and stores of 16 bytes, 64-bit offsets.
    assert needs.registers <= 96
    assert len(re.findall(r"ld\.global\.v4\.b32", needs.ptx)) >= 5
    assert len(re.findall(r"st\.global\.v4\.b32", needs.ptx)) >= 4
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("wide", "narrow"), [(3, 0), (2, 1), (9, 3)])
@pytest.mark.representative(wide=9, narrow=3)
def test_partial_sums(wide: int, narrow: int, architecture: int, compiled_ok) -> None:
    with waiting() as found:
        for _ in range(wide - 1):
            summed_parts(torch.empty(264, 3, 512), torch.float32, torch.bfloat16)
        summed(torch.empty(2246, 2, 8, 64), torch.bfloat16)
    for _ in range(narrow):
        rows, out = (torch.empty(*n, 1536, dtype=torch.bfloat16) for n in ((8448,), ()))
        found.append(PartialSums(rows, out, None, lambda: None))
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        sums_of_layer(found)
    (needs,) = compiled_ok(launches, architecture).values()
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # Loads of 16 bytes, wherever a tensor begins.
    assert not re.search(r"ld\.global(\.cg)?\.b32 ", needs.ptx)
    # Leaves room for five programs on a multiprocessor.
    assert needs.registers <= 96
