"""`effasr_kernels._C`: not there unless asked for, and right where it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from effasr_kernels import BackendUnavailable, lattice

ROOT = Path(__file__).parents[2]
LIST = (
    "from distutils.core import run_setup; d = run_setup('setup.py', stop_after='init'); "
    "print([s for e in d.ext_modules or [] for s in e.sources])"
)


def _run(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EFFASR_BUILD")}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment |= {"PYTHONPATH": paths, "MAX_JOBS": "1"} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=290
    )


def test_setup_builds_nothing_unless_asked() -> None:
    plain = _run("-W", "ignore", "-c", "import setuptools; " + LIST)
    assert plain.stdout.split() == ["[]"], plain.stderr
    asked = _run("-W", "ignore", "-c", "import setuptools; " + LIST, EFFASR_BUILD_CPP="1")
    assert "csrc/bindings.cpp" in asked.stdout, asked.stderr
    assert ".cu'" not in asked.stdout


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_setup_says_what_the_extension_needs() -> None:
    done = _run("-W", "ignore", "setup.py", "--version", EFFASR_BUILD_CUDA="1")
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


def _build_and_check(folder: Path, switch: str, backend: str) -> None:
    # Without pyproject.toml any setuptools will do.
    shutil.copy(ROOT / "setup.py", folder)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    places = "--build-lib", "lib", "--build-temp", "temporary"
    build = _run("setup.py", "build_ext", *places, cwd=folder, **{switch: "1"})
    assert build.returncode == 0, build.stdout[-3000:] + build.stderr[-3000:]
    script = str(Path(__file__).with_name("check_extension.py"))
    done = _run("-P", script, str(folder / "lib"), backend)
    assert done.stdout.split("\n")[0] == "extension: right", done.stderr


@pytest.mark.slow
def test_the_build_for_a_cpu(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine to compile csrc/ with")
    _build_and_check(tmp_path, "EFFASR_BUILD_CPP", "cpu-extension")


@pytest.mark.gpu
def test_the_build_for_a_gpu(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        pytest.skip("no nvcc on this machine to compile csrc/ with")
    _build_and_check(tmp_path, "EFFASR_BUILD_CUDA", "cuda-extension")
