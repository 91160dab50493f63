"""Two runs side by side: what changed, and how much of the difference each part explains."""

from __future__ import annotations

from typing import Any

from analysis.verdict import NAMES, milliseconds

_MOST = 12
_LOGGED = ("step_s", "data_wait_s", "rank_imbalance", "audio_seconds")


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the differences of two reports; times per step and rank.

    Args:
        before: Report of the one, as `analysis.summary.analyze` makes it.
        after: Report of the other.
    """
    result: dict[str, Any] = {"before": before["name"], "after": after["name"]}
    if before["budget"] and after["budget"]:
        one, other = before["budget"], after["budget"]
        result["step_ms"] = _row("step", one["step_ms"]["mean"], other["step_ms"]["mean"])
        result["parts"] = _rows(one["parts"], other["parts"], "ms")
        result["categories"] = _rows(before["categories"], after["categories"], "work_ms")
        # Of all kernels: one that is not among those with most work is not absent.
        times = [report["kernels"]["work_ms"] for report in (before, after)]
        changed = _differences(*times)
        changed.sort(key=lambda row: -abs(row["delta"]))
        result["kernels"] = changed[:_MOST]
    result["log"] = [
        _row(key, before["log"][key]["mean"], after["log"][key]["mean"])
        for key in _LOGGED
        if key in before["log"] and key in after["log"]
    ]
    result["log"] += [
        _row(key, before["padding"][key]["mean"], after["padding"][key]["mean"])
        for key in ("padding_frames", "padding_tokens")
        if key in before["padding"] and key in after["padding"]
    ]
    result["text"] = _sentence(result)
    return result


def _rows(one: list[dict[str, Any]], other: list[dict[str, Any]], key: str) -> list[dict]:
    before = {entry["name"]: entry[key] for entry in one}
    after = {entry["name"]: entry[key] for entry in other}
    return _differences(before, after)


def _differences(before: dict[str, float], after: dict[str, float]) -> list[dict]:
    names = list(dict.fromkeys([*before, *after]))
    return [_row(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]


def _row(name: str, before: float, after: float) -> dict[str, Any]:
    return {
        "name": name,
        "before": before,
        "after": after,
        "delta": after - before,
        "ratio": after / before if before else None,
    }


def _sentence(result: dict[str, Any]) -> str:
    before, after = result["before"], result["after"]
    step = result.get("step_ms")
    scale, source = 1.0, ""
    if step is None:
        step = next((row for row in result["log"] if row["name"] == "step_s"), None)
        scale, source = 1e3, ", by the runs' logs"
    if step is None or not step["ratio"]:
        return f"{after} and {before} have no figure in common to compare their speed by."
    times = [milliseconds(step[key] * scale) for key in ("after", "before")]
    text = (
        f"A step of {after} takes {times[0]}, one of {before} {times[1]}: {step['ratio']:.2f} "
        f"times as long{source}"
    )
    if "parts" not in result:
        return f"{text}."
    moved = max(result["parts"], key=lambda row: abs(row["delta"]))
    sign = "+" if moved["delta"] > 0 else ""
    return (
        f"{text}. Most of the change is in {NAMES[moved['name']]} "
        f"({sign}{milliseconds(moved['delta'])})."
    )
