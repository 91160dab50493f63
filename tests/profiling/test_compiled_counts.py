"""Kernels that torch.compile would make for a GPU, beside our operations."""

import csv
import importlib
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

COUNTS = (
    *("launches_forward", "launches_backward"),
    *("bytes_forward", "bytes_backward"),
)
ROWS = Path(__file__).parents[2] / "profiling" / "results" / "compiled_counts.csv"


def _imported(name: str) -> ModuleType:
    """TorchInductor takes seconds to import, and uses what torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)


@pytest.mark.extended
def test_kernels_of_a_compiled_function_are_counted() -> None:
    """One where operators are fused, and more where rows are summed."""
    inductor = _imported("census.inductor")
    x, weight = (torch.randn(n, 64, requires_grad=True) for n in (512, 1))

    def run(compiled) -> None:
        for function in (lambda x: (x + 1).sin(), lambda x: x * weight):
            compiled(function)(x).backward(torch.ones_like(x))

    size, row = 4 * x.numel(), 4 * weight.numel()
    fused, of_fused, product, *of_product = inductor.inductor_kernels(run)
    assert fused == inductor.Kernel(is_backward=False, bytes=2 * size)
    assert of_fused == inductor.Kernel(is_backward=True, bytes=3 * size)
    assert product == inductor.Kernel(is_backward=False, bytes=2 * size + row)
    assert len(of_product) >= 2
    assert all(kernel.is_backward for kernel in of_product)
    # The gradient of the rows has a kernel of its own, as that of the weight is a sum over them.
    assert 4 * size < sum(kernel.bytes for kernel in of_product) < 6 * size


@pytest.mark.extended
def test_operations_take_fewer_launches_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/kernels.md says; on fewer rows, where sums of parameters weigh more."""
    path = tmp_path / "rows.csv"
    arguments = ["--frames", "1024", "--width", "512", "--output", str(path)]
    _imported("census.inductor")
    _imported("compiled_counts").main(arguments)
    assert capsys.readouterr().out.startswith("part\t")
    _check(path)


def test_rows_of_the_documentation_say_so() -> None:
    _check(ROWS)


def _check(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert found
    assert [row["by"] for row in found] == ["effasr_kernels", "torch.compile"] * (len(found) // 2)
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        assert (ours["part"], ours["channels"]) == (theirs["part"], theirs["channels"])
        for name in COUNTS:
            assert 0 < float(ours[name]) < float(theirs[name]), (ours["part"], name)
