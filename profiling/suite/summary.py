"""Compares target figures with those from the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import rows as table

from suite.gate import ADAPTERS, Gate
from suite.steps import Result

BOTH = "forward+backward"
FILES = ("ops", "training", "inference", "memory", "transducer_memory")
Row = Mapping[str, str]
Rows = Mapping[str, Sequence[Row]]
_HEAD_WIDTHS = {"D=64", "D=128"}
"""Head widths of the targets of attention; others are measured beside them."""
MATMUL_TFLOPS = 790.0
"""Measured peak of bfloat16 matrix products on an H200; its data sheet promises 989."""


@dataclass(frozen=True)
class Target:
    """A target of a measurement.

    Attributes:
        what: Is measured.
        bound: Bound to be reached.
        unit: Unit of both.
        measure: The figure of some rows, the worst where there are several; None without rows.
        at_most: Whether the bound is one from above.
    """

    what: str
    bound: float
    unit: str
    measure: Callable[[Rows], float | None]
    at_most: bool = False

    def verdict(self, found: float | None, *, dry: bool = False) -> str:
        """``met``, ``missed`` or ``not measured``; a dry run proves nothing."""
        if found is None:
            return "not measured"
        if dry:
            return "dry run"
        return "met" if (found <= self.bound if self.at_most else found >= self.bound) else "missed"


def recent(folder: Path, since: str) -> dict[str, list[Row]]:
    """Return the rows that were begun at a time or later.

    Args:
        folder: Folder of the CSV files.
        since: ISO 8601, UTC, as in their column ``date``.
    """
    return {
        name: [row for row in _complete(folder / f"{name}.csv") if row["date"] >= since]
        for name in FILES
    }


def _complete(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, but those that a process was killed while it wrote."""
    return (row for row in table.read(path) if None not in row and None not in row.values())


def set_aside(folder: Path, gate: Gate, since: str) -> int:
    """Move rows of backends whose own tests are not green to ``folder/unproven``.

    They are of other projects' attention: backends that are measured along with ours, and gate
    nothing else.

    Args:
        folder: Folder of the CSV files.
        gate: Test results.
        since: Time before which rows stay, as in `recent`: these tests say nothing about them.

    Returns:
        How many rows were moved.
    """
    path = folder / "ops.csv"
    unproven = [backend for group, backend in ADAPTERS.items() if gate.reasons([group])]
    backends = {("attention", backend) for backend in unproven}
    found = list(_complete(path))
    moved = [
        row for row in found if (row["op"], row["backend"]) in backends and row["date"] >= since
    ]
    if not moved:
        return 0
    columns = table.header(path)
    for row in moved:
        table.append(folder / "unproven" / "ops.csv", columns, row)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    for row in found:
        if row not in moved:
            table.append(partial, columns, row)
    if partial.exists():
        partial.replace(path)
    else:
        path.unlink()
    return len(moved)


def _ops(
    rows: Rows, op: str, kind: str, backend: str, mode: str = BOTH, shape: str = ""
) -> dict[str, Row]:
    """Return the rows of a backend that targets are about, by shape; the last of several."""
    return {
        row["shape"]: row
        for row in rows["ops"]
        if (row["op"], row["kind"], row["backend"], row["mode"]) == (op, kind, backend, mode)
        and row["shape"].startswith(shape)
        and (op != "attention" or _HEAD_WIDTHS & set(row["shape"].split()))
    }


def speedup(
    op: str, kind: str, peers: Iterable[str], *, shape: str = ""
) -> Callable[[Rows], float | None]:
    """Return the least speed-up over the fastest of these peers, forward and backward."""

    def measure(rows: Rows) -> float | None:
        ours = _ops(rows, op, kind, "triton", shape=shape)
        theirs = [_ops(rows, op, kind, f"peer: {peer}", shape=shape) for peer in peers]
        ratios = [
            min(float(peer[at]["p50_ms"]) for peer in theirs if at in peer) / float(row["p50_ms"])
            for at, row in ours.items()
            if any(at in peer for peer in theirs)
        ]
        return min(ratios, default=None)

    return measure


def _relative_cost(rows: Rows) -> float | None:
    """Attention with relative positions, as a multiple of plain attention."""
    plain = _ops(rows, "attention", "", "triton")
    relative = _ops(rows, "attention", "relative", "triton")
    ratios = [
        float(row["p50_ms"]) / float(plain[at]["p50_ms"])
        for at, row in relative.items()
        if at in plain
    ]
    return max(ratios, default=None)


def _loss_memory(rows: Rows) -> float | None:
    """Memory of the linear cross-entropy, as a share of eager's."""
    kind = "smoothing 0.1"
    eager = _ops(rows, "linear_cross_entropy", kind, "peer: torch eager")
    shares = [
        float(row["peak_bytes"]) / float(eager[at]["peak_bytes"])
        for at, row in _ops(rows, "linear_cross_entropy", kind, "triton").items()
        if at in eager and row["peak_bytes"] and eager[at]["peak_bytes"]
    ]
    return max(shares, default=None)


def _published(rows: Rows) -> dict[str, Row]:
    """Our rows of the transducer at the published size: 40 s at 25 frames a second, V 1024."""
    found = _ops(rows, "transducer_loss", "large 4x", "triton", shape="B=1024 ")
    return {at: row for at, row in found.items() if at.endswith(" V=1024")}


def _transducer_memory(rows: Rows) -> float | None:
    sizes = [float(r["peak_bytes"]) / 1e9 for r in _published(rows).values() if r["peak_bytes"]]
    return max(sizes, default=None)


def _throughput(
    rows: Rows, system: str, column: str = "audio_s_per_s"
) -> dict[tuple[str, str], float]:
    """Return the best of a system, as a graph or compiled or not, by model and frame budget."""
    found: dict[tuple[str, str], float] = {}
    for row in rows["training"]:
        if row["system"] == system and row[column]:
            key = row["model"], row["frame_budget"]
            found[key] = max(found.get(key, 0.0), float(row[column]))
    return found


def training_ratio(peer: str) -> Callable[[Rows], float | None]:
    """Return audio seconds per second, packed in a static shape, relative to another system's.

    Of the same model at the same frame budget; the worst where there are several.
    """

    def measure(rows: Rows) -> float | None:
        ours, theirs = _throughput(rows, "packed_static"), _throughput(rows, peer)
        return min((ours[key] / theirs[key] for key in ours if theirs.get(key)), default=None)

    return measure


def _padding(column: str) -> Callable[[Rows], float | None]:
    def measure(rows: Rows) -> float | None:
        found = [
            100 * float(row[column]) for row in rows["training"] if row["system"] == "packed_static"
        ]
        return max(found, default=None)

    return measure


def useful_share(model: str) -> Callable[[Rows], float | None]:
    """Return the useful share of the peak of an H200 in a model's fastest mode, in percent.

    The worst of several frame budgets.
    """

    def measure(rows: Rows) -> float | None:
        of_model = [row for row in rows["training"] if row["model"] == model]
        # A part of an H200 has no known peak, and so no MFU.
        own = [row for row in of_model if "H200" in row["device"] and row["mfu"]]
        found = _throughput({"training": own}, "packed_static", "tflops_useful")
        return min((100 * x / MATMUL_TFLOPS for x in found.values()), default=None)

    return measure


def _depth(rows: Rows) -> float | None:
    """RTFx of 32/4 as a multiple of 24/24's."""
    found = {r["shape"]: float(r["rtfx"]) for r in rows["inference"] if r["system"] == "effasr"}
    return found["32/4"] / found["24/24"] if {"32/4", "24/24"} <= set(found) else None


def _growth(rows: Rows) -> float | None:
    """Return bytes by which the peak grew after step 5; of a GPU alone, which keeps an account."""
    peaks = {int(r["step"]): int(r["peak_bytes"]) for r in rows["memory"] if r["reserved_bytes"]}
    return float(peaks[max(peaks)] - peaks[5]) if 5 in peaks else None


_EAGER = ("torch eager", "Liger", "torch chunked")
_OTHER_LATTICES = ("torchaudio float16", "torchaudio float32", "FlashRNNT's way, in torch")
TARGETS = (
    Target("padding of frames, packed, static", 0.15, "%", _padding("padding_frames"), True),
    Target("padding of tokens, packed, static", 0.15, "%", _padding("padding_tokens"), True),
    Target(
        *("attention against torch varlen_attn", 1.3, "x"),
        speedup("attention", "", ["torch varlen_attn"]),
    ),
    Target(
        *("relative attention against NeMo's way", 5.0, "x"),
        speedup("attention", "relative", ["NeMo (sdpa with bias)"]),
    ),
    Target("relative attention, times plain attention", 1.5, "x", _relative_cost, True),
    Target(
        *("linear cross-entropy against the fastest peer", 1.0, "x"),
        speedup("linear_cross_entropy", "smoothing 0.1", _EAGER),
    ),
    Target("linear cross-entropy, share of eager's memory", 0.25, "", _loss_memory, True),
    Target("transducer, B 1024, 40 s, V 1024: memory", 2.0, "GB", _transducer_memory, True),
    Target(
        *("transducer, same, against the fastest peer", 1.0, "x"),
        speedup("transducer_loss", "large 4x", _OTHER_LATTICES, shape="B=1024 "),
    ),
    Target(
        *("depthwise convolution against cuDNN, padded", 3.0, "x"),
        speedup("depthwise_conv", "", ["torch conv1d padded"]),
    ),
    Target("training, packed against random batches", 3.0, "x", training_ratio("random")),
    Target(
        *("canary_1b_flash, useful share of 790 TFLOP/s", 50.0, "%"),
        useful_share("canary_1b_flash"),
    ),
    Target(
        *("canary_180m_flash, useful share of 790 TFLOP/s", 35.0, "%"),
        useful_share("canary_180m_flash"),
    ),
    Target("training against Hugging Face Canary", 3.0, "x", training_ratio("transformers")),
    Target("growth of the peak after step 5", 0.0, "bytes", _growth, True),
    Target("inference RTFx, 32/4 against 24/24", 3.0, "x", _depth),
)


def figures(rows: Rows, *, dry: bool = False) -> list[tuple[str, str, str, str]]:
    """Return for each target its name, bound, measured value and verdict."""
    lines = []
    for target in TARGETS:
        found = target.measure(rows)
        unit = f" {target.unit}" if target.unit else ""
        bound = f"{'<=' if target.at_most else '>='} {target.bound:g}{unit}"
        measured = "-" if found is None else f"{found:.3g}{unit}"
        lines.append((target.what, bound, measured, target.verdict(found, dry=dry)))
    return lines


def markdown(
    results: Sequence[Result],
    rows: Rows,
    where: Mapping[str, str],
    *,
    dry: bool = False,
    gate: Gate | None = None,
    state: str = "",
    call: int | None = None,
) -> str:
    """Return all tables, with the environment of the measurements.

    Args:
        results: Results of the steps so far.
        rows: Rows measured by this run.
        where: Device, versions, sources.
        dry: Whether no figure comes from a GPU.
        gate: Test results.
        state: Running step of an unfinished suite, and other remarks.
        call: Number of the call.
    """
    head = ", ".join(
        f"{name} {where[name]}" for name in ("torch", "triton", "git") if name in where
    )
    title = "# GPU suite" + ("" if call is None else f", call {call}")
    lines = [title + (", dry run: no figure below is one of a GPU" if dry else ""), ""]
    lines += [f"{where.get('device', 'unknown device')}, {head}, {where.get('date', '')}", ""]
    if state:
        lines += [f"To note: {state}", ""]
    lines += _table(("part", "how it went", "s", ""), [_cells(result) for result in results])
    lines += ["", *_table(("what", "target", "measured", "verdict"), figures(rows, dry=dry))]
    if steps := _steps(rows):
        lines += ["", *_table(("model", "mode", "system", "ms a step", "useful MFU"), steps)]
    if gate is not None:
        tested = [(name, group.verdict) for name, group in sorted(gate.groups.items())]
        lines += ["", *_table(("tests of", "outcome"), tested)]
    return "\n".join(lines) + "\n"


def _steps(rows: Rows) -> list[tuple[str, ...]]:
    """Return a training step in every mode."""
    return [
        (
            *(row["model"], row.get("mode", ""), row["system"]),
            f"{1e3 * float(row['step_s']):.1f}",
            f"{100 * float(row['mfu']):.1f} %" if row["mfu"] else "-",
        )
        for row in rows["training"]
        if row.get("step_s")
    ]


def _cells(result: Result) -> tuple[str, str, str, str]:
    return result.name, result.status, f"{result.seconds:.0f}", result.details


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Markdown that is aligned, so that it can be read on a screen, too."""
    everything = [titles, *lines]
    widths = [max(len(line[n]) for line in everything) for n in range(len(titles) - 1)]
    shown = [
        "| " + " | ".join([*map(str.ljust, line[:-1], widths), line[-1]]).rstrip() + " |"
        for line in everything
    ]
    return [shown[0], "|" + "|".join(["---"] * len(titles)) + "|", *shown[1:]]
