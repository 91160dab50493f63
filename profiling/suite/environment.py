"""Environment of the suite as JSON; exit code 2 where a GPU is wanted and torch sees none.

python profiling/suite/environment.py --output FILE [--cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.provenance import SOURCES, fingerprint, provenance

PACKAGES = ("numpy", "transformers", "lhotse", "flash-attn", "liger-kernel", "torchaudio", "k2")


def describe(device: torch.device) -> dict[str, object]:
    """Device, versions, sources."""
    found: dict[str, object] = provenance(device) | {
        "fingerprint": fingerprint(),
        "sources": str(SOURCES),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_bytes"] = properties.total_memory
        found["multiprocessors"] = properties.multi_processor_count
        found["smi"] = smi()
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def smi() -> str:
    """Driver, clocks and power limit, if nvidia-smi is there; they are read, and never set."""
    asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip()


def main(arguments: list[str] | None = None) -> int:
    """Write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="of the CPU, though there be a GPU")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        sys.stderr.write("environment: needs an NVIDIA GPU, and torch sees none.\n")
        return 2
    found = describe(torch.device("cpu" if options.cpu else "cuda"))
    partial = options.output.with_name(f".{options.output.name}.partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    partial.replace(options.output)
    sys.stdout.write(f"{found['device']}, torch {found['torch']}, {found['git']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
