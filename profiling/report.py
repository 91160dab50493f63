"""Say where the time of a run goes: a verdict, what it rests on, and what to do about it.

    python profiling/report.py FILE_OR_RUN... --output DIR
    python profiling/report.py --compare BEFORE AFTER --output DIR

Reads SQLite exports of Nsight Systems (``nsys export --type sqlite``), traces of torch.profiler
(JSON, also .gz) and run directories (metrics.jsonl, and the captures below them). Several files are
the ranks of one run; two run directories are compared. Writes

    DIR/report.html   one page that needs no network
    DIR/report.json   the same figures
    DIR/trace.json    the capture with the findings, for https://ui.perfetto.dev

Needs numpy alone, and the folder effasr beside this one. Exit code 2: an input cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# The checkout, where effasr is not installed.
sys.path.append(str(Path(__file__).parents[1]))
from analysis import intervals, summary
from analysis.attribution import RULES, Attribution
from analysis.budget import PARTS, Lane
from analysis.kineto import MARK
from analysis.sources import gather, is_run
from analysis.table import Table
from analysis.verdict import NAMES, compare
from report_page.page import render

from effasr.untrusted.display import escape_controls

_VERSION = 1
_MOST_KERNELS = 50_000  # of each rank in the trace: the profiler's own file has the others
_BUDGET_TRACK, _HOST_TRACK, _FIRST_STREAM = 1, 2, 1000


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
        if reports[0]["name"] == reports[1]["name"]:
            for report, paths in zip(reports, groups, strict=True):
                report["name"] = str(paths[0])
        report = {"comparison": compare(*reports), "reports": reports}
    else:
        report = reports[0]
    report = {"version": _VERSION} | report
    output.mkdir(parents=True, exist_ok=True)
    _write(output / "report.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    _write(output / "report.html", render(report))
    for name, analysis in zip(
        ("trace.json", "trace_before.json"), reversed(analyses), strict=False
    ):
        if analysis.lanes:
            _write_trace(output / name, analysis.table, analysis.lanes, analysis.attribution)
        else:
            # Not that of an earlier report.
            (output / name).unlink(missing_ok=True)
    return report


def _write(path: Path, content: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


# The trace has the budget of each rank over time, its streams with the range and the rule of every
# kernel, and the ranges of the host. Ranks stand on one clock where their captures have its time.


def _write_trace(path: Path, table: Table, lanes: list[Lane], attribution: Attribution) -> None:
    events = ",\n".join(map(json.dumps, _events(table, lanes, attribution)))
    head = f'"producer": "{MARK}", "displayTimeUnit": "ms"'
    _write(path, f'{{{head}, "traceEvents": [\n{events}\n]}}\n')


def _events(
    table: Table, lanes: list[Lane], attribution: Attribution
) -> Iterator[dict[str, object]]:
    epochs = [table.processes[lane.process].epoch for lane in lanes]
    begins = [int(lane.steps.windows[0, 0]) for lane in lanes]
    origin = min(begin + epoch for begin, epoch in zip(begins, epochs, strict=True))
    for number, label in enumerate(summary.lane_labels(table, lanes)):
        # All lanes begin near 0.
        shift = epochs[number] - origin if all(epochs) else -begins[number]
        for track, name, times, arguments in _tracks(table, lanes[number], label, attribution):
            event = {"ph": "X" if times else "M", "pid": number, "tid": track, "name": name}
            if times:
                begin, end = times
                event |= {"ts": round((begin + shift) / 1e3, 3), "dur": (end - begin) / 1e3}
            yield event | {"args": arguments}


def _tracks(table: Table, lane: Lane, label: str, attribution: Attribution) -> Iterator[tuple]:
    """Yield track, name, begin and end, and arguments of events; names of tracks have no time."""
    begin, end = _written_span(table, lane)
    named = lambda track, name: (track, "thread_name", None, {"name": name})
    yield 0, "process_name", None, {"name": label}
    yield named(_BUDGET_TRACK, "budget")
    for part in PARTS:
        for times in intervals.clip(lane.moments[part], begin, end).tolist():
            yield _BUDGET_TRACK, NAMES[part], times, {}
    ranges = table.ranges[table.annotations(lane.process)]
    ranges = ranges[(ranges["end"] > begin) & (ranges["start"] < end)]
    for number, thread in enumerate(np.unique(ranges["thread"])):
        track = _HOST_TRACK + number
        yield named(track, f"host {track - 1}" if number else "host")
        chosen = ranges[ranges["thread"] == thread]
        for first, last, name in chosen[["start", "end", "name"]].tolist():
            yield track, table.names[name], (first, last), {}
    rows = lane.rows
    rows = rows[(table.work["end"][rows] > begin) & (table.work["start"][rows] < end)]
    kind = "stream" if table.has_gpu else "operators of thread"
    for number, stream in enumerate(np.unique(table.work["stream"][rows]).tolist()):
        track = _FIRST_STREAM + number
        yield named(track, f"{kind} {stream & 0xFFFFFF}")
        chosen = rows[table.work["stream"][rows] == stream]
        work = table.work[["start", "end", "name"]][chosen].tolist()
        for row, (first, last, name) in zip(chosen.tolist(), work, strict=True):
            yield (
                *(track, table.names[name], (first, last)),
                {
                    "range": attribution.paths[attribution.path[row]],
                    "phase": attribution.paths[attribution.phase[row]],
                    "attributed by": RULES[attribution.rule[row]],
                },
            )


def _written_span(table: Table, lane: Lane) -> tuple[int, int]:
    """Return the time from the first written step to the last, ns."""
    windows = lane.steps.windows
    begins = np.sort(table.work["start"][lane.rows])
    before = np.searchsorted(begins, windows[:, 1]) - np.searchsorted(begins, windows[0, 0])
    last = max(int(np.searchsorted(before, _MOST_KERNELS, side="right")) - 1, 0)
    return int(windows[0, 0]), int(windows[last, 1])


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
        sys.stderr.write(f"report: {escape_controls(str(error))}\n")
        return 2
    told = report["comparison"] if "comparison" in report else report["verdict"]
    lines = f"{told['text']}\n{options.output / 'report.html'}\n"
    sys.stdout.write(escape_controls(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
