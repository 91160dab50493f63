import kernel_counts
import pytest
import torch
import triton
import triton.language as tl
from emulator.emulate import binaries, emulated

from effasr_kernels.runtime.launch import launch
from tests.profiling.test_emulator import pytestmark  # noqa: F401 (where it can run)


@triton.jit
def gather(values, out, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One number of each of so many."""
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(values + place * STRIDE))


@pytest.mark.parametrize(("stride", "sectors"), [(2, 2), (8, 8), (16, 8)])
def test_scattered_loads_are_counted(stride: int, sectors: int) -> None:
    """128 numbers of 4 bytes, 16 sectors when they are neighbours, here so many times as many."""
    values, out = torch.arange(2048.0), torch.zeros(128)
    before = {id(binary) for binary in binaries()}
    with emulated(90, counted=True):
        launch(gather, (1,), values, out, STRIDE=stride, BLOCK=128)
    assert torch.equal(out, values[: 128 * stride : stride])
    (binary,) = (x for x in binaries() if id(x) not in before)
    lines = kernel_counts.lines_of(binary)
    sums = [counts for counts in lines.values() if counts.sectors]
    assert sum(counts.needed for counts in sums) == 32
    assert sum(counts.sectors for counts in sums) == 16 * (sectors + 1)


def test_kernels_of_an_operation_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--frames", "30", "--head-width", "16", "--vocabulary", "64"]
    kernel_counts.main(["--op", "attention", "--kind", "causal", *sizes])
    printed = capsys.readouterr().out
    assert "attention causal" in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    for kernel in ("attention_forward", "attention_backward_kv", "attention_backward_q"):
        assert int(rows[kernel][1].replace(",", "")) > 1000
    # What has run before is listed again, with the counts of one run.
    kernel_counts.main(["--op", "attention", "--kind", "causal", *sizes])
    assert capsys.readouterr().out == printed
