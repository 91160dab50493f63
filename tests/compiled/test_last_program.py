"""Order of the barriers, the atomic and the reads of `is_last_program`, as compiled."""

import re

import pytest
import torch

from effasr_kernels.runtime import launch
from tests.compiled.conftest import ARCHITECTURES
from tests.gpu.test_last_program import CHANNELS, ROWS, add_rows


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reads_follow_the_acquire_and_stores_precede_the_release(
    architecture: int, compiled_ok
) -> None:
    x, parts, counters = torch.empty(4 * ROWS, CHANNELS), 4, torch.empty(1, dtype=torch.int32)
    arguments = x, torch.empty(parts, CHANNELS), x[0], counters, counters, parts
    with launch.recording(divmod(architecture, 10)) as launches:
        launch.launch(add_rows, (parts, 1), *arguments, BLOCK=ROWS, BLOCK_C=CHANNELS)
    (needs,) = compiled_ok(launches, architecture).values()
    names = {
        "store": r"st\.global",
        "barrier": r"bar\.sync",
        "add": r"atom\.global\.gpu\.acq_rel\.add\.u32",
        "read": r"ld\.global\.cg",
    }
    steps = [
        next((name for name, pattern in names.items() if re.search(pattern, line)), "")
        for line in needs.ptx.splitlines()
    ]
    steps = [name for name in steps if name]
    add = steps.index("add")
    assert steps.count("add") == 1
    first_store, first_read = steps.index("store"), steps.index("read")
    assert "barrier" in steps[first_store:add]
    assert "barrier" in steps[add:first_read]
    assert "read" not in steps[:add]
