"""Our kernels outside of any measurement: compiled ahead on all cores, or run once for a profiler.

    python profiling/kernels/launch_kernels.py --compile [--op NAME ...] [--model NAME ...] [...]
    python profiling/kernels/launch_kernels.py --once --op NAME [--kind KIND] [--head-width D]

The first makes the launches that benchmarks of these operations, and training steps of these models
at this frame budget, will make, and compiles their kernels without running them: each process a
share, on as many as there are cores. Triton keeps what is compiled on the disk, where benchmarks
find it. Models have one layer of each kind: others have the same kernels. The second computes each
case forward and backward, twice: the second time nothing is compiled. On a CPU the first only
counts what would be compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import bench_ops
import torch
from bench.training.corpus import batches_of
from bench.training.cpu_models import CPU_MODELS
from bench.training.systems import Effasr
from bench_training import Setup

from effasr.model.presets import PRESETS
from effasr_kernels import OPERATIONS
from effasr_kernels.runtime.launch import Launch, capability, diverted
from effasr_kernels.testing import aot


class Compiler:
    """Compiles its share of the kernels that are launched, each once.

    Args:
        share: Number of this share and number of shares.
        compile_one: Called with each launch of this share.

    Attributes:
        seen: Digests of all kernels that were launched.
        compiled: Number of compiled kernels of this share.
        failed: Kernels that could not be compiled, and the reasons.
    """

    def __init__(self, share: tuple[int, int], compile_one: Callable[[Launch], object]) -> None:
        self.seen: set[str] = set()
        self.compiled: set[str] = set()
        self.failed: list[str] = []
        self._share, self._compile = share, compile_one

    def __call__(self, launch: Launch) -> None:
        """Take a launch in the place of running it."""
        digest = hashlib.sha256(repr(aot.key(launch)).encode()).hexdigest()
        if 0 in launch.grid or digest in self.seen:
            return
        self.seen.add(digest)
        number, count = self._share
        if int(digest[:8], 16) % count != number:
            return
        self.compiled.add(digest)
        try:
            self._compile(launch)
        except Exception as error:
            self.failed.append(f"{launch.kernel.fn.__name__}: {type(error).__name__}: {error}")


def warm_up(launch: Launch) -> None:
    """Compile as a launch would, with the same key in Triton's cache, and run nothing."""
    arguments = launch.args.values()
    launch.kernel.warmup(*arguments, grid=launch.grid, **launch.constants, **launch.options)


def _calls(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the callers of the kernels: cases of operations, and steps of training."""
    for _, case in bench_ops.cases(_of_ops(options)) if options.op else ():
        yield f"{case.name}, {case.shape}", lambda case=case: case.ours("triton").outcome()
    for name in options.model:
        yield f"training of {name}", lambda name=name: _train(options, name)


def _of_ops(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options of `bench_ops` for the same cases."""
    given = ["--op", *options.op]
    for name in ("kind", "frames", "head_width"):
        if found := getattr(options, name):
            given += [f"--{name.replace('_', '-')}", *map(str, found)]
    return bench_ops.parse(given)


def _train(options: argparse.Namespace, name: str) -> None:
    setup = Setup.of(options, name)
    model = setup.config.model
    assert model.decoder is not None
    shallow = replace(
        model, encoder=replace(model.encoder, layers=1), decoder=replace(model.decoder, layers=1)
    )
    setup = replace(setup, config=replace(setup.config, model=shallow))
    trainer = Effasr(setup.config, setup.copy(), setup.device)
    for number, batch in enumerate(batches_of("packed_static", setup.workload, setup.shape, 1)):
        trainer.step(number, batch)


def compile_share(options: argparse.Namespace) -> int:
    """Compile what falls to one process; returns the exit code."""
    number, count = map(int, options.share.split("/"))
    gpu = torch.cuda.is_available()
    compiler = Compiler((number, count), warm_up if gpu else lambda launch: None)
    where = capability(torch.device("cuda")) if gpu else (9, 0)
    failures: list[str] = []
    for name, call in _calls(options):
        # What kernels would have written is undefined, and nothing is done with it.
        try:
            with diverted(compiler, where):
                call()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    if not compiler.seen:
        failures.append("no kernel was launched: give --op or --model, and a --kind that --op has")
    failures += compiler.failed
    for line in failures:
        sys.stderr.write(f"launch_kernels: {line}\n")
    done = "compiled" if gpu else "counted, and none compiled: no GPU"
    mine, all_of_them = len(compiler.compiled), len(compiler.seen)
    sys.stdout.write(f"share {number} of {count}: {mine} of {all_of_them} kernels {done}\n")
    return 1 if failures else 0


def compile_all(options: argparse.Namespace, arguments: list[str]) -> int:
    """Start a process for each core, and wait for all; returns the exit code."""
    count = options.processes or len(os.sched_getaffinity(0))
    command = [sys.executable, __file__, *arguments, "--share"]
    running = [subprocess.Popen([*command, f"{number}/{count}"]) for number in range(count)]
    return max([process.wait() for process in running], key=abs)


def run_once(options: argparse.Namespace) -> int:
    """Compute each case twice; returns the exit code."""
    found = 0
    for _, case in bench_ops.cases(_of_ops(options)):
        contender = case.ours(options.backend)
        for _ in range(2):
            contender.outcome()
        found += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    sys.stdout.write(f"{found} cases computed twice\n")
    return 0 if found else 1


def main(arguments: list[str] | None = None) -> int:
    """Compile ahead, or run once; returns the exit code."""
    given: Any = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--compile", action="store_true")
    what.add_argument("--once", action="store_true")
    parser.add_argument("--op", nargs="+", choices=list(OPERATIONS), metavar="NAME", default=[])
    parser.add_argument("--kind", nargs="+", default=[])
    parser.add_argument("--frames", nargs="+", type=int, default=[])
    parser.add_argument("--head-width", nargs="+", type=int, default=[])
    parser.add_argument("--backend", default="triton")
    models = [*CPU_MODELS, *PRESETS]
    parser.add_argument(
        "--model", nargs="+", choices=models, metavar="NAME", default=[], help="to train"
    )
    parser.add_argument("--frame-budget", type=int)
    parser.add_argument("--utterances", type=int, default=400)
    parser.add_argument("--longest", type=float, default=30.0)
    parser.add_argument("--processes", type=int, help="one for each core, by default")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.set_defaults(precision=None)
    options = parser.parse_args(given)
    if options.once:
        return run_once(options)
    return compile_share(options) if options.share else compile_all(options, given)


if __name__ == "__main__":
    sys.exit(main())
