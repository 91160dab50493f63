"""`effasr_kernels._C`: not there unless asked for, and right where it is."""

import sys
from pathlib import Path

import pytest
import torch

from effasr_kernels import BackendUnavailable
from effasr_kernels.shared import lattice
from tests.csrc.build import run

LIST = (
    "from distutils.core import run_setup; d = run_setup('setup.py', stop_after='init'); "
    "print([s for e in d.ext_modules or [] for s in e.sources])"
)


def test_setup_builds_nothing_unless_asked() -> None:
    plain = run("-W", "ignore", "-c", "import setuptools; " + LIST)
    assert plain.stdout.split() == ["[]"], plain.stderr
    asked = run("-W", "ignore", "-c", "import setuptools; " + LIST, EFFASR_BUILD_CPP="1")
    assert "csrc/bindings.cpp" in asked.stdout, asked.stderr


def test_setup_names_what_replaces_the_removed_switch() -> None:
    done = run("-W", "ignore", "setup.py", "--version", EFFASR_BUILD_CUDA="1")
    assert done.returncode == 1
    assert "set EFFASR_BUILD_CPP=1" in done.stderr


def test_a_backend_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "effasr_kernels._C", None)
    lattice.unsupported_reason.cache_clear()
    x, lengths = torch.zeros(1), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(BackendUnavailable, match=r"extension cannot run .*_C cannot be impor"):
        lattice.ctc_occupancies(x[None], None, x, lengths, lengths)
    lattice.unsupported_reason.cache_clear()


@pytest.mark.slow
def test_the_build_for_a_cpu(cpp_extension: Path) -> None:
    script = str(Path(__file__).with_name("check_extension.py"))
    done = run("-P", script, str(cpp_extension))
    assert done.stdout.split("\n")[0] == "extension: right", done.stderr
