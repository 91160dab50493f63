"""Running `effasr/train.py` by path puts effasr/ first on sys.path: its modules must not shadow."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "effasr").iterdir() if path.name[0] not in "_.")


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_no_module_shadows_the_standard_library(module):
    assert module.stem not in sys.stdlib_module_names
