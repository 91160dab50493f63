from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import effasr_kernels
from effasr_kernels.runtime import native
from effasr_kernels.shared.cpu import decoder
from tests.support.tolerance import AWKWARD_LENGTHS

INSTRUCTIONS = {"base": 1, "avx2": 2, "avx512": 3}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [str(x.args[0]) for x in metafunc.definition.iter_markers("parametrize")]
    if "lengths" in metafunc.fixturenames and not any("lengths" in x for x in names):
        metafunc.parametrize("lengths", AWKWARD_LENGTHS.values(), ids=AWKWARD_LENGTHS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def look_for_the_library_again() -> None:
    native._load.cache_clear()
    native.unsupported_reason.cache_clear()


@pytest.fixture(scope="module")
def cpp_library(cpp_extension: Path) -> Iterator[None]:
    """The backend ``cpp`` runs a build of these sources."""
    effasr_kernels.__path__.append(str(cpp_extension / "effasr_kernels"))
    look_for_the_library_again()
    assert native.unsupported_reason() is None
    yield
    effasr_kernels.__path__.pop()
    look_for_the_library_again()


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, cpp_library: None) -> int:
    """Each set of instructions for which the kernels are compiled, if this machine has it."""
    number = INSTRUCTIONS[request.param]
    matrix = decoder.PanelMatrix.from_weight(torch.ones(1, 1), None)
    try:
        decoder.largest_logit(torch.ones(1, 1), matrix, instructions=number)
    except RuntimeError:
        pytest.skip(f"this machine has no {request.param}")
    return number


@pytest.fixture(params=[1, 3], ids=["one_thread", "threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)
