"""The sources of csrc/ compiled for this machine."""

import ctypes
from pathlib import Path

import pytest
import torch

from effasr_kernels.runtime.native import LIBRARY
from tests.csrc.native import Implementation

WAYS = {"one_thread": 1, "threads": 3}


@pytest.fixture(scope="session")
def library(cpp_extension: Path) -> ctypes.CDLL:
    """The kernels as setup.py builds them."""
    return ctypes.CDLL(str(cpp_extension / "effasr_kernels" / LIBRARY))


@pytest.fixture(params=WAYS)
def implementation(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Implementation:
    """The lattices on one thread and on several."""
    return Implementation(library, WAYS[request.param])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
