"""Time the backward of attention for several sizes of its tiles, by which it is then cut.

python profiling/kernels/attention_tiles.py [--head-width 64 128] [--frames N] [--output ROWS.csv]

For relative and plain positions, with the choice of ``attention/triton/config.py`` first. Each must
give the gradients of that choice, or has no row; what does not compile is said. Kernels of a GPU
alone depend on tiles: on a CPU nothing is measured but the reference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
import bench_ops
import torch
from bench import rows
from bench.contender import Case, Gold, error, judge
from bench.operations import attention, relative
from bench.provenance import provenance
from bench.timing import measure
from bench.workload import Workload

from effasr_kernels.attention.triton.config import Config, Configs

COLUMNS = (
    *("kernel", "kind", "head_width", "block_m", "block_n", "warps", "stages", "chosen", "shape"),
    *("dtype", "p20_ms", "p50_ms", "p80_ms", "error", "device", "torch", "triton", "git", "date"),
)
# Queries, keys, warps and stages. Where warps along the queries of a tile have more rows than it,
# some compute the same product: 8 of them are for tiles of 128.
CANDIDATES = {
    "backward_kv": {
        64: [(64, 64, 4, 2), (32, 64, 4, 2), (32, 128, 8, 2), (64, 128, 8, 2)],
        128: [(32, 64, 8, 2), (32, 128, 8, 2), (32, 64, 4, 2), (64, 128, 8, 2)],
    },
    "backward_q": {
        64: [(64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2)],
        128: [(64, 32, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2), (128, 64, 8, 2)],
    },
}
_TOLERANCE = 2e-2


@contextmanager
def cut(kernel: str, config: Config | None) -> Iterator[None]:
    """Use ``config`` for one attention kernel inside the context; None for its usual tiles."""
    from effasr_kernels.attention.triton import backend

    usual = backend.configs

    def chosen(*arguments: Any, **options: Any) -> Configs:
        found = usual(*arguments, **options)
        return found if config is None else replace(found, **{kernel: config})

    with patch.object(backend, "configs", chosen):
        yield


def usual_config(kernel: str, workload: Workload, *, plain: bool) -> Config:
    """Return the choice of ``attention/triton/config.py`` on this device."""
    from effasr_kernels.attention.triton.config import configs
    from effasr_kernels.runtime.launch import capability

    where = capability(workload.device)
    return getattr(configs(workload.dtype, workload.head_width, where, plain=plain), kernel)


def cases(workload: Workload) -> list[Case]:
    """Attention of a Conformer, and plain attention of the same rows."""
    return [*relative.cases(workload), attention.cases(workload)[0]]


def measured(case: Case, workload: Workload, gold: Gold, end: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each candidate of each kernel."""
    gpu = workload.device.type == "cuda"
    for kernel, by_width in CANDIDATES.items():
        usual = usual_config(kernel, workload, plain=not case.kind)
        others = [Config(*sizes) for sizes in by_width.get(workload.head_width, [])]
        for config in [usual, *(x for x in others if x != usual)]:
            if time.monotonic() > end:
                sys.stderr.write(f"attention_tiles: {case.name}: {kernel}: no time left\n")
                return
            try:
                with cut(kernel, config):
                    contender = case.ours("triton" if gpu else "reference")
                    distance = error(contender.outcome(), gold)
                    if not distance <= _TOLERANCE:
                        raise ValueError(f"differs from the reference by {distance:.2g}")
                    repeats = 50 if gpu else 2
                    timing = measure(
                        contender.gradients, workload.device, repeats=repeats, seconds=0.5
                    )
            except Exception as reason:
                said = " ".join(str(reason).split())[:200]
                sys.stderr.write(f"attention_tiles: {case.name}: {kernel} {config}: {said}\n")
                if "CUDA error" in said:
                    raise
                continue
            yield {
                **{"kernel": kernel, "kind": case.kind, "head_width": workload.head_width},
                **{name: getattr(config, name) for name in ("block_m", "block_n")},
                **{"warps": config.warps, "stages": config.stages, "chosen": config == usual},
                **{"shape": case.shape, "dtype": str(workload.dtype).removeprefix("torch.")},
                **{f"{x}_ms": round(getattr(timing, x), 4) for x in ("p20", "p50", "p80")},
                "error": f"{distance:.2e}",
            }


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write the rows as they come; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--head-width", nargs="+", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--output", type=Path, help="CSV to append to")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.budget_s
    gpu = torch.cuda.is_available()
    widths = options.head_width or ([128, 64] if gpu else [8])
    given = ["--frames", str(options.frames or (8448 if gpu else 40))]
    loads = bench_ops.workloads(bench_ops.parse([*given, "--head-width", *map(str, widths)]))
    torch.backends.cuda.matmul.allow_tf32 = False
    where, found = provenance(loads[0].device), 0
    for workload in loads:
        for case in cases(workload):
            for row in measured(case, workload, judge(case), end):
                found += 1
                mark = "*" if row["chosen"] else " "
                sizes = "x".join(str(row[x]) for x in ("block_m", "block_n", "warps", "stages"))
                sys.stdout.write(
                    f"{case.name:20} D={workload.head_width:<4} {row['kernel']:12} {sizes:12}{mark}"
                    f" {row['p50_ms']:9.4f} ms\n"
                )
                sys.stdout.flush()
                if options.output is not None:
                    rows.append(options.output, COLUMNS, row | where)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
