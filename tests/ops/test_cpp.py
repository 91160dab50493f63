"""The backend ``cpp``: what is said where it is not built, and the checks of a build."""

import os
from pathlib import Path

import pytest
import torch

import effasr_kernels
from effasr_kernels import BackendUnavailable, PackedLayout, attention, ctc_loss
from effasr_kernels.ctc_loss._cpp import _Losses
from effasr_kernels.runtime import native
from effasr_kernels.runtime.native import refusal
from effasr_kernels.shared.lattice_losses import groups
from tests.csrc.build import run


def test_where_it_is_not_built_the_reference_serves_and_says_how_to_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the reason that the installation left."""
    (tmp_path / native.FAILURE).write_text("no 'c++' here\n")
    monkeypatch.setattr(effasr_kernels, "__path__", [str(tmp_path)])
    caches = native._load, native.unsupported_reason
    for cache in caches:
        cache.cache_clear()
    layout = PackedLayout.from_lengths([2])
    x, weight, y = torch.randn(2, 3), torch.randn(4, 3), torch.tensor([1, 2])
    given = x, weight, y, layout, layout
    q = torch.randn(2, 1, 8)
    try:
        assert ctc_loss(*given, blank_id=0).shape == (1,)
        assert attention(q, q, q, layout).shape == q.shape
        how = r"cpp: .*_cpu\.so could not be built: no 'c\+\+' here \(with a C\+\+ compiler, pip"
        with pytest.raises(BackendUnavailable, match=how):
            ctc_loss(*given, blank_id=0, backend="cpp")
        with pytest.raises(BackendUnavailable, match=how):
            attention(q, q, q, layout, backend="cpp")
    finally:
        for cache in caches:
            cache.cache_clear()


def test_other_devices_and_float64_are_refused() -> None:
    assert refusal(None, torch.zeros(1, device="meta")) == "supports only CPUs"
    assert refusal(torch.zeros(1, dtype=torch.float64)) == "float64 is for the reference"


def test_groups_are_as_long_as_they_may_be() -> None:
    divide = lambda sizes, most: list(groups(sizes, most))
    assert divide([], 5) == []
    assert divide([2, 3, 1, 5, 9, 0, 1], 5) == [(0, 2), (2, 3), (3, 4), (4, 5), (5, 7)]
    assert divide([0, 0], 0) == [(0, 2)]
    assert divide([4, 4], 0) == [(0, 1), (1, 2)]


def test_a_long_transcript_makes_groups_of_ctc_smaller() -> None:
    """The others of its group are padded to it, so that it counts for every frame."""

    def most_cells(labels: list[int]) -> tuple[int, int]:
        """Return the groups, and the most padded labels of one."""
        frames = PackedLayout.from_lengths([400] * len(labels))
        losses = _Losses(frames, PackedLayout.from_lengths(labels), torch.zeros(0), 0)
        found = list(losses.groups(32))
        assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
        assert found[-1][1] == len(labels)
        return len(found), max((e - b) * 400 * (max(labels[b:e]) + 1) for b, e in found)

    even, uneven = most_cells([60] * 250), most_cells([380] + [60] * 249)
    assert even[0] <= uneven[0]
    assert uneven[1] <= 64 * 2**20 / (4 * 8)
    assert most_cells([0]) == (1, 400)


@pytest.mark.slow
def test_a_build(cpp_extension: Path, tmp_path: Path) -> None:
    checks = str(Path(__file__).with_name("cpp_checks.py"))
    options = "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'checks'}"
    given = {"EFFASR_EXTENSION": str(cpp_extension), "OMP_NUM_THREADS": "1"}
    done = run("-m", "pytest", checks, *options, **given)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert os.linesep not in done.stdout.strip().split("passed")[-1]
