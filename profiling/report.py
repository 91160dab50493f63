"""Say where the time of a run goes: a verdict, what it rests on, and what to do about it.

    python profiling/report.py FILE_OR_RUN... --output DIR
    python profiling/report.py --compare BEFORE AFTER --output DIR

Reads SQLite exports of Nsight Systems (``nsys export --type sqlite``), traces of torch.profiler
(JSON, also .gz) and run directories (metrics.jsonl, and the captures below them). Several files are
the ranks of one run; two run directories are compared. Writes

    DIR/report.html   one page that needs no network
    DIR/report.json   the same figures
    DIR/trace.json    the capture with the findings, for https://ui.perfetto.dev

Needs numpy alone. Exit code 2: an input cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import perfetto, summary
from analysis.sources import gather, is_run
from analysis.verdict import compare
from report_page.markup import without_controls
from report_page.page import render

_VERSION = 1


def make(
    groups: Sequence[Sequence[Path]],
    output: Path,
    *,
    step_range: str | None = None,
    skip: int = 0,
) -> dict[str, Any]:
    analyses = [
        summary.analyze(gather(list(paths)), step_range=step_range, skip=skip) for paths in groups
    ]
    reports = [analysis.report for analysis in analyses]
    if len(reports) == 2:
        _tell_apart(reports, groups)
        report = {"comparison": compare(*reports), "reports": reports}
    else:
        report = reports[0]
    report = {"version": _VERSION} | report
    # Names are those that the run, its files and its code have.
    page = without_controls(render(report))
    output.mkdir(parents=True, exist_ok=True)
    _write(output / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    _write(output / "report.html", page)
    for name, analysis in zip(_trace_names(len(analyses)), analyses, strict=True):
        if analysis.lanes:
            perfetto.write(output / name, analysis.table, analysis.lanes, analysis.attribution)
        else:
            # Not that of an earlier report.
            (output / name).unlink(missing_ok=True)
    return report


def _tell_apart(reports: list[dict[str, Any]], groups: Sequence[Sequence[Path]]) -> None:
    if reports[0]["name"] == reports[1]["name"]:
        for report, paths in zip(reports, groups, strict=True):
            report["name"] = str(paths[0])


def _trace_names(runs: int) -> list[str]:
    return ["trace.json"] if runs == 1 else ["trace_before.json", "trace.json"]


def _write(path: Path, content: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="*", type=Path, metavar="FILE_OR_RUN")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--step-range", metavar="NAME", help="of the ranges that mark steps; else found by names"
    )
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="leave out the first steps"
    )
    options = parser.parse_args(arguments)
    if bool(options.inputs) == bool(options.compare):
        parser.error("name files or runs, or two of them after --compare")
    if options.skip < 0:
        parser.error(f"--skip must be at least 0, but is {options.skip}")
    groups = [[path] for path in options.compare or ()] or [options.inputs]
    if len(options.inputs) == 2 and all(map(is_run, options.inputs)):
        groups = [[path] for path in options.inputs]
    try:
        report = make(groups, options.output, step_range=options.step_range, skip=options.skip)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"report: {without_controls(str(error))}\n")
        return 2
    told = report["comparison"] if "comparison" in report else report["verdict"]
    lines = f"{told['text']}\n{options.output / 'report.html'}\n"
    sys.stdout.write(without_controls(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
