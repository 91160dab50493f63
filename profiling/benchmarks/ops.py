"""Time every operation against its peers, forward and with backward, at real speech lengths.

    python profiling/bench.py ops [--op attention ...] [--lengths MANIFEST] [--output ROWS.csv]

Needs torch and effasr_kernels alone; peers that are not installed are named and left out. Before
anything is timed its results and gradients are compared with the reference's. One row for each
(op, kind, backend, shape, dtype, mode), written as soon as it is known: percentiles in
milliseconds, memory, useful work per second (padding is no work), and what it was measured on. On a
CPU the sizes are tiny, and rows are written only where --output says. The transducer's largest
batches take minutes, so they are measured only with ``--op transducer_loss`` alone, and first, or
by their kind, ``--kind "large 4x"``. With another checkout and its folder kernels in PYTHONPATH,
the kernels of that one are measured, with the same inputs.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from benchmarks import attention, harness, operations, transducer
from benchmarks.contender import Case, Contender, Gold, error, judge
from benchmarks.harness import OutOfTime, Row, Timing, complain
from benchmarks.workload import LISTED, Widths, Workload, drawn_durations, read_durations
from effasr_kernels import OPERATIONS

RESULTS = harness.PROFILING / "results" / "ops.csv"
COLUMNS = (
    *("op", "kind", "backend", "shape", "dtype", "mode", "p20_ms", "p50_ms", "p80_ms", "host_ms"),
    *("peak_bytes", "tflop_per_s", "gb_per_s", "error", *harness.VERSIONS),
)
GROUPS: tuple[Callable[[Workload], list[Case]], ...] = (
    *(attention.attention, operations.losses, operations.convolutions, attention.guided),
    *(operations.between, operations.norms, operations.grouped, transducer.cases),
    *(operations.decoding, operations.features, operations.language_model),
)
# Largest error relative to the norm: enough to distinguish the operation from another one.
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-2, torch.float32: 1e-3}
_HEAVY = 3  # factor on the time limit of a heavy case


@dataclass(frozen=True)
class Limits:
    deadline: float  # on the clock `time.monotonic`
    case: float  # seconds for one operation in one configuration, with all its peers
    measurement: float  # seconds for the repeats of one call
    repeats: int

    def remaining(self) -> float:
        return self.deadline - time.monotonic()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("ops", __doc__)
    add = parser.add_argument
    names = list(OPERATIONS)
    add("--op", nargs="*", choices=names, default=[], metavar="NAME", help="such as attention")
    add("--kind", nargs="*", default=[], help="only these, such as relative")
    add("--frames", nargs="*", type=int, help="frame rows of a batch")
    add("--head-width", nargs="*", type=int, help="D")
    add("--lengths", type=Path, help="durations: JSON lines, .tsv, or numbers")
    add("--no-peers", action="store_true", help="our own backends alone")
    add("--reference", action="store_true", help="time it on a GPU, too")
    add("--exact", action="store_true", help="no empty sequences in the layouts")
    add("--device", default=harness.default_device().type)
    add("--budget-s", type=float, default=420.0, help="for everything")
    text = "for one operation and size; by default an eighth of the budget, from 10 to 45"
    add("--case-s", type=float, help=text)
    add("--list", action="store_true", help="print what would be measured")
    options = parser.parse_args(arguments)
    if options.case_s is None:
        # A peer that is compiled for half a minute must not take what all others need.
        options.case_s = min(45.0, max(10.0, options.budget_s / 8))
    return options


def workloads(options: argparse.Namespace) -> list[Workload]:
    """Return the batches to measure with; tiny on a CPU."""
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    path = options.lengths or LISTED
    durations = read_durations(path) if path.exists() else drawn_durations()
    small = {"heads": 2, "vocabulary": 32, "channels": 4, "mels": 8, "pieces": 16}
    small |= {"speech_tokens": 24, "speech_classes": 12}
    return [
        Workload(
            rows=rows,
            head_width=head_width,
            # Shorter on a CPU, so that a tiny batch still has several.
            durations=durations if gpu else [x / 6 for x in durations],
            device=device,
            dtype=torch.bfloat16 if gpu else torch.float32,
            widths=Widths() if gpu else Widths(**small),
            sequences=1 if options.exact else None,
        )
        for rows in options.frames or ([24_000, 50_000] if gpu else [120])
        for head_width in options.head_width or ([64, 128] if gpu else [8])
    ]


def cases(options: argparse.Namespace) -> Iterator[tuple[Workload, Case]]:
    loads = workloads(options)
    alone = options.op == ["transducer_loss"] and not options.kind
    wants_large = alone or any(kind.startswith("large") for kind in options.kind)
    large = transducer.large(loads[0]) if wants_large else ()
    usual = ((load, case) for load in loads for group in GROUPS for case in group(load))
    for workload, case in chain(((loads[0], case) for case in large), usual):
        if selected(case, options):
            yield workload, case


def selected(case: Case, options: argparse.Namespace) -> bool:
    return case.op in (options.op or [case.op]) and case.kind in (options.kind or [case.kind])


def contenders(case: Case, options: argparse.Namespace) -> dict[str, Callable[[], Contender]]:
    """Return who is measured, the reference last: it is slow, and time may run out."""
    backends = [backend.value for backend in OPERATIONS[case.op].backends]
    ours = {backend: lambda backend=backend: case.ours(backend) for backend in backends}
    chosen = {name: make for name, make in ours.items() if name != "reference"}
    if not options.no_peers:
        chosen |= {f"peer: {name}": make for name, make in case.peers.items()}
    if options.reference or options.device == "cpu":
        chosen["reference"] = ours["reference"]
    return chosen


def rows_of(
    case: Case, workload: Workload, limits: Limits, options: argparse.Namespace
) -> Iterator[Row]:
    """Measure a case; what cannot be measured is named with the reason, and has no row."""
    end = time.monotonic() + min(limits.case * (_HEAVY if case.heavy else 1), limits.remaining())
    try:
        with harness.time_limit(end - time.monotonic()):
            gold = judge(case)
    except (OutOfTime, Exception) as reason:
        _excuse(case, "reference", reason)
        return
    for name in contenders(case, options):
        remaining = end - time.monotonic()
        if remaining <= 0:
            complain(f"bench ops: {case.name}, {case.shape}: {name}: no time left")
            continue
        rows: list[Row] = []
        try:
            with harness.time_limit(remaining):
                for row in _rows(case, name, gold, workload, limits, options):
                    rows.append(row)
        except (OutOfTime, Exception) as reason:
            _excuse(case, name, reason)
        if case.heavy and workload.device.type == "cuda":
            # What one has left in pieces, the next may need whole.
            torch.cuda.empty_cache()
        yield from rows


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
    for backward in (False, True) if contender.upstream else (False,):
        with torch.set_grad_enabled(backward):
            timing = harness.measure(
                contender.gradients if backward else contender.results,
                workload.device,
                repeats=limits.repeats,
                warmup=1 if case.heavy else 3,
                seconds=limits.measurement,
                least=1 if case.heavy else 3,
            )
        row = {
            **{"op": case.op, "kind": case.kind, "backend": name, "shape": case.shape},
            "dtype": harness.dtype_name(workload.dtype),
            "mode": "forward+backward" if backward else "forward",
            **{f"{x}_ms": round(getattr(timing, x), 4) for x in ("p20", "p50", "p80", "host")},
            "peak_bytes": "" if timing.peak_bytes is None else timing.peak_bytes,
            "error": "approximate",
        }
        if distance is not None:
            row["tflop_per_s"] = _per_second(gold.flops[backward], timing, 1e12)
            row["gb_per_s"] = _per_second(gold.bytes[backward], timing, 1e9)
            row["error"] = f"{distance:.2e}"
        yield row


def _per_second(work: int, timing: Timing, unit: float) -> str:
    return f"{work / (1e-3 * timing.p50) / unit:.4g}" if work else ""


def _excuse(case: Case, name: str, reason: BaseException) -> None:
    """Report a peer that is missing or fails without ending the others; end at a CUDA error."""
    text = f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}"
    complain(f"bench ops: {case.name}, {case.shape}: {name}: {text}")
    if "CUDA error" in str(reason) and "out of memory" not in str(reason):
        raise reason


def ranking(rows: Sequence[Row]) -> str:
    """Return how long each takes, as a multiple of the first of our backends."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["kind"], row["mode"], row["shape"]), []).append(row)
    lines = ["", "Time as a multiple of ours (over 1: slower than ours)"]
    for (op, kind, mode, shape), group in groups.items():
        times = {row["backend"]: row["p50_ms"] for row in group}
        ours = [name for name in ("cuda", "triton", "cpp", "reference") if name in times]
        if not ours or len(times) == 1:
            continue
        lines.append(f"{op} {kind}, {mode}, {shape}; ours is {ours[0]}".replace(" ,", ","))
        for name, time_ms in sorted(times.items(), key=lambda item: item[1]):
            lines.append(f"    {time_ms / times[ours[0]]:8.2f}  {name}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    if gpu:
        # Events and the peak of the memory are those of the current device.
        torch.cuda.set_device(device.index or 0)
    # The reference and its peers are judged by what they can do, not by TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if options.list:
        for _, case in cases(options):
            harness.show(f"{case.name}; {case.shape}: {', '.join(contenders(case, options))}")
        return 0
    limits = Limits(
        deadline=time.monotonic() + options.budget_s,
        case=options.case_s,
        measurement=1.0 if gpu else 0.2,
        repeats=50 if gpu else 5,
    )
    output = options.output or (RESULTS if gpu else None)
    table = harness.Table(COLUMNS, output, device)
    for workload, case in cases(options):
        if limits.remaining() <= 0:
            complain(f"bench ops: {case.name}, {case.shape}: the budget is spent")
            continue
        for row in rows_of(case, workload, limits, options):
            label = f"{case.name:26} {row['backend']:30} {row['mode']:17}"
            table.add(row, f"{label} {row['p50_ms']:10.4f} ms   {row['shape']}")
    harness.show(ranking(table.rows))
    stored = f" appended to {output}" if output else "; none kept, without --output"
    harness.show(f"{len(table.rows)} rows{stored}")
    return 0 if table.rows else 1
