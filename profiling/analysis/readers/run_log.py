"""Reads metrics.jsonl of a run: padding, waiting time, FLOPs utilisation."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.readers.sources import column

_PADDING = {"padding_frames": "audio frames", "padding_tokens": "tokens"}
_USEFUL, _PADDED, _HARDWARE = "mfu", "mfu_with_padding", "hfu"
_BINS = 20


def summarize(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run's log; empty where there is no line.

    Args:
        metrics: Lines of metrics.jsonl.
    """
    if not metrics:
        return {}
    steps = column(metrics, "step_s")
    waits = column(metrics, "data_wait_s")
    found: dict[str, Any] = {"lines": len(metrics), "last_step": metrics[-1].get("step")}
    for key, values in (
        ("step_s", steps),
        ("data_wait_s", waits),
        *(
            (key, column(metrics, key))
            for key in ("rank_imbalance", "audio_seconds", "tokens", "useful_tflops")
        ),
    ):
        if values:
            found[key] = {
                "median": float(np.median(values)),
                "mean": float(np.mean(values)),
                "max": float(np.max(values)),
            }
    if steps and len(waits) == len(steps) and sum(steps):
        found["data_wait_share"] = sum(waits) / sum(steps)
    if steps and "audio_seconds" in found:
        audio = column(metrics, "audio_seconds")
        if len(audio) == len(steps):
            found["audio_hours_per_hour"] = sum(audio) / sum(steps)
    memory = column(metrics, "peak_memory_bytes")
    if memory:
        found["peak_memory_bytes"] = max(memory)
    return found


def padding(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and histogram of the padding of frames and tokens, over the logged lines."""
    found = {}
    for key, label in _PADDING.items():
        values = np.array(column(metrics, key))
        if not len(values):
            continue
        top = max(float(values.max()), 0.005)
        # Edges at whole steps of a power of ten, or of twice or five times one.
        width = _round_up(top / _BINS)
        edges = np.arange(0, int(np.ceil(top / width + 1e-9)) + 1) * width
        counts, _ = np.histogram(np.clip(values, 0, edges[-1]), edges)
        found[key] = {
            "label": label,
            "mean": float(values.mean()),
            "max": float(values.max()),
            "edges": [float(edge) for edge in edges],
            "counts": [int(count) for count in counts],
        }
    return found


def _round_up(width: float) -> float:
    power = 10 ** np.floor(np.log10(width))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= width * (1 - 1e-9)))


def waterfall(metrics: list[dict[str, Any]], padding: dict[str, Any]) -> dict[str, Any]:
    """Return the losses from the GPU's peak down to useful FLOPs, as shares of the peak.

    Args:
        metrics: Lines of metrics.jsonl.
        padding: Padding of the steps, from `padding`.

    Returns:
        ``bars``: name and share, largest first; or ``reason``: why there are none. ``is_estimate``
        where the padded share is not logged and follows from the padding of frames.
    """
    useful = _median(metrics, _USEFUL)
    if useful is None:
        return {
            "reason": "metrics.jsonl has no mfu: the peak of this device is not known, or FLOPs "
            "were not counted"
            if metrics
            else "no run directory was given, so neither FLOPs nor padding are known"
        }
    padded, hardware = _median(metrics, _PADDED), _median(metrics, _HARDWARE)
    is_estimate = padded is None
    if padded is None:
        frames = padding.get("padding_frames", {}).get("mean")
        if frames is None or frames >= 1:
            return {"reason": "metrics.jsonl has mfu, but neither padded FLOPs nor padding_frames"}
        padded = useful / (1 - frames)
    bars = [{"name": "peak of the GPU", "share": 1.0}]
    # Where nothing is computed again, both are one.
    if hardware is not None and hardware > padded:
        bars.append({"name": "achieved, recomputation included", "share": hardware})
    bars.append({"name": "achieved, padding included", "share": padded})
    bars.append({"name": "useful", "share": useful})
    return {"bars": bars, "is_estimate": is_estimate}


def _median(metrics: list[dict[str, Any]], key: str) -> float | None:
    values = column(metrics, key)
    return float(np.median(values)) if values else None
