"""The sources of csrc/ compiled for this machine: for its CPU, and as emulated CUDA threads."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.csrc.native import Implementation

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
EMULATED = [
    *("-x", "c++", "-include", "cuda_runtime.h"),
    *("-I", str(HERE / "emulator"), "-I", str(CSRC), "-Wno-unknown-pragmas"),
]
WAYS = {
    "cpu": {"kind": "cpu"},
    "cpu_threads": {"kind": "cpu", "threads": 3},
    "cuda": {"kind": "cuda"},
    "cuda_strips": {"kind": "cuda", "most_threads": 32},
}


@pytest.fixture(scope="session")
def compile_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Called as ``compile_cpp(name, *options)``: a shared library, without warnings."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine to compile csrc/ with")

    def run(name: str, *options: str) -> Path:
        path = tmp_path_factory.mktemp("csrc") / f"{name}.so"
        flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
        subprocess.run([compiler, *flags, *options, "-o", str(path)], check=True, timeout=120)
        return path

    return run


@pytest.fixture(scope="session")
def libraries(compile_cpp: Callable[..., Path]) -> dict[str, ctypes.CDLL]:
    """The CPU's build, with the flags of setup.py, and the emulated one, by kind."""
    cpu = [str(path) for path in CSRC.glob("*_cpu.cpp")]
    cuda = [str(path) for path in CSRC.glob("*.cu")]
    return {
        "cpu": ctypes.CDLL(str(compile_cpp("cpu", "-O3", "-fno-trapping-math", *cpu))),
        "cuda": ctypes.CDLL(str(compile_cpp("cuda", "-O2", *EMULATED, *cuda))),
    }


@pytest.fixture(params=WAYS)
def implementation(
    request: pytest.FixtureRequest, libraries: dict[str, ctypes.CDLL]
) -> Implementation:
    """Every way to run the lattices that needs no GPU."""
    way = WAYS[request.param]
    return Implementation(libraries[way["kind"]], **way)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
