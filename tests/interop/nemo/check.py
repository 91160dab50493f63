"""Restores ``.nemo`` files in NeMo itself, and compares them with what `make.py` noted of a case.

Needs NeMo, as `make.py` does. After

    effasr import tests/interop/nemo/hybrid.nemo OUT; effasr export --format nemo OUT out.nemo

this says how far the file that effasr wrote is from the one that NeMo wrote:

    python tests/interop/nemo/check.py hybrid out.nemo
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from cases import CASES
from make import HERE, compute
from nemo.collections.asr.models import ASRModel  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Compare pairs of a case and a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("file")
    options = parser.parse_args()
    model = ASRModel.restore_from(options.file, map_location="cpu").eval()
    expected = dict(np.load(HERE / f"{options.case}.npz"))
    result = compute(model)
    assert result.keys() == expected.keys(), result.keys() ^ expected.keys()
    errors = {}
    for name, value in expected.items():
        if value.dtype.kind == "f":
            errors[name] = float(np.abs(result[name] - value).max())
        else:
            assert np.array_equal(result[name], value), name
    worst = max(errors, key=lambda name: errors[name])
    name = type(model).__name__
    sys.stdout.write(f"{options.case}: {name}, {worst} differs by {errors[worst]:.2g} at most\n")


if __name__ == "__main__":
    main()
