from collections.abc import Iterator

import pytest
import torch

from effasr_kernels.testing.conformance import CHECKS
from effasr_kernels.testing.tolerance import AWKWARD_LENGTHS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of the contract runs every check on every list of lengths."""
    if "check" in metafunc.fixturenames:
        metafunc.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    if "lengths" in metafunc.fixturenames:
        metafunc.parametrize("lengths", AWKWARD_LENGTHS.values(), ids=AWKWARD_LENGTHS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """On tensors as small as these, threads cost ten times what they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
