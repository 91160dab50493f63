"""The sources of csrc/ compiled for this machine."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.csrc.native import Implementation

CSRC = Path(__file__).parents[2] / "csrc"
WAYS = {"one_thread": 1, "threads": 3}


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
def library(compile_cpp: Callable[..., Path]) -> ctypes.CDLL:
    """The lattices, with the flags of setup.py."""
    sources = [str(path) for path in CSRC.glob("*_cpu.cpp")]
    return ctypes.CDLL(str(compile_cpp("cpu", "-O3", "-fno-trapping-math", *sources)))


@pytest.fixture(params=WAYS)
def implementation(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Implementation:
    """The lattices on one thread and on several."""
    return Implementation(library, WAYS[request.param])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
