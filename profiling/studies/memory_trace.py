"""Memory over many training steps, each with other utterances: it must not grow.

    python profiling/studies/memory_trace.py [--model canary_180m_flash] [--steps 40]
        [--output ROWS.csv]

A row a step: what is allocated after it, and the peak since the beginning. Every step has the
static shape, so the peak after step 5 is to be that after the last; exit code 1 where it is not. On
a CPU, which keeps no account, both are the resident memory of the process, and nothing is judged.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows
from bench.provenance import provenance
from bench.training.corpus import batches_of
from bench.training.systems import Effasr
from bench_training import Setup, add_options

SETTLED = 5
"""Steps after which nothing may be allocated that was not before."""
COLUMNS = (
    *("model", "precision", "frame_budget", "step", "audio_s", "allocated_bytes", "peak_bytes"),
    *("reserved_bytes", "device", "torch", "triton", "git", "date"),
)


def memory(device: torch.device) -> dict[str, int | str]:
    """Return bytes that are allocated, were at most, and are held for later."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
        }
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    allocated = pages * resource.getpagesize()
    return {
        "allocated_bytes": allocated,
        # The kernel brings its peak up to date only now and then.
        "peak_bytes": max(allocated, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "reserved_bytes": "",
    }


def growth(peaks: Sequence[int]) -> int:
    """Return bytes by which the peak after the last step exceeds that after step `SETTLED`.

    Raises:
        ValueError: There are not more steps than that.
    """
    if len(peaks) <= SETTLED:
        raise ValueError(
            f"`--steps` must be more than {SETTLED}, after which memory is to be constant, but is "
            f"{len(peaks)}."
        )
    return peaks[-1] - peaks[SETTLED - 1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and write a row a step; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--steps", type=int, default=40 if torch.cuda.is_available() else 8)
    parser.add_argument("--output", type=Path, help="CSV to append to")
    options = parser.parse_args(arguments)
    try:
        growth([0] * options.steps)
    except ValueError as error:
        sys.stderr.write(f"memory_trace: {error}\n")
        return 2
    setup = Setup.of(options)
    device = setup.device
    fields: dict[str, Any] = {
        "model": setup.config.name,
        "precision": setup.config.training.precision,
        "frame_budget": setup.shape.frame_budget,
    } | provenance(device)
    trainer = Effasr(setup.config, setup.copy(), device)
    peaks: list[int] = []
    for step, batch in enumerate(
        batches_of("packed_static", setup.workload, setup.shape, options.steps), start=1
    ):
        trainer.step(step, batch)
        found = memory(device)
        peaks.append(int(found["peak_bytes"]))
        if options.output is not None:
            one = fields | found | {"step": step, "audio_s": round(batch.audio_seconds, 2)}
            rows.append(options.output, COLUMNS, one)
    grown = growth(peaks)
    sys.stdout.write(
        f"peak after step {SETTLED}: {peaks[SETTLED - 1] / 1e9:.4f} GB, after step "
        f"{options.steps}: {peaks[-1] / 1e9:.4f} GB\n"
    )
    if device.type == "cuda" and grown:
        sys.stderr.write(f"memory_trace: the peak grew by {grown} bytes after step {SETTLED}.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
