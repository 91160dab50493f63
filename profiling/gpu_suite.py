"""Everything that needs a GPU, in one command: tests, benchmarks, and how far the targets are met.

    python profiling/gpu_suite.py [--minutes 9] [--only PART ...] [--skip PART ...] [--output DIR]
    python profiling/gpu_suite.py --dry-run

Needs torch, triton and this repository; what needs more, and is not installed, is left out and
said. The parts, each a process of its own with a part of the time that is left:

PARTS
No speed is measured of an operation whose tests are not green: they run first, or have run before
on the same sources, device and versions (DIR/tests.json). With --unproven it is measured all the
same, in DIR/unproven. A part that fails does not stop the others. Rows are appended to DIR/*.csv as
they come; logs are in DIR/logs, the tables at the end also in DIR/summary.md. Exit code 0: all went
well; 1: a part failed or took too long; 2: no GPU.

A dry run does all of it on the CPU at tiny size, in a temporary folder: it shows that the commands
work, and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from suite import summary
from suite.gate import Gate
from suite.parts import PARTS, ROOT, Part, Setting
from suite.steps import LeftOut, Result, Step, run

RESULTS = ROOT / "profiling" / "results"
_NAMES = [part.name for part in PARTS]
_KEY = ("fingerprint", "device", "torch", "triton")
"""What tests that have run before must have in common with this run."""


def base_environment(*, dry: bool = False) -> dict[str, str]:
    """That of the commands: this checkout first, and kernels on the GPU, or none of them."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    ours = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "profiling")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*ours, variables.get("PYTHONPATH")]))
    if dry:
        variables |= {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    return variables


def missing(needs: Sequence[str]) -> str:
    """What of this is not installed, or too old; empty where nothing is."""
    lacking = []
    for need in needs:
        name, _, least = need.partition(">=")
        try:
            found = version(name)
        except PackageNotFoundError:
            lacking.append(f"needs {need}, which is not installed")
            continue
        if _numbers(found) < _numbers(least):
            lacking.append(f"needs {need}, but {found} is installed")
    return "; ".join(lacking)


def _numbers(found: str) -> list[int]:
    return [int(x) for x in found.split("+")[0].split(".") if x.isdigit()]


def _installed(step: Step | LeftOut) -> Step | LeftOut:
    """The step, if what it needs is installed; what is left out has no share of the time."""
    reason = missing(step.needs) if isinstance(step, Step) else ""
    return LeftOut(step.name, reason) if reason else step


class Suite:
    """A run of some parts.

    Args:
        setting: How.
        parts: Which.
        minutes: For all of them.
    """

    def __init__(self, setting: Setting, parts: Sequence[Part], minutes: float) -> None:
        self.setting = setting
        self.results: list[Result] = []
        self.where: dict[str, str] = {}
        self._parts = parts
        self._deadline = time.monotonic() + 60 * minutes
        self._base = base_environment(dry=setting.dry)
        self._gate = Gate()
        self._began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def run(self) -> int:
        """Run the parts; returns the exit code."""
        try:
            for number, part in enumerate(self._parts):
                share = part.weight / sum(other.weight for other in self._parts[number:])
                self._run(part, share * (self._deadline - time.monotonic()))
                if part.name == "environment" and not self.where:
                    return 2
        except KeyboardInterrupt:
            self._note(Result("interrupted", "failed", well=False))
        text = summary.markdown(self.results, self.rows(), self.where, dry=self.setting.dry)
        partial = self.setting.output / ".summary.md.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.setting.output / "summary.md")
        sys.stdout.write(f"\n{text}\n{self.setting.output / 'summary.md'}\n")
        return 0 if all(result.well for result in self.results) else 1

    def rows(self) -> dict[str, list[summary.Row]]:
        """What this run has measured."""
        return summary.recent(self.setting.output, self._began)

    def _run(self, part: Part, seconds: float) -> None:
        end = time.monotonic() + seconds
        steps = [_installed(step) for step in part.steps(self.setting, self._gate)]
        for number, step in enumerate(steps):
            left = sum(other.weight for other in steps[number:] if isinstance(other, Step))
            if isinstance(step, LeftOut):
                self._note(Result(step.name, "left out", details=step.reason, well=step.well))
            else:
                limit = step.weight / left * (end - time.monotonic())
                logs = self.setting.output / "logs"
                self._note(run(step, limit, logs, ROOT, self._base))
        if part.name == "environment":
            self._see_where()
        elif part.name == "tests":
            self._gate = Gate.read(self.setting.outcomes)
            self._gate.save(self.setting.output / "tests.json", self._key())

    def _see_where(self) -> None:
        """Read what the first part wrote, and what tests have shown on the same before."""
        if not self.results[-1].well:
            return
        file = self.setting.output / "environment.json"
        self.where = json.loads(file.read_text(encoding="utf-8"))
        self._gate = Gate.load(self.setting.output / "tests.json", self._key())

    def _key(self) -> Mapping[str, str]:
        return {name: str(self.where.get(name, "")) for name in _KEY}

    def _note(self, result: Result) -> None:
        self.results.append(result)
        sys.stdout.write(f"{result.line()}\n")
        for line in result.tail:
            sys.stdout.write(f"    {line}\n")
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    about = "\n".join(f"    {part.name:12} {part.about}" for part in PARTS)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("PARTS", f"{about}\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--only", nargs="+", choices=_NAMES, metavar="PART")
    parser.add_argument("--skip", nargs="+", choices=_NAMES, metavar="PART", default=[])
    parser.add_argument("--output", type=Path, help=f"{RESULTS.relative_to(ROOT)} by default")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument(
        "--unproven", action="store_true", help="measure what no test has proven, in DIR/unproven"
    )
    return parser


def _output(options: argparse.Namespace) -> Path:
    """The folder; that of a dry run is never the one of results.

    Raises:
        ValueError: Rows of a dry run would lie among those of a GPU.
    """
    if not options.dry_run:
        return (options.output or RESULTS).resolve()
    if options.output is None:
        return Path(tempfile.mkdtemp(prefix="gpu_suite_dry_run_"))
    found = options.output.resolve()
    if found == RESULTS or RESULTS in found.parents:
        raise ValueError(
            f"`--output` of a dry run must not be {RESULTS.relative_to(ROOT)}, where rows are "
            "those of GPUs: name another folder, or none."
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.minutes <= 0:
            raise ValueError(f"`--minutes` must be positive, but is {options.minutes:g}.")
        output = _output(options)
    except ValueError as error:
        sys.stderr.write(f"gpu_suite: {error}\n")
        return 2
    output.mkdir(parents=True, exist_ok=True)
    wanted = set(options.only or _NAMES) - set(options.skip) | {"environment"}
    parts = [part for part in PARTS if part.name in wanted]
    setting = Setting(output, options.dry_run, options.unproven)
    return Suite(setting, parts, options.minutes).run()


if __name__ == "__main__":
    sys.exit(main())
