"""The kernel that adds the partial sums of a layer, compiled."""

import re

import pytest
import torch

from effasr_kernels.runtime import launch
from effasr_kernels.runtime.deferred_sums import waiting
from effasr_kernels.shared.partial_sums import summed, summed_parts, sums_of_layer
from tests.compiled.conftest import ARCHITECTURES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("segments", [3, 8])
@pytest.mark.representative(segments=8)
def test_compiles_for_every_architecture(segments: int, architecture: int, compiled_ok) -> None:
    with waiting() as found:
        for _ in range(segments - 1):
            summed_parts(torch.empty(264, 3, 512), torch.float32, torch.bfloat16)
        summed(torch.empty(132, 2048), torch.bfloat16)
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        sums_of_layer(found)
    (needs,) = compiled_ok(launches, architecture).values()
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # Eight segments must leave room for four programs on a multiprocessor.
    assert needs.registers <= 128
