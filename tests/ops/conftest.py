import pytest
import torch

from effasr_kernels.testing.tolerance import AWKWARD_LENGTHS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [str(x.args[0]) for x in metafunc.definition.iter_markers("parametrize")]
    if "lengths" in metafunc.fixturenames and not any("lengths" in x for x in names):
        metafunc.parametrize("lengths", AWKWARD_LENGTHS.values(), ids=AWKWARD_LENGTHS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
