"""Time every operation against its peers, forward and with backward, at real speech lengths.

    python profiling/bench_ops.py [--op attention ...] [--lengths MANIFEST] [--output ROWS.csv]
    python profiling/bench_ops.py --base REF [--op attention ...]

Needs torch and effasr_kernels alone; peers that are not installed are named and left out. Before
anything is timed its results and gradients are compared with the reference's. One row for each
(op, kind, backend, shape, dtype, mode), written as soon as it is known: percentiles in
milliseconds, memory, useful work per second (padding is no work), and what it was measured on. On a
CPU the sizes are tiny, and rows are written only where --output says. The transducer's largest
batches take minutes, so they are measured only with ``--op transducer_loss`` alone, and first, or
by their kind, ``--kind "large 4x"``. With --base our backends are measured at another git revision,
in a worktree, and in the working tree, with the same inputs and the benchmark of the latter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from bench import revisions, rows
from bench.contender import Case, Contender, Gold, error, judge
from bench.operations import (
    attention,
    between,
    convolution,
    decoding,
    features,
    grouped,
    guided,
    language_model,
    losses,
    norms,
    relative,
)
from bench.provenance import provenance
from bench.timing import OutOfTime, Timing, measure, time_limit
from bench.transducer import loss as transducer
from bench.workload import LISTED, Widths, Workload, drawn_durations, read_durations

from effasr_kernels import OPERATIONS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "profiling" / "results" / "ops.csv"
COLUMNS = [
    *("op", "kind", "backend", "shape", "dtype", "mode", "p20_ms", "p50_ms", "p80_ms", "host_ms"),
    *("peak_bytes", "tflop_per_s", "gb_per_s", "error", "device", "torch", "triton", "git", "date"),
]
GROUPS: tuple[Callable[[Workload], list[Case]], ...] = (
    *(relative.cases, attention.cases, losses.cases, convolution.cases, guided.cases),
    *(between.cases, norms.cases, grouped.cases, transducer.cases, decoding.cases),
    *(features.cases, language_model.cases),
)
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-2, torch.float32: 1e-3}
"""Largest error relative to the norm: enough to distinguish the operation from another one."""
_HEAVY = 3
"""Factor on the time limit of a heavy case."""
Row = dict[str, object]
absent: dict[str, str] = {}
"""Peers that are not installed, with the message of the import error."""


@dataclass(frozen=True)
class Limits:
    """Time limits, in seconds.

    Attributes:
        deadline: Deadline on the clock `time.monotonic`.
        case: Limit of one operation in one configuration, with all its peers.
        measurement: Limit of the repeats of one call.
        repeats: Largest number of repeats.
    """

    deadline: float
    case: float
    measurement: float
    repeats: int

    def left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--op", nargs="*", default=[], help="only these, such as attention")
    parser.add_argument("--kind", nargs="*", default=[], help="only these, such as relative")
    parser.add_argument("--frames", nargs="*", type=int, help="frame rows of a batch")
    parser.add_argument("--head-width", nargs="*", type=int, help="D")
    parser.add_argument("--lengths", type=Path, help="durations: JSON lines, .tsv, or numbers")
    parser.add_argument("--no-peers", action="store_true", help="our own backends alone")
    parser.add_argument("--reference", action="store_true", help="time it on a GPU, too")
    parser.add_argument("--exact", action="store_true", help="no empty sequences in the layouts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget-s", type=float, default=420.0, help="for everything")
    parser.add_argument(
        "--case-s",
        type=float,
        help="for one operation and size; by default an eighth of the budget, from 10 to 45",
    )
    parser.add_argument("--output", type=Path, help="rows are appended to this CSV file")
    parser.add_argument(
        "--base", metavar="REF", help="compare our backends with those of another git revision"
    )
    parser.add_argument("--list", action="store_true", help="print what would be measured")
    options = parser.parse_args(arguments)
    if options.case_s is None:
        # A peer that is compiled for half a minute must not take what all others need.
        options.case_s = min(45.0, max(10.0, options.budget_s / 8))
    return options


def workloads(options: argparse.Namespace) -> list[Workload]:
    """Return the batches to measure with."""
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    path = options.lengths or LISTED
    durations = read_durations(path) if path.exists() else drawn_durations()
    frames = options.frames or ([24_000, 50_000] if gpu else [120])
    head_widths = options.head_width or ([64, 128] if gpu else [8])
    small = {"heads": 2, "vocabulary": 32, "channels": 4, "mels": 8, "pieces": 16}
    small |= {"speech_tokens": 24, "speech_classes": 12}
    widths = Widths() if gpu else Widths(**small)
    return [
        Workload(
            rows=rows,
            head_width=head_width,
            # Shorter on a CPU, so that a tiny batch still has several.
            durations=durations if gpu else [x / 6 for x in durations],
            device=device,
            dtype=torch.bfloat16 if gpu else torch.float32,
            widths=widths,
            sequences=1 if options.exact else None,
        )
        for rows in frames
        for head_width in head_widths
    ]


def cases(options: argparse.Namespace) -> Iterator[tuple[Workload, Case]]:
    """Return the cases to measure, and their batch."""
    loads = workloads(options)
    large = transducer.large(loads[0]) if _wants_large(options) else ()
    usual = ((load, case) for load in loads for group in GROUPS for case in group(load))
    for workload, case in chain(((loads[0], case) for case in large), usual):
        if case.op in (options.op or [case.op]) and case.kind in (options.kind or [case.kind]):
            yield workload, case


def _wants_large(options: argparse.Namespace) -> bool:
    """Return whether the transducer's largest batches are asked for: it alone, or by their kind."""
    by_kind = any(kind.startswith("large") for kind in options.kind)
    return by_kind or (options.op == ["transducer_loss"] and not options.kind)


def contenders(case: Case, options: argparse.Namespace) -> dict[str, Callable[[], Contender]]:
    """Return the cases to measure, the reference last: it is slow, and time may run out."""
    backends = [backend.value for backend in OPERATIONS[case.op].backends]
    ours = {backend: lambda backend=backend: case.ours(backend) for backend in backends}
    found = {name: make for name, make in ours.items() if name != "reference"}
    if not options.no_peers:
        found |= {f"peer: {name}": make for name, make in case.peers.items()}
    if options.reference or options.device == "cpu":
        found["reference"] = ours["reference"]
    return found


def say(what: str) -> None:
    """Print a line about something that has no row."""
    sys.stderr.write(f"bench_ops: {what}\n")
    sys.stderr.flush()


def rows_of(
    case: Case, workload: Workload, limits: Limits, options: argparse.Namespace
) -> Iterator[Row]:
    """Measure a case; what cannot be measured is said, and has no row."""
    end = time.monotonic() + min(limits.case * (_HEAVY if case.heavy else 1), limits.left())
    try:
        with time_limit(end - time.monotonic()):
            gold = judge(case)
    except (OutOfTime, Exception) as reason:
        _excuse(case, "reference", reason)
        return
    for name in contenders(case, options):
        left = end - time.monotonic()
        if left <= 0:
            say(f"{case.name}, {case.shape}: {name}: no time left")
            continue
        found: list[Row] = []
        try:
            with time_limit(left):
                for row in _rows(case, name, gold, workload, limits, options):
                    found.append(row)
        except (OutOfTime, Exception) as reason:
            _excuse(case, name, reason)
        if case.heavy and workload.device.type == "cuda":
            # What one has left in pieces, the next may need whole.
            torch.cuda.empty_cache()
        yield from found


def _rows(
    case: Case,
    name: str,
    gold: Gold,
    workload: Workload,
    limits: Limits,
    options: argparse.Namespace,
) -> Iterator[Row]:
    """Compare with the reference, then time forward alone, and with backward."""
    contender = contenders(case.small or case, options)[name]()
    distance = error(contender.outcome(), gold) if contender.exact else None
    if distance is not None and not distance <= TOLERANCE[workload.dtype]:
        raise ValueError(f"differs from the reference by {distance:.2g}")
    if case.small is not None:
        contender = contenders(case, options)[name]()
    for backward in (False, True) if contender.differentiable else (False,):
        timing = _time(case, contender, backward, workload, limits)
        row = _row(case, name, workload, backward, timing)
        row["error"] = "approximate"
        if distance is not None:
            row["tflop_per_s"] = _per_second(gold.flops[backward], timing, 1e12)
            row["gb_per_s"] = _per_second(gold.bytes[backward], timing, 1e9)
            row["error"] = f"{distance:.2e}"
        yield row


def _excuse(case: Case, name: str, reason: BaseException) -> None:
    """Report a peer that is missing or fails without ending the others; end at a CUDA error."""
    say(f"{case.name}, {case.shape}: {name}: {_short(reason)}")
    if isinstance(reason, ImportError):
        absent[name.removeprefix("peer: ")] = _short(reason)
    if "CUDA error" in str(reason) and "out of memory" not in str(reason):
        raise reason


def _short(reason: BaseException) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"


def _time(
    case: Case, contender: Contender, backward: bool, workload: Workload, limits: Limits
) -> Timing:
    def forward() -> object:
        with torch.no_grad():
            return contender.results()

    return measure(
        contender.gradients if backward else forward,
        workload.device,
        repeats=limits.repeats,
        warmup=1 if case.heavy else 3,
        seconds=limits.measurement,
        least=1 if case.heavy else 3,
    )


def _per_second(work: int, timing: Timing, unit: float) -> str:
    return f"{work / (1e-3 * timing.p50) / unit:.4g}" if work else ""


def _row(case: Case, name: str, workload: Workload, backward: bool, timing: Timing) -> Row:
    return {
        "op": case.op,
        "kind": case.kind,
        "backend": name,
        "shape": case.shape,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "mode": "forward+backward" if backward else "forward",
        "p20_ms": round(timing.p20, 4),
        "p50_ms": round(timing.p50, 4),
        "p80_ms": round(timing.p80, 4),
        "host_ms": round(timing.host, 4),
        "peak_bytes": "" if timing.peak_bytes is None else timing.peak_bytes,
    }


class Table:
    """Rows as they come: to a file, if there is one, and to the screen."""

    def __init__(self, output: Path | None):
        """Append to a CSV file, which is begun where it does not exist."""
        self.rows: list[Row] = []
        self._output = output

    def add(self, row: Row) -> None:
        """Write a row."""
        self.rows.append(row)
        if self._output is not None:
            rows.append(self._output, COLUMNS, row)
        name = f"{row['op']} {row['kind']}".strip()
        label = f"{name:26} {row['backend']:30} {row['mode']:17}"
        sys.stdout.write(f"{label} {row['p50_ms']:10.4f} ms   {row['shape']}\n")
        sys.stdout.flush()

    def ranking(self) -> str:
        """Return how long each takes, as a multiple of ours: the first backend of `own`."""
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            key = tuple(row[column] for column in ("op", "kind", "mode", "shape"))
            groups.setdefault(key, []).append(row)
        lines = ["", "Time as a multiple of ours (over 1: slower than ours)"]
        for (op, kind, mode, shape), group in groups.items():
            times = {str(row["backend"]): float(str(row["p50_ms"])) for row in group}
            own = [name for name in ("cuda", "triton", "cpp", "reference") if name in times]
            if not own or len(times) == 1:
                continue
            lines.append(f"{op} {kind}, {mode}, {shape}; ours is {own[0]}".replace(" ,", ","))
            for name, taken in sorted(times.items(), key=lambda item: item[1]):
                lines.append(f"    {taken / times[own[0]]:8.2f}  {name}")
        return "\n".join(lines) + "\n"


def compare(options: argparse.Namespace) -> int:
    """Measure our backends at another revision and in the working tree, one after the other."""
    command = [str(ROOT / "profiling" / "bench_ops.py"), "--no-peers"]
    for name in ("op", "kind", "frames", "head_width"):
        if found := getattr(options, name):
            command += [f"--{name.replace('_', '-')}", *map(str, found)]
    if options.lengths is not None:
        command += ["--lengths", str(options.lengths.resolve())]
    command += [f"--{name}" for name in ("reference", "exact") if getattr(options, name)]
    command += ["--device", options.device, "--case-s", str(options.case_s)]
    command += ["--budget-s", str(options.budget_s / 2)]
    try:
        before, now = revisions.compare(ROOT, options.base, command)
    except ValueError as error:
        say(str(error))
        return 2
    sys.stdout.write(revisions.side_by_side(before, now))
    if options.output is not None:
        for row in (*before, *now):
            rows.append(options.output, COLUMNS, row)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the rows as they come, rank at the end."""
    options = parse(arguments)
    if unknown := set(options.op) - set(OPERATIONS):
        say(f"--op must be of {', '.join(OPERATIONS)}, but is {', '.join(sorted(unknown))}.")
        return 2
    if options.base is not None:
        return compare(options)
    gpu = options.device.startswith("cuda")
    if gpu:
        # Events and the peak of the memory are those of the current device.
        torch.cuda.set_device(torch.device(options.device).index or 0)
    absent.clear()
    limits = Limits(
        deadline=time.monotonic() + options.budget_s,
        case=options.case_s,
        measurement=1.0 if gpu else 0.2,
        repeats=50 if gpu else 5,
    )
    output = options.output or (RESULTS if gpu and not options.list else None)
    table = Table(output)
    where = provenance(torch.device(options.device))
    # The reference and its peers are judged by what they can do, not by TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for workload, case in cases(options):
        if options.list:
            names = ", ".join(contenders(case, options))
            sys.stdout.write(f"{case.name}; {case.shape}: {names}\n")
        elif limits.left() <= 0:
            say(f"{case.name}, {case.shape}: the budget is spent")
        else:
            for row in rows_of(case, workload, limits, options):
                table.add(row | where)
    if not options.list:
        sys.stdout.write(table.ranking())
        kept = f" appended to {output}" if output else "; none kept, without --output"
        sys.stdout.write("".join(f"left out: {name}: {why}\n" for name, why in absent.items()))
        sys.stdout.write(f"{len(table.rows)} rows{kept}\n")
    return 0 if options.list or table.rows else 1


if __name__ == "__main__":
    sys.exit(main())
