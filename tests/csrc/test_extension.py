"""`effasr_kernels._C`: not there unless asked for, and right where it is."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from effasr_kernels import BackendUnavailable
from effasr_kernels.shared import lattice
from tests.csrc.build import build, run

LIST = (
    "from distutils.core import run_setup; d = run_setup('setup.py', stop_after='init'); "
    "print([s for e in d.ext_modules or [] for s in e.sources])"
)


def test_setup_builds_nothing_unless_asked() -> None:
    plain = run("-W", "ignore", "-c", "import setuptools; " + LIST)
    assert plain.stdout.split() == ["[]"], plain.stderr
    asked = run("-W", "ignore", "-c", "import setuptools; " + LIST, EFFASR_BUILD_CPP="1")
    assert "csrc/bindings.cpp" in asked.stdout, asked.stderr
    assert ".cu'" not in asked.stdout


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_setup_says_what_the_extension_needs() -> None:
    done = run("-W", "ignore", "setup.py", "--version", EFFASR_BUILD_CUDA="1")
    assert done.returncode == 1
    assert "needs a torch with CUDA" in done.stderr


def test_a_backend_that_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "effasr_kernels._C", None)
    lattice.why_not.cache_clear()
    x, lengths = torch.zeros(1), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(BackendUnavailable, match=r"cpu-extension cannot run .*_C cannot be impor"):
        lattice.ctc_occupancies(
            x[None], None, x, lengths, lengths, max_frames=1, backend="cpu-extension"
        )
    assert "only cuda-extension, cpu-extension" in str(lattice.why_not("cpu"))  # type: ignore[arg-type]
    lattice.why_not.cache_clear()


def _check(packages: Path, backend: str) -> None:
    script = str(Path(__file__).with_name("check_extension.py"))
    done = run("-P", script, str(packages), backend)
    assert done.stdout.split("\n")[0] == "extension: right", done.stderr


@pytest.mark.slow
def test_the_build_for_a_cpu(cpp_extension: Path) -> None:
    _check(cpp_extension, "cpu-extension")


@pytest.mark.gpu
def test_the_build_for_a_gpu(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        pytest.skip("no nvcc on this machine to compile csrc/ with")
    _check(build(tmp_path, "EFFASR_BUILD_CUDA"), "cuda-extension")
