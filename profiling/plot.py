"""Pictures and tables of the rows in profiling/results.

    python profiling/plot.py [--results DIR] [--output DIR] [--device NAME]
    python profiling/plot.py --table

Writes ops.svg (times as fast as the fastest peer), training_MODEL.svg, transducer_memory.svg and
inference.svg, of the GPU that was measured last, or of the device whose name contains NAME. Of
what was measured several times the newest row counts. --table prints the same rows as Markdown,
each with what it was measured on and the command that repeats it. Without rows nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import rows as table

from effasr.data.atomic_files import write_atomically
from effasr.planning.picture import Panel, draw

RESULTS = Path(__file__).parent / "results"
OURS = ("cuda", "triton", "cpp", "reference")
"""Our backends that are our own code, the fastest kind first."""
KEYS = {
    "ops": ("op", "kind", "backend", "shape", "dtype", "mode"),
    "training": ("system", "model", "precision", "threads", "frame_budget", "mode"),
    "transducer_memory": ("backend", "batch", "joint", "classes", "dtype"),
    "inference": ("system", "shape", "size", "batch", "dtype"),
}
"""Columns that identify the rows of a file, besides the machine."""
_MODES = {
    **{"eager": "", "graph": "CUDA graph", "compile": "compiled"},
    "graph_compile": "compiled, CUDA graph",
}
_SIZES = ("B", "T", "U", "D", "J", "V")
Row = Mapping[str, str]


@dataclass(frozen=True)
class Line:
    """A line of a picture and of its table.

    Attributes:
        name: Label in front of the bars.
        values: Lengths of the bars, one for each panel; None where nothing was measured.
        row: Row of the table that it shows.
        command: Command that measures it again.
    """

    name: str
    values: Sequence[float | None]
    row: Row
    command: str


@dataclass(frozen=True)
class Picture:
    """A picture.

    Attributes:
        file: File name.
        title: Title above the picture.
        panels: Titles with units, and the format of a value.
        lines: Lines from top to bottom.
    """

    file: str
    title: str
    panels: Sequence[tuple[str, Callable[[float], str]]]
    lines: Sequence[Line]

    def columns(self) -> dict[str, list[tuple[float, str]]]:
        """Return lengths and texts of the bars, by panel; unmeasured panels have none."""
        found = {}
        for n, (title, write) in enumerate(self.panels):
            values = [line.values[n] for line in self.lines]
            if any(value is not None for value in values):
                found[title] = [(0.0, "-") if x is None else (x, write(x)) for x in values]
        return found

    def svg(self) -> str:
        """Draw it."""
        panels = [
            Panel(title, [length for length, _ in bars], [text for _, text in bars])
            for title, bars in self.columns().items()
        ]
        names = [line.name for line in self.lines]
        return draw(names, panels, title=self.title, subtitle=measured_on(self.lines))

    def markdown(self) -> str:
        """Return the same as a table."""
        columns = self.columns()
        titles = ["", *columns, "measured on", "command"]
        lines = [titles, ["---"] * len(titles)]
        for n, line in enumerate(self.lines):
            figures = [bars[n][1] for bars in columns.values()]
            lines.append([line.name, *figures, measured_on([line]), f"`{line.command}`"])
        shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{shown}\n"


def measured_on(lines: Iterable[Line]) -> str:
    """Device, versions, revision and date, each as often as it differs."""
    found = [line.row for line in lines]
    texts = [
        _unique(row["device"] for row in found),
        f"torch {_unique(row['torch'] for row in found)}",
        f"triton {_unique(row['triton'] or '-' for row in found)}",
        _unique(row["git"] for row in found),
        _unique(row["date"][:10] for row in found),
    ]
    return ", ".join(texts)


def _unique(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def newest(rows: Iterable[Row], keys: Sequence[str]) -> list[Row]:
    """Return the latest of equal rows."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        at = tuple(row[key] for key in keys)
        if at not in found or found[at]["date"] <= row["date"]:
            found[at] = row
    return list(found.values())


def load(folder: Path, device: str | None) -> dict[str, list[Row]]:
    """Return the rows of one device, by file.

    Args:
        folder: Folder of the CSV files.
        device: Part of its name; None for the GPU of the newest row.
    """
    every = {name: list(table.read(folder / f"{name}.csv")) for name in KEYS}
    if device is None:
        gpus = [
            row for rows in every.values() for row in rows if not row["device"].startswith("cpu")
        ]
        if not gpus:
            return {name: [] for name in KEYS}
        device = max(gpus, key=lambda row: row["date"])["device"]
    return {
        name: newest((row for row in rows if device in row["device"]), KEYS[name])
        for name, rows in every.items()
    }


def ops_picture(rows: Sequence[Row]) -> list[Picture]:
    """Return how many times as fast as the fastest peer that computes the same."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Row]]] = {}
    for row in rows:
        at = (row["op"], row["kind"], row["shape"], row["dtype"])
        if row["error"] != "approximate":
            groups.setdefault(at, {}).setdefault(row["mode"], {})[row["backend"]] = row
    lines = []
    for (op, kind, shape, _), modes in groups.items():
        ratios = {
            mode: found
            for mode in ("forward+backward", "forward")
            if (found := _ratio(modes.get(mode, {})))
        }
        if not ratios:
            continue
        # Operations of decoding have a forward alone.
        _, peer, row = next(iter(ratios.values()))
        values = [ratios[m][0] if m in ratios else None for m in ("forward+backward", "forward")]
        command = f"python profiling/bench_ops.py --op {op}" + (f' --kind "{kind}"' if kind else "")
        name = f"{op} {kind}, {_sizes(shape)}; {peer}".replace(" ,", ",")
        lines.append(Line(name, values, row, command))
    panels = [("forward + backward", times), ("forward", times)]
    title = "Times as fast as the fastest peer (named behind the sizes)"
    return [Picture("ops.svg", title, panels, lines)] if lines else []


def _sizes(shape: str) -> str:
    """Return the sizes that matter; number and lengths of utterances follow from the list."""
    return " ".join(size for size in shape.split() if size.split("=")[0] in _SIZES)


def _ratio(rows: Mapping[str, Row]) -> tuple[float, str, Row] | None:
    """Return the fastest peer's time over ours, its name, and our row."""
    ours = next((rows[name] for name in OURS if name in rows), None)
    peers = [row for name, row in rows.items() if name.startswith("peer: ")]
    if ours is None or not peers:
        return None
    best = min(peers, key=lambda row: float(row["p50_ms"]))
    ratio = float(best["p50_ms"]) / float(ours["p50_ms"])
    return ratio, best["backend"].removeprefix("peer: "), ours


def times(value: float) -> str:
    """Return a ratio."""
    return f"{value:.2f}x"


def training_pictures(rows: Sequence[Row]) -> list[Picture]:
    """Throughput by system, a picture for each model."""
    pictures = []
    for model in dict.fromkeys(row["model"] for row in rows):
        lines = []
        own = [row for row in rows if row["model"] == model]
        named = {
            "frame_budget": lambda row: f"{int(row['frame_budget']):,} frames",
            "precision": lambda row: row["precision"],
            "threads": lambda row: f"{row['threads']} thread{'s' * (row['threads'] != '1')}",
        }
        varied = [write for name, write in named.items() if len({row[name] for row in own}) > 1]
        for row in own:
            values = [
                _number(row["audio_s_per_s"]),
                _number(row["mfu"], 100),
                _number(row["padding_frames"], 100),
                _number(row["peak_bytes"], 1e-9),
            ]
            command = f"OMP_NUM_THREADS={row['threads']} " if row["threads"] else ""
            command += f"python profiling/bench_training.py --model {model}"
            command += f" --systems {row['system']} --frame-budget {row['frame_budget']}"
            command += f" --precision {row['precision']}"
            command += "" if row["mode"] == "eager" else f" --modes {row['mode']}"
            name = ", ".join(
                filter(None, [row["system"], _MODES[row["mode"]], *(text(row) for text in varied)])
            )
            lines.append(Line(name, values, row, command))
        lines.sort(key=lambda line: -(line.values[0] or 0.0))
        panels = [
            ("audio s / s", "{:,.0f}".format),
            ("useful MFU %", "{:.1f}".format),
            ("padding, frames %", "{:.1f}".format),
            ("peak GB", "{:.1f}".format),
        ]
        title = f"Training {model}: seconds of audio a second"
        pictures.append(Picture(f"training_{model}.svg", title, panels, lines))
    return pictures


def _number(text: str, factor: float = 1.0) -> float | None:
    return factor * float(text) if text else None


def transducer_pictures(rows: Sequence[Row]) -> list[Picture]:
    """Memory and time of the transducer's loss by the batch."""
    lines = []
    for row in sorted(rows, key=lambda row: (int(row["classes"]), int(row["batch"]))):
        values = [_number(row["peak_bytes"], 2**-20), _number(row["p50_ms"])]
        command = f"python profiling/studies/transducer_memory.py --batch {row['batch']}"
        command += f" --joint {row['joint']} --classes {row['classes']} --dtype {row['dtype']}"
        name = f"B {row['batch']}, V {row['classes']}: {row['backend'].removeprefix('peer: ')}"
        lines.append(Line(name, values, row, command))
    panels = [("peak MiB", "{:,.0f}".format), ("ms", "{:,.1f}".format)]
    title = "Transducer loss, forward and backward, as the batch grows"
    return [Picture("transducer_memory.svg", title, panels, lines)] if lines else []


def inference_pictures(rows: Sequence[Row]) -> list[Picture]:
    """RTFx by depth, and the seconds of encoder and decoder."""
    lines = []
    for row in rows:
        parts = ("encoder_s", "prefill_s", "decode_s")
        values = [_number(row["rtfx"]), *(_number(row[part]) for part in parts)]
        peer = row["system"] == "transformers" or row["agreement"]
        command = f"python profiling/bench_inference.py --size {row['size']}"
        command += f" --shapes {row['shape']} --batch {row['batch']}" + (" --peer" if peer else "")
        name = f"{row['shape']}, {row['system']}, {row['dtype']}, batch {row['batch']}"
        lines.append(Line(name, values, row, command))
    seconds = "{:.3f}".format
    panels = [("RTFx", "{:,.0f}".format), ("encoder s", seconds), ("prefill s", seconds)]
    panels.append(("decoder steps s", seconds))
    title = "Inference by depth, encoder / decoder layers"
    return [Picture("inference.svg", title, panels, lines)] if lines else []


def pictures(rows: Mapping[str, Sequence[Row]]) -> list[Picture]:
    """Draw every plot that has rows."""
    return [
        *ops_picture(rows["ops"]),
        *training_pictures(rows["training"]),
        *transducer_pictures(rows["transducer_memory"]),
        *inference_pictures(rows["inference"]),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, or print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="of the rows")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of the pictures; RESULTS")
    parser.add_argument("--device", metavar="NAME", help="or a part of it, such as H200 or cpu")
    parser.add_argument("--table", action="store_true", help="print Markdown, and draw nothing")
    options = parser.parse_args(arguments)
    try:
        found = pictures(load(options.results, options.device))
    except (KeyError, ValueError) as error:
        sys.stderr.write(f"plot: rows in {options.results} are not of this version: {error}\n")
        return 2
    if not found:
        device = f"of a device named {options.device!r}" if options.device else "of a GPU"
        sys.stdout.write(f"plot: no rows {device} in {options.results}: nothing to draw\n")
        return 0
    for picture in found:
        if options.table:
            sys.stdout.write(f"{picture.markdown()}\n")
            continue
        path = (options.output or options.results) / picture.file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, picture.svg().encode())
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
