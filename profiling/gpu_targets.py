"""Figures to reach on a GPU, and those of the rows that `profiling/gpu.py` has measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Row = Mapping[str, str]
Rows = Mapping[str, Sequence[Row]]
FILES = ("ops", "training", "encoder", "inference", "matmul_peak", "memory")
# NeMo's encoder step (NVIDIA/NeMo 16052): audio seconds a second on an RTX 5090, and its TFLOP/s.
NEMO_SPEED, NEMO_TFLOPS = 6285.0, 209.5
LATTICES = ("torchaudio float16", "torchaudio float32", "FlashRNNT's way, in torch")
LOSSES = ("torch eager", "Liger", "torch chunked", "cut-cross-entropy")


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """Return the whole rows of the tables; a process may have been killed while it wrote one."""
    rows: dict[str, list[Row]] = {name: [] for name in FILES}
    for name in FILES:
        path = folder / f"{name}.csv"
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                whole = lambda row: None not in row and None not in row.values()
                rows[name] = [row for row in csv.DictReader(file) if whole(row)]
    metrics = folder / "real_training" / "runs" / "quiet_metrics.jsonl"
    if metrics.exists():
        lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        rows["memory"] = [
            {k: str(line[k]) for k in ("step", "peak_memory_bytes")} for line in lines
        ]
    return rows


class Target(NamedTuple):
    what: str
    bound: float
    unit: str
    measure: Callable[[Rows], float | None]  # the worst where there are several; None without rows
    at_most: bool = False

    def verdict(self, value: float | None, *, dry: bool) -> str:
        if value is None or dry:
            return "not measured" if value is None else "dry run"
        return "met" if (value <= self.bound if self.at_most else value >= self.bound) else "missed"


def _ops(rows: Rows, op: str, kind: str, backend: str, shape: str = "") -> dict[str, Row]:
    """Return the rows of forward and backward by shape, of attention at D 64 and 128."""
    return {
        row["shape"]: row
        for row in rows["ops"]
        if (row["op"], row["kind"], row["backend"]) == (op, kind, backend)
        and row["mode"] == "forward+backward"
        and row["shape"].startswith(shape)
        and (op != "attention" or {"D=64", "D=128"} & set(row["shape"].split()))
    }


def speedup(op: str, kind: str, *peers: str, shape: str = "") -> Callable[[Rows], float | None]:
    """Return how many times as fast as the fastest of these peers."""

    def measure(rows: Rows) -> float | None:
        theirs = [_ops(rows, op, kind, f"peer: {peer}", shape) for peer in peers]
        ratios = []
        for key, row in _ops(rows, op, kind, "triton", shape).items():
            if times := [float(peer[key]["p50_ms"]) for peer in theirs if key in peer]:
                ratios.append(min(times) / float(row["p50_ms"]))
        return min(ratios, default=None)

    return measure


def _ratio(column: str, ours: Mapping[str, Row], theirs: Mapping[str, Row]) -> float | None:
    shared = [key for key in ours if key in theirs and ours[key][column] and theirs[key][column]]
    ratios = [float(ours[key][column]) / float(theirs[key][column]) for key in shared]
    return max(ratios, default=None)


def _relative_cost(rows: Rows) -> float | None:
    plain, relative = (_ops(rows, "attention", kind, "triton") for kind in ("", "relative"))
    return _ratio("p50_ms", relative, plain)


def _loss_memory(rows: Rows) -> float | None:
    case = "linear_cross_entropy", "smoothing 0.1"
    ours, eager = (_ops(rows, *case, backend) for backend in ("triton", "peer: torch eager"))
    return _ratio("peak_bytes", ours, eager)


def _transducer_memory(rows: Rows) -> float | None:
    rows_by_shape = _ops(rows, "transducer_loss", "large 4x", "triton", "B=1024 ")
    sizes = [row["peak_bytes"] for key, row in rows_by_shape.items() if key.endswith(" V=1024")]
    return max((float(size) / 1e9 for size in sizes if size), default=None)


def _best(rows: Rows, system: str, column: str) -> dict[tuple[str, str], float]:
    """Return the best of a system over its modes, by model and frame budget."""
    best: dict[tuple[str, str], float] = {}
    for row in rows["training"]:
        if row["system"] == system and row[column]:
            key = row["model"], row["frame_budget"]
            best[key] = max(best.get(key, 0.0), float(row[column]))
    return best


def training_ratio(peer: str) -> Callable[[Rows], float | None]:
    def measure(rows: Rows) -> float | None:
        ours, theirs = (_best(rows, x, "audio_s_per_s") for x in ("packed_static", peer))
        return min((ours[key] / theirs[key] for key in ours if theirs.get(key)), default=None)

    return measure


def useful_share(model: str) -> Callable[[Rows], float | None]:
    """Return the useful FLOPs of training as percent of the measured peak of products."""

    def measure(rows: Rows) -> float | None:
        peak = max((float(row["tflop_per_s"]) for row in rows["matmul_peak"]), default=0.0)
        best = _best(rows, "packed_static", "tflops_useful")
        speeds = [speed for (name, _), speed in best.items() if name == model]
        return min((100 * speed / peak for speed in speeds), default=None) if peak else None

    return measure


def _padding(column: str) -> Callable[[Rows], float | None]:
    def measure(rows: Rows) -> float | None:
        ours = [row[column] for row in rows["training"] if row["system"] == "packed_static"]
        return max((100 * float(share) for share in ours if share), default=None)

    return measure


def _encoder(rows: Rows) -> float | None:
    """Audio a second per TFLOP/s of the card, as a multiple of NeMo's."""
    speeds = [
        float(row["audio_s_per_s"]) / float(row["peak_tflops"])
        for row in rows["encoder"]
        if row["system"] == "effasr" and row["utterances"] == "103" and row["peak_tflops"]
    ]
    return max((speed / (NEMO_SPEED / NEMO_TFLOPS) for speed in speeds), default=None)


def _growth(rows: Rows) -> float | None:
    """Bytes by which the peak of a real training grew after step 5."""
    peaks = [int(row["peak_memory_bytes"]) for row in rows["memory"]]
    return float(max(peaks[5:]) - max(peaks[:5])) if len(peaks) > 5 else None


def _depth(rows: Rows) -> float | None:
    speeds = {x["shape"]: float(x["rtfx"]) for x in rows["inference"] if x["system"] == "effasr"}
    return speeds["32/4"] / speeds["24/24"] if {"32/4", "24/24"} <= set(speeds) else None


_TRANSDUCER = speedup("transducer_loss", "large 4x", *LATTICES, shape="B=1024 ")
TARGETS = (
    Target("padding of frames, packed, static", 0.13, "%", _padding("padding_frames"), True),
    Target("padding of tokens, packed, static", 0.13, "%", _padding("padding_tokens"), True),
    Target("canary_1b_flash, useful share of the peak", 50.0, "%", useful_share("canary_1b_flash")),
    Target(
        *("canary_180m_flash, useful share of the peak", 35.0, "%"),
        useful_share("canary_180m_flash"),
    ),
    Target("training against Hugging Face Canary", 3.0, "x", training_ratio("transformers")),
    Target("training, packed against random batches", 3.0, "x", training_ratio("random")),
    Target("training against 2D buckets", 1.05, "x", training_ratio("sync_bucketed_2d")),
    Target("FastConformer L by TFLOP/s, against NeMo's", 2.0, "x", _encoder),
    Target("attention, torch varlen_attn", 1.3, "x", speedup("attention", "", "torch varlen_attn")),
    Target("attention, flash-attn 2", 1.3, "x", speedup("attention", "", "flash_attn_2")),
    Target("attention, flash-attn 3", 1.0, "x", speedup("attention", "", "flash_attn_3")),
    Target(
        *("relative attention, NeMo's way", 5.0, "x"),
        speedup("attention", "relative", "NeMo (sdpa with bias)"),
    ),
    Target("relative attention, times plain attention", 1.5, "x", _relative_cost, True),
    Target(
        *("linear cross-entropy, fastest peer", 1.0, "x"),
        speedup("linear_cross_entropy", "smoothing 0.1", *LOSSES),
    ),
    Target("linear cross-entropy, share of eager's memory", 0.25, "", _loss_memory, True),
    Target("transducer, B 1024, 40 s, V 1024: memory", 1.8, "GB", _transducer_memory, True),
    Target("transducer, same, fastest peer", 1.0, "x", _TRANSDUCER),
    Target(
        *("depthwise convolution, cuDNN, padded", 3.0, "x"),
        speedup("depthwise_conv", "", "torch conv1d padded"),
    ),
    Target("growth of the peak after step 5", 0.0, "bytes", _growth, True),
    Target("inference RTFx, 32/4 against 24/24", 3.0, "x", _depth),
)


def table(rows: Rows, *, dry: bool) -> list[tuple[str, str, str, str]]:
    lines = []
    for target in TARGETS:
        value = target.measure(rows)
        unit = f" {target.unit}" if target.unit else ""
        bound = f"{'<=' if target.at_most else '>='} {target.bound:g}{unit}"
        measured = "-" if value is None else f"{value:.3g}{unit}"
        lines.append((target.what, bound, measured, target.verdict(value, dry=dry)))
    return lines
