"""Lists the packages that `effasr train` imports beyond torch, and those it is compared with."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """A distribution that a machine with torch, triton and transformers may lack.

    Attributes:
        name: Name on the package index.
        module: Name for importing it.
        purpose: ``train``: needed by `effasr train`; ``peer``: compared with.
    """

    name: str
    module: str
    purpose: str


WHEELS = (
    Wheel("lhotse", "lhotse", "train"),
    Wheel("cytoolz", "cytoolz", "train"),
    Wheel("toolz", "toolz", "train"),
    Wheel("intervaltree", "intervaltree", "train"),
    Wheel("sortedcontainers", "sortedcontainers", "train"),
    Wheel("audioread", "audioread", "train"),
    Wheel("tabulate", "tabulate", "train"),
    Wheel("click", "click", "train"),
    Wheel("urllib3", "urllib3", "train"),
    Wheel("soundfile", "soundfile", "train"),
    Wheel("cffi", "cffi", "train"),
    Wheel("pycparser", "pycparser", "train"),
    Wheel("soxr", "soxr", "train"),
    Wheel("sentencepiece", "sentencepiece", "train"),
    Wheel("jiwer", "jiwer", "train"),
    Wheel("rapidfuzz", "rapidfuzz", "train"),
    Wheel("nvtx", "nvtx", "train"),
    Wheel("rich", "rich", "train"),
    Wheel("transformers==5.23.0", "transformers", "peer"),
    Wheel("liger-kernel", "liger_kernel", "peer"),
    Wheel("cut-cross-entropy", "cut_cross_entropy", "peer"),
    Wheel("warprnnt-numba", "warprnnt_numba", "peer"),
    Wheel("numba", "numba", "peer"),
    Wheel("llvmlite", "llvmlite", "peer"),
    Wheel("torchaudio", "torchaudio", "peer"),
)
BARE = {
    *("torch", "triton", "numpy", "safetensors", "PyYAML", "packaging", "tqdm", "setuptools"),
    *("typing_extensions", "filelock", "sympy", "mpmath", "networkx", "Jinja2", "MarkupSafe"),
    *("fsspec", "effasr"),
}
"""Packages that torch brings, and a few others that are assumed to be installed."""


def missing(purpose: str) -> list[Wheel]:
    """Return the packages of a purpose that cannot be imported here."""
    return [
        wheel
        for wheel in WHEELS
        if wheel.purpose == purpose and importlib.util.find_spec(wheel.module) is None
    ]


def text() -> str:
    """Return the list as a requirements file, to be installed with ``--no-deps``."""
    lines = ["# For pip install --no-deps. What effasr train imports beyond torch and triton:"]
    lines += [wheel.name for wheel in WHEELS if wheel.purpose == "train"]
    lines.append("# Compared with; numba, llvmlite and torchaudio are not small:")
    lines += [wheel.name for wheel in WHEELS if wheel.purpose == "peer"]
    return "\n".join(lines) + "\n"
