"""Kernels against the references: in Triton's interpreter on a CPU, or on a GPU.

One suite, two places. Under ``TRITON_INTERPRET=1`` tests run on the CPU, in float32 and float16;
else they need a GPU, and add bfloat16.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from effasr_kernels.testing import AWKWARD_LENGTHS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# What NumPy says of the interpreter: that of 3.6 converts arrays to numbers as NumPy 1 did, and the
# maximum of a row of NaN is NaN, as on a GPU.
_EXPECTED = (
    "ignore:Conversion of an array with ndim:DeprecationWarning",
    "ignore:All-NaN slice encountered:RuntimeWarning",
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Outside the interpreter all of these need a GPU; in it, NumPy computes."""
    here = os.path.dirname(__file__)
    for item in items:
        if not str(item.path).startswith(here):
            continue
        if not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
            continue
        for expected in _EXPECTED:
            item.add_marker(pytest.mark.filterwarnings(expected))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``dtype``: those that the place can compute in; ``lengths``: those that kernels fail on."""
    if "dtype" in metafunc.fixturenames:
        dtypes = [torch.float32, torch.float16]
        if not INTERPRETED:
            dtypes.append(torch.bfloat16)
        metafunc.parametrize("dtype", dtypes, ids=[str(d).removeprefix("torch.") for d in dtypes])
    if "lengths" in metafunc.fixturenames:
        metafunc.parametrize("lengths", AWKWARD_LENGTHS.values(), ids=AWKWARD_LENGTHS)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    # The references' own products are the baseline: rounded to TF32 they would hide errors.
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
