"""Summarises a recorded step: totals, categories, layers, and the roofline of an H200."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton

from census.recorder import Entry
from census.step import Recorded
from effasr.training.cuda_graph import check_recordable
from effasr.training.flops import peak_of

VERSION = 1
_DEVICE = "NVIDIA H200"
_BYTES_PER_SECOND = 4.8e12
_FLOPS_WITHOUT_TENSOR_CORES = 67e12
"""Memory bandwidth and float32 peak from NVIDIA's H200 data sheet."""

_MIXING = {  # operations that mix frames or compute a loss; the other operations come between them
    *("attention", "guided_attention", "depthwise_conv", "strided_depthwise", "subsampling_stem"),
    *("linear_cross_entropy", "ctc_loss", "transducer_loss", "best_alignment_loss"),
}

MOST_PER_LIVE = 1.3
"""Largest ratio of the programs of kernels to those with rows."""

_GRAPH_INPUTS_AND_OUTPUTS = 3
"""Number of copies around a replay besides the batch: counts in, loss and its parts out."""

_LAYER = re.compile(r"(encoder|decoder|text_encoder)\.layers\.(\d+)")


def summarize(recorded: Recorded, model: str) -> dict[str, Any]:
    entries, config = recorded.entries, recorded.config
    micro_batch = [x for x in entries if x.pass_ != "update"]
    update = [x for x in entries if x.pass_ == "update"]
    encoder, rows = config.model.encoder, recorded.batch.frames.rows
    between = [x for x in micro_batch if _is_between(x)]
    cells = encoder.layers * rows * encoder.width
    share = lambda entries: round(_sum(entries, "bytes") / cells, 2)
    launches_of = lambda entries: _sum(entries, "launches")
    launches = launches_of(micro_batch)
    try:
        check_recordable(recorded.config.model, torch.device("cuda"))
        reason = None
    except ValueError as error:
        reason = str(error)
    return {
        "version": VERSION,
        "model": model,
        "frame_budget": rows,
        "batch": {
            "utterances": len(recorded.batch.ids),
            "frames": recorded.batch.num_frames,
            "tokens": recorded.batch.num_tokens,
            "token_budget": recorded.batch.tokens.layout.rows,
        },
        "parameters": recorded.parameters,
        "bytes_between_per_frame_channel": share(between),
        "bytes_between_of": _grouped(between, _maker, share),
        "bytes_between_by_pass": _grouped(between, lambda x: x.pass_, share),
        "launches_eager": launches,
        "launches_graph": launches if reason else 1,
        "launches_around_graph": (
            0 if reason else len(recorded.batch.tensors()) + _GRAPH_INPUTS_AND_OUTPUTS
        ),
        "graph_refused": reason,
        "launches_update": launches_of(update),
        "waits": recorded.waits,
        "launches_of": _grouped(micro_batch, _kind, launches_of),
        "bytes": _sum(entries, "bytes"),
        "programs": _sum(entries, "programs"),
        "programs_per_live": _per_live(entries),
        "programs_per_live_of": _grouped([x for x in entries if x.live], _kind, _per_live),
        "flops": _sum(entries, "flops"),
        "categories": _grouped(entries, _kind, _figures),
        "layers": _grouped(entries, lambda x: layer_of(x.place), _figures),
        "roofline": {
            "device": _DEVICE,
            "ms": roofline_ms(entries),
            "ms_at_peak_flops": round(1e3 * _sum(entries, "flops") / _peak(True), 3),
        },
        "torch": torch.__version__.split("+")[0],
        "triton": triton.__version__,
    }


def roofline_ms(entries: Iterable[Entry]) -> float:
    """Return the least time on an H200 in ms: bytes at full bandwidth or FLOPs at the peak.

    The larger of the two counts for each call, as its kernels may load and compute at once.
    """
    of_bytes: dict[int, float] = defaultdict(float)
    of_flops: dict[int, float] = defaultdict(float)
    for entry in entries:
        of_bytes[entry.call] += entry.bytes / _BYTES_PER_SECOND
        of_flops[entry.call] += entry.flops / _peak(entry.is_half)
    return round(1e3 * sum(max(of_bytes[call], of_flops[call]) for call in of_bytes), 3)


def layer_of(place: str) -> str:
    """Return the layer stack, such as ``encoder.layers``, or the first two names."""
    match = _LAYER.match(place)
    return f"{match[1]}.layers" if match else ".".join(place.split(".")[:2])


def _peak(is_half: bool) -> float:
    peak = peak_of(_DEVICE) if is_half else _FLOPS_WITHOUT_TENSOR_CORES
    assert peak is not None
    return peak


def _is_between(entry: Entry) -> bool:
    """Return whether an entry is frame traffic between products and kernels of encoder layers."""
    if not entry.by_frame or not entry.place.startswith("encoder.layers."):
        return False
    return entry.category != "gemm" and entry.category not in _MIXING


def _kind(entry: Entry) -> str:
    if entry.place.endswith(".conv.norm") and entry.category not in _MIXING:
        return "batch_norm"
    return entry.category


def _maker(entry: Entry) -> str:
    inner = re.sub(r"^encoder\.layers\.\d+\.?", "", entry.place) or "layer"
    return f"{inner}: {entry.name}"


def _per_live(entries: list[Entry]) -> float:
    return round(_sum(entries, "programs") / _sum(entries, "live"), 3)


def _sum(entries: Iterable[Entry], figure: str) -> int:
    return sum(getattr(x, figure) for x in entries)


def _figures(entries: list[Entry]) -> dict[str, Any]:
    sums = {name: _sum(entries, name) for name in ("launches", "bytes", "flops")}
    return {**sums, "roofline_ms": roofline_ms(entries)}


def _grouped(
    entries: Iterable[Entry], key: Callable[[Entry], str], figure: Callable[[list[Entry]], Any]
) -> dict[str, Any]:
    """Return the figures of each key, the key with the most bytes first."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[key(entry)].append(entry)
    order = sorted(groups, key=lambda name: (-sum(x.bytes for x in groups[name]), name))
    return {name: figure(groups[name]) for name in order}


def table(summary: dict[str, Any]) -> str:
    batch, roofline = summary["batch"], summary["roofline"]
    lines = [
        f"{summary['model']}, {summary['frame_budget']} frames a micro-batch: "
        f"{batch['utterances']} utterances of {batch['frames']} frames and {batch['tokens']} tokens"
    ]
    for title in ("categories", "layers"):
        lines += ["", f"{title:24}{'launches':>10}{'GB':>10}{'TFLOP':>10}{'roofline ms':>13}"]
        for name, figures in summary[title].items():
            lines.append(
                f"{name:24}{figures['launches']:10,}{figures['bytes'] / 1e9:10.2f}"
                f"{figures['flops'] / 1e12:10.3f}{figures['roofline_ms']:13.3f}"
            )
    graph = summary["graph_refused"] or f"{summary['launches_graph']} in a CUDA graph"
    lines += [
        "",
        f"total                   {summary['bytes'] / 1e9:.2f} GB, {summary['flops'] / 1e12:.3f} "
        f"TFLOP; at least {roofline['ms']:.2f} ms on an {roofline['device']}, of which "
        f"{roofline['ms_at_peak_flops']:.2f} ms for the products alone",
        f"launches a micro-batch  {summary['launches_eager']:,} eager; {graph}; the update "
        f"{summary['launches_update']:,}",
        f"programs of kernels     {summary['programs']:,}, {summary['programs_per_live']:.3f} for "
        "each with rows",
        f"bytes between products and kernels of an encoder layer  "
        f"{summary['bytes_between_per_frame_channel']:.1f} per frame and channel",
    ]
    for name, share in list(summary["bytes_between_of"].items())[:12]:
        lines.append(f"  {name:54}{share:8.2f}")
    return "\n".join(lines)


COMPARED = (
    "launches_eager",
    "launches_graph",
    "launches_around_graph",
    "launches_update",
    "bytes",
    "bytes_between_per_frame_channel",
)


def growth(before: dict[str, Any], now: dict[str, Any], most: float) -> list[str]:
    lines = []
    for name in COMPARED:
        old, new = before[name], now[name]
        if new > old * (1 + most):
            share = f" ({100 * (new / old - 1):+.1f} %)" if old else ""
            lines.append(f"{now['model']}: {name} has grown from {old:,} to {new:,}{share}")
    lines += [f"{now['model']}: the host waits for the GPU: {x}" for x in now.get("waits", ())]
    lines += [
        f"{now['model']}: programs_per_live of {name} must be at most {MOST_PER_LIVE}, but is "
        f"{ratio}"
        for name, ratio in now["programs_per_live_of"].items()
        if ratio > MOST_PER_LIVE
    ]
    return lines
