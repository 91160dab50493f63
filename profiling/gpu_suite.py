"""Everything that needs a GPU, in three calls: tests, benchmarks, and how far targets are met.

    python profiling/gpu_suite.py --call 1|2|3 [--minutes 9] [--output DIR] [--archive DIR]
        [--continue-from ARCHIVE] [--only PART ...] [--skip PART ...]
    python profiling/gpu_suite.py --dry-run [--call 1|2|3]

Needs torch, triton and this repository; what needs more, and is not installed, is left out with its
reason. The parts, each command of which is a process of its own, with the calls that they are in:

PARTS
Every part has a floor, seconds that earlier parts leave it, and a share of what is spare; so has
every command in it. Without --call all calls follow each other, and the tests run once.

No speed is measured of what uses an operation of which a test has failed, or none has passed; where
tests have run in part, and are green, their number is given beside it. A call runs only tests that
it rests on, and none again that an earlier one has run on the same sources, device and versions
(DIR/tests.jsonl). With --unproven it is measured all the same, in DIR/unproven. A part that fails
does not stop the others.

Rows are appended to DIR/*.csv as they come; logs are in DIR/logs. While it runs, and after each
command, the tables so far are written to DIR/summary.md, and all of DIR is packed into
gpu_suite_callN.tar.gz (at most 15 MiB), which with summary_callN.md lies in the folder of
--archive: a call that is killed loses little. The next one goes on where --continue-from names that
file. A folder that is full, or not writable, is reported, and another one is taken. SIGTERM and
ctrl-C end the commands and write the summary. Exit code 0: all went well; 1: a part failed or took
too long; 2: no GPU, or a wrong argument.

A dry run does all of it on the CPU at tiny size, in a temporary folder: it shows that the commands
work, and measures nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from suite import archive
from suite.calls import CALLS, PARTS
from suite.gate import GROUPS, MODEL
from suite.parts import ROOT, Part, Setting
from suite.suite import Suite

RESULTS = ROOT / "profiling" / "results"
MINUTES = 9.0
"""Time limit of a call in minutes."""
_DRY_MINUTES = 30.0
"""Time limit of a call on a CPU, which may be slow and busy."""
_NAMES = [part.name for part in PARTS]


def _parser() -> argparse.ArgumentParser:
    about = "\n".join(
        f"    {part.name:12} {','.join(map(str, part.calls)):6} {part.about}" for part in PARTS
    )
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("PARTS", f"{about}\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--call", type=int, choices=CALLS, help="all of them, by default")
    parser.add_argument("--minutes", type=float, help=f"for everything; {MINUTES:g} for each call")
    parser.add_argument("--only", nargs="+", choices=_NAMES, metavar="PART")
    parser.add_argument("--skip", nargs="+", choices=_NAMES, metavar="PART", default=[])
    parser.add_argument("--output", type=Path, help=f"{RESULTS.relative_to(ROOT)} by default")
    parser.add_argument("--archive", type=Path, metavar="DIR", help="that of --output by default")
    parser.add_argument(
        "--continue-from", type=Path, metavar="ARCHIVE", help="of an earlier call, unpacked first"
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument(
        "--unproven", action="store_true", help="measure what no test has proven, in DIR/unproven"
    )
    return parser


def _output(options: argparse.Namespace) -> Path:
    """Return the folder; that of a dry run is never the one of results.

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


def chosen(options: argparse.Namespace) -> list[Part]:
    """Return the parts that run, in their order."""
    calls = CALLS if options.call is None else (options.call,)
    wanted = set(options.only or _NAMES) - set(options.skip) | {"environment"}
    return [part for part in PARTS if part.name in wanted and set(calls) & set(part.calls)]


def setting_of(options: argparse.Namespace, output: Path, parts: Sequence[Part]) -> Setting:
    """Return the settings of the parts."""
    uses = {name for part in parts for name in part.uses}
    # Tests alone are all tests.
    measures = any(part.uses for part in parts)
    return Setting(
        output,
        options.dry_run,
        options.unproven,
        wanted=tuple(name for name in GROUPS if name in uses or not measures),
        trains=any(part.name == "training" for part in parts) and MODEL in uses,
    )


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM ends a suite as ctrl-C does; there is no time for a second one."""
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; returns the exit code."""
    options = _parser().parse_args(arguments)
    calls = len(CALLS) if options.call is None else 1
    usual = _DRY_MINUTES if options.dry_run else MINUTES
    minutes = usual * calls if options.minutes is None else options.minutes
    try:
        if minutes <= 0:
            raise ValueError(f"`--minutes` must be positive, but is {minutes:g}.")
        output = _output(options)
        if options.continue_from is not None:
            archive.unpack(options.continue_from, output)
    except ValueError as error:
        sys.stderr.write(f"gpu_suite: {error}\n")
        return 2
    parts = chosen(options)
    setting = setting_of(options, output, parts)
    packed = output if options.archive is None else options.archive.resolve()
    # Under nohup, SIGHUP stays ignored.
    heard = [x for x in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]
    before = {name: signal.signal(name, _interrupt) for name in heard}
    try:
        return Suite(setting, parts, minutes, call=options.call, archive=packed).run()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


if __name__ == "__main__":
    sys.exit(main())
