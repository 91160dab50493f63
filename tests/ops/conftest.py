import pytest
import torch

from effasr_kernels.testing.tolerance import AWKWARD_LENGTHS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    markers = metafunc.definition.iter_markers("parametrize")
    if "lengths" in metafunc.fixturenames and not any(x.args[0] == "lengths" for x in markers):
        metafunc.parametrize("lengths", AWKWARD_LENGTHS.values(), ids=AWKWARD_LENGTHS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
