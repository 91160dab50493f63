"""``effasr compare``: error rates of several runs in one table."""

import argparse
import sys
from pathlib import Path

from effasr.checks import check
from effasr.cli.options import AddCommand
from effasr.cli.progress import working
from effasr.untrusted.display import escape_controls


def add(command: AddCommand) -> None:
    parser = command(
        "compare",
        run,
        "Show the error rates of several runs side by side.",
        "A run is runs/NAME, with all sets on which `effasr evaluate` tested it, or the folder of",
        "`effasr evaluate --output`. The first system of each set is the one to compare with:",
        "utterances are drawn again and again, alike for both, to see how often it is beaten.",
        example="effasr compare runs/A runs/B --set dev",
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="runs or folders of evaluations"
    )
    parser.add_argument(
        "--normalizer",
        help="normalizer to score all texts with again (default: that of each evaluation)",
    )
    parser.add_argument("--set", dest="only", metavar="NAME", help="show only this set")


def run(options: argparse.Namespace) -> int:
    from effasr.evaluation.comparison import compare, read_run

    with working("reading the evaluations"):
        scored = [item for path in options.runs for item in read_run(path, options.normalizer)]
    if options.only is not None:
        names = sorted({item.set_name for item in scored})
        scored = [item for item in scored if item.set_name == options.only]
        check(scored, "--set", f"be one of {', '.join(names)}", repr(options.only))
    with working("comparing the systems"):
        table = compare(scored)
    sys.stdout.write(escape_controls(table))
    return 0
