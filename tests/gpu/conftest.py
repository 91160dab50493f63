"""Kernels against the references: on a GPU, or as a CPU can run them.

One suite, three places. Under ``TRITON_INTERPRET=1`` tests run in Triton's interpreter, in float32.
With ``EFFASR_EMULATE=90`` (or 80) what Triton compiles for sm_90 runs instruction by instruction
(`profiling/emulator`), in every dtype. Else they need a GPU.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from effasr_kernels.shared import projection
from effasr_kernels.transducer_loss import set_workspace
from tests.support.tolerance import AWKWARD_LENGTHS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = int(os.environ.get("EFFASR_EMULATE", "0"))
"""Of which architecture instructions are emulated; 0 for none."""


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
        if EMULATED:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))
            continue
        if not INTERPRETED:
            item.add_marker(pytest.mark.gpu)
            continue
        for expected in _EXPECTED:
            item.add_marker(pytest.mark.filterwarnings(expected))


_TILES = {"BLOCK_R": 16, "BLOCK_V": 16, "BLOCK_C": 16, "num_warps": 4, "num_stages": 2}
# Many tiles in a small matrix, and up to six programs that share a row.
SMALL_TILES = {"product_tiles": lambda *_: _TILES, "_PROGRAMS": 6}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL_TILES.items():
        monkeypatch.setattr(projection, name, value)


# The interpreter computes bfloat16 wrongly; the emulator is the place for narrow numbers.
DTYPES = [torch.float32, *([] if INTERPRETED else [torch.float16, torch.bfloat16])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``dtype``: those that the place can compute in; ``lengths``: those that kernels fail on."""
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=[str(d).removeprefix("torch.") for d in DTYPES])
    names = [str(x.args[0]) for x in metafunc.definition.iter_markers("parametrize")]
    if "lengths" in metafunc.fixturenames and not any("lengths" in x for x in names):
        metafunc.parametrize("lengths", AWKWARD_LENGTHS.values(), ids=AWKWARD_LENGTHS)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED or EMULATED else "cuda")


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    if not EMULATED:
        yield
        return
    from emulator.emulate import emulated

    # What nobody has written is NaN, as it may be on a GPU; new memory of a CPU is mostly zero.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with emulated(EMULATED):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _workspace() -> Iterator[None]:
    """Of the lattices of transducers: room for all that tests make."""
    before = set_workspace(2**29)
    yield
    set_workspace(before)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    # The references' own products are the baseline: rounded to TF32 they would hide errors.
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
