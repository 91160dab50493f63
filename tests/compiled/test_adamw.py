"""The kernel of the optimizer, compiled."""

import re

import pytest
import torch

from effasr.optim.fused_adamw import FusedAdamW
from effasr_kernels.runtime import launch
from tests.compiled.conftest import ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_every_architecture(architecture: int, compiled_ok) -> None:
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
