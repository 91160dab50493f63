"""A real `effasr train` on a GPU: what no test of a part and no benchmark of a step runs.

    python profiling/train_on_gpu.py --output DIR [--minutes 8] [--corpus DIR] [--only STEP ...]
    python profiling/train_on_gpu.py --dry-run [--output DIR]
    python profiling/train_on_gpu.py --prepare-corpus DIR
    python profiling/train_on_gpu.py --list-wheels

Trains small models on a small corpus, by the command and in processes of their own, and checks what
comes of it:

STEPS
Each has a limit by the time that is left and a log in DIR/logs; its row in DIR/train_on_gpu.csv is
written when it ends, and what a run tells of its steps is kept in DIR/train_on_gpu. One that fails
stops none that does not need it; one for which there is no time is left out. Exit code 1: one
failed; 2: no GPU, and no dry run.

The corpus is speech that --prepare-corpus synthesised elsewhere (by default
profiling/real_run/speech, which git ignores), or else tones. A dry run does all of it on the CPU at
tiny size, by gloo in place of NCCL and without CUDA graphs: it shows that the commands work, and
measures nothing. --list-wheels names the packages that all this needs on a machine which has no
more than torch and triton.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench import processes
from real_run import wheels

ROOT = Path(__file__).parents[1]
PREPARED = ROOT / "profiling" / "real_run" / "speech"
TABLE = "train_on_gpu.csv"
COLUMNS = ("step", "status", "seconds", "details", "device", "torch", "triton", "git", "date")
_GENEROUS = 2.0
"""Factor of a step's minimal time, or of its share of the time, after which it is ended."""


def run(options: argparse.Namespace, output: Path, work: Path) -> int:
    """Run the steps; returns the exit code."""
    import torch
    from bench import rows
    from bench.provenance import provenance
    from real_run import settings, steps

    device = torch.device("cpu" if options.dry_run else "cuda")
    context = steps.Context(
        output=output,
        work=work,
        size=settings.DRY if options.dry_run else settings.GPU,
        dry=options.dry_run,
        prepared=None if options.dry_run and options.corpus is None else options.corpus or PREPARED,
        environment=_environment(dry=options.dry_run, work=work),
    )
    chosen = [step for step in steps.STEPS if step.name in _with_needs(options.only)]
    deadline = time.monotonic() + 60 * options.minutes
    least = [step.dry_s if options.dry_run else step.least_s for step in chosen]
    counts = dict.fromkeys(("ok", "left out", "failed"), 0)
    for number, step in enumerate(chosen):
        context.step = step.name
        left = deadline - time.monotonic()
        # Most steps leave some of what they may take, which is the others'.
        share = _GENEROUS * least[number] / sum(least[number:])
        context.limit_s = min(left, max(_GENEROUS * least[number], share * left))
        began = time.monotonic()
        try:
            if left < least[number]:
                raise steps.LeftOut(f"{max(0.0, left):.0f} s are left, and it needs more")
            status, details = "ok", step.do(context)
        except steps.LeftOut as reason:
            status, details = "left out", str(reason)
        except steps.Failed as reason:
            status, details = "failed", str(reason)
        except Exception as error:
            traceback.print_exc()
            status, details = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
        counts[status] += 1
        seconds = time.monotonic() - began
        row = {"step": step.name, "status": status, "seconds": round(seconds, 2)}
        row |= {"details": details, **provenance(device)}
        rows.append(output / TABLE, COLUMNS, row)
        sys.stdout.write(f"{step.name:16} {status:9} {seconds:6.1f} s  {details}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{', '.join(f'{n} {status}' for status, n in counts.items())}\n")
    return 1 if counts["failed"] else 0


_NEEDS = {
    "kill_and_resume": ("train",),
    "cuda_graph": ("quiet",),
    "nccl": ("quiet",),
    "fsdp2": ("quiet",),
    "compile": ("quiet",),
    "calibrated_run": ("calibrate",),
}
"""Required steps by step; without them it is left out."""


def _with_needs(only: Sequence[str] | None) -> set[str]:
    from real_run.steps import STEPS

    names = {step.name for step in STEPS}
    if only is None:
        return names
    return {"corpus", *only, *(need for name in only for need in _NEEDS.get(name, ()))}


def _environment(*, dry: bool, work: Path) -> dict[str, str]:
    """Return the environment of the commands: this checkout first, and own calibrations."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    ours = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "profiling")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*ours, variables.get("PYTHONPATH")]))
    variables["XDG_CACHE_HOME"] = str(work / "cache")
    if dry:
        variables |= {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    return variables


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("STEPS\n", _about()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny size")
    what.add_argument("--prepare-corpus", type=Path, metavar="DIR", nargs="?", const=PREPARED)
    what.add_argument("--list-wheels", action="store_true")
    parser.add_argument("--output", type=Path, help="of rows and logs; a dry run makes its own")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="that was prepared")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these, and what they need")
    return parser


def _about() -> str:
    return "".join(f"    {name:16} {text}\n" for name, text in ABOUT.items()) + "\n"


ABOUT = {
    "train": "the loop: pinned loader, asynchronous checkpoints, validation",
    "kill_and_resume": "SIGKILL in the middle; the end must be that of `train`, to the bit",
    "quiet": "without dropout: what the following ones are compared with",
    "cuda_graph": "training.cuda_graph=true",
    "nccl": "DistributedDataParallel over NCCL with one process",
    "fsdp2": "FSDP2 over NCCL with one process",
    "calibrate": "`effasr calibrate` for a memory that is given",
    "calibrated_run": "training at the budget that was found: peak against prediction",
    "compile": "training.compile=true",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a shell; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list_wheels:
        sys.stdout.write(wheels.text())
        return 0
    if options.only and (unknown := set(options.only) - set(ABOUT)):
        parser.error(f"--only must be of {', '.join(ABOUT)}, but has {', '.join(sorted(unknown))}")
    if options.minutes <= 0:
        parser.error(f"--minutes must be positive, but is {options.minutes:g}")
    if options.prepare_corpus is not None:
        from real_run.corpus import prepare

        try:
            made = prepare(options.prepare_corpus)
        except ValueError as error:
            sys.stderr.write(f"train_on_gpu: {error}\n")
            return 2
        size = sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
        sys.stdout.write(
            f"{made.folder}: {made.utterances} utterances, {made.seconds / 60:.1f} min, "
            f"{size / 1e6:.1f} MB\n"
        )
        return 0
    if options.output is None and not options.dry_run:
        parser.error("--output is needed")
    output = options.output or Path(tempfile.mkdtemp(prefix="train_on_gpu_dry_run_"))
    if absent := wheels.missing("train"):
        names = ", ".join(wheel.name for wheel in absent)
        sys.stderr.write(f"train_on_gpu: not installed: {names}; see --list-wheels\n")
        return 2
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            sys.stderr.write("train_on_gpu: there is no GPU: use --dry-run\n")
            return 2
    work = Path(tempfile.mkdtemp(prefix="train_on_gpu_"))
    try:
        with processes.sigterm_as_exit():
            return run(options, output.resolve(), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
