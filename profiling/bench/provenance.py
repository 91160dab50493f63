"""Describes the machine and the source versions of a measured row."""

from __future__ import annotations

import datetime
import hashlib
import platform
import subprocess
from pathlib import Path

import torch

import effasr_kernels

SOURCES = Path(effasr_kernels.__file__).parents[2]
"""The checkout that the kernels are of; under ``--base`` another than that of the script."""
_CODE = {".py", ".cpp", ".h"}


def provenance(device: torch.device) -> dict[str, object]:
    """Device, versions, sources and date, for a row."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton_version,
        "git": revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def revision(root: Path = SOURCES) -> str:
    """Return the commit, with ``-dirty`` if files differ; without a repository, a fingerprint."""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--match=none"]
    try:
        head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        head = ""
    return head or f"sources-{fingerprint(root)}"


def fingerprint(root: Path = SOURCES) -> str:
    """12 digits that change with any line of the trainer, the kernels and their tests."""
    digest = hashlib.sha256()
    for folder in ("csrc", "effasr", "kernels", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _CODE and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
