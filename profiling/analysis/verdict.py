"""Names the bottleneck of a run in one sentence, with a remedy and its largest possible gain.

The bound is Amdahl's: a part that takes the share r of a step, if it took no time at all, would
make the run 1 / (1 - r) times as fast. No change can gain more from that part.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from analysis import intervals
from analysis.attribution import Launches
from analysis.budget import Lane
from analysis.table import Kind, Note, Table

NAMES = {
    "compute": "compute",
    "communication": "exposed communication",
    "copies": "exposed memory copies",
    "data_wait": "waiting for data",
    "host_gap": "host gaps",
    "idle": "other idle time",
}
_COMPUTE_BOUND = 0.10  # below this share of everything that is not compute, compute is the limit
_LEAST = 0.005
_LIMITS = {
    "communication": "Communication that nothing hides takes {lost}; {device} computes for "
    "{compute}.",
    "copies": "Memory copies that nothing hides take {lost}; {device} computes for {compute}.",
    "data_wait": "Waiting for data takes {lost}; {device} computes for {compute}.",
    "host_gap": "The host does not launch work fast enough: {device} has nothing to do for {lost}, "
    "and computes for {compute}.",
    "queued": "{device} is idle for {lost} though its work has been launched (latency, or waiting "
    "for other work), and computes for {compute}.",
    "synchronizing": "{device} is idle for {lost}, most of it while the host waits in a "
    "synchronizing call; it computes for {compute}.",
    "outside": "{device} is idle for {lost}, most of it outside of every range; it computes for "
    "{compute}.",
}
_CPU_HOST_GAP = (
    "Between operators, in Python and in the profiler itself, {lost} are spent; operators run for "
    "{compute}."
)
_HINTS = {
    "data_wait": (
        "Keep batches ready",
        "more loader workers, cheaper or cached features, audio nearer to the machine",
    ),
    "host_gap": (
        "Launch ahead of the GPU",
        "training.cuda_graph=true or training.compile=true, larger budgets, no .item() in the step",
    ),
    "communication": (
        "Hide or shrink the exchange of gradients",
        "more micro-batches a step, larger buckets, bfloat16 gradients, ranks of equal work",
    ),
    "copies": (
        "Hide memory copies",
        "pinned host memory and non_blocking=True, on a stream of their own",
    ),
    "queued": (
        "Close the gaps between kernels",
        "CUDA graphs, fewer and larger kernels (torch.compile), fewer dependencies between streams",
    ),
    "synchronizing": (
        "Do not make the host wait for the GPU",
        "no .item(), .cpu() or synchronize in the step; read results a step later",
    ),
    "outside": (
        "Look at what happens between the ranges",
        "the time line shows which moments are in no range; add ranges there",
    ),
    "elementwise": ("Fuse elementwise work", "training.compile=true, or a fused kernel"),
    "copy": ("Avoid copies on the GPU", "no transposes, casts or concatenations in the step"),
    "normalisation": ("Fuse normalisations", "training.compile=true, or a fused kernel"),
    "optimizer": ("Make the update cheaper", "a fused optimizer, larger steps"),
    "loss": ("Make the loss cheaper", "a fused loss that never stores the logits"),
    "lattice": ("Make the lattice cheaper", "the fused transducer or CTC loss"),
}
_CPU_HINTS = {
    "host_gap": (
        "Spend less time between operators",
        "fewer and larger operators: larger budgets, training.compile=true",
    ),
    "copy": ("Avoid copies", "no transposes, casts or concatenations in the step"),
}


def actions(summary: dict[str, Any]) -> list[dict[str, Any]]:
    budget, ranks = summary.get("budget"), summary["ranks"]
    if not budget:
        share = summary["log"].get("data_wait_share", 0.0)
        return _worthwhile([(*_HINTS["data_wait"], share, "data_wait_s of metrics.jsonl")])
    shares = {part["name"]: part["share"] for part in budget["parts"]}
    hints = _HINTS if budget["has_gpu"] else _HINTS | _CPU_HINTS
    named = ("data_wait", "host_gap", "communication", "copies")
    remedies = [(*hints[name], shares[name], NAMES[name]) for name in named]
    remedies += [(*hints[x["name"]], x["share"], f"idle: {x['name']}") for x in budget["idle"]]
    if wall := budget["step_ms"]["mean"]:
        remedies += [
            (*hints[name], category["compute_ms"] / wall, f"compute: {name}")
            for category in summary["categories"]
            if (name := category["name"]) in hints
        ]
        if ranks:
            how = f"{ranks['slowest']} is slowest; look at the padding and the lengths it gets"
            basis = "waiting for the slowest rank, a part of communication"
            share = ranks.get("waiting_ms", 0.0) / wall
            remedies.append(("Give all ranks the same work", how, share, basis))
    frames = summary["padding"].get("padding_frames", {}).get("mean", 0.0)
    how, basis = "data.strategy=packed, a larger data.frame_budget", "compute on padded frames"
    remedies.append(("Pad less", how, shares["compute"] * frames, basis))
    return sorted(_worthwhile(remedies), key=lambda action: -action["share"])


def _worthwhile(remedies: list[tuple[str, str, float, str]]) -> list[dict[str, Any]]:
    return [
        {"title": title, "how": how, "share": share}
        | {"speedup_at_most": 1 / (1 - share) if share < 1 else None, "basis": basis}
        for title, how, share, basis in remedies
        if share >= _LEAST
    ]


def sentence(summary: dict[str, Any]) -> dict[str, Any]:
    budget = summary.get("budget")
    if not budget:
        return _from_log(summary["log"])
    parts = {part["name"]: part for part in budget["parts"]}
    wall = budget["step_ms"]["mean"]
    other_parts = [part for name, part in parts.items() if name != "compute"]
    worst = max(other_parts, key=lambda part: part["share"])
    compute = parts["compute"]["share"]
    scope = " (the whole capture counts as one step)"
    if budget["is_stepwise"]:
        ranks = f" of {budget['ranks']} ranks" if budget["ranks"] > 1 else ""
        scope = f" ({budget['steps']} steps{ranks})"
    lost = 1 - compute
    if worst["share"] < _COMPUTE_BOUND and compute >= 0.5:
        # Not by summed work, which has the communication and copies that compute hides.
        kinds = [c for c in summary["categories"] if c["compute_ms"] > 0]
        most = ""
        if kinds:
            largest = max(kinds, key=lambda c: c["compute_ms"])
            share = largest["compute_ms"] / sum(c["compute_ms"] for c in kinds)
            most = f", most of all {largest['name']} ({percent(share)} of it)"
        text = (
            f"Compute limits the run: {percent(compute)} of a step of {milliseconds(wall)}{most}. "
            f"Without all the rest the run would be {_gain(lost)}{scope}."
        )
        return {"limit": "compute", "share": compute, "text": text}
    name = worst["name"]
    if name == "idle":
        name = max(budget["idle"], key=lambda reason: reason["ns"])["name"]
    limit = _LIMITS[name] if budget["has_gpu"] or name != "host_gap" else _CPU_HOST_GAP
    told = limit.format(
        device="the GPU" if budget["has_gpu"] else "the CPU",
        lost=f"{milliseconds(worst['ms'])} of a step of {milliseconds(wall)} "
        f"({percent(worst['share'])})",
        compute=percent(compute),
    )
    text = (
        f"{told[0].upper()}{told[1:]} Without that the run would be {_gain(worst['share'])}{scope}."
    )
    return {"limit": worst["name"], "share": worst["share"], "text": text}


def _from_log(log: dict[str, Any]) -> dict[str, Any]:
    if "step_s" not in log:
        text = "There is nothing to judge: no step was captured, and none was logged."
        return {"limit": None, "share": None, "text": text}
    wall = log["step_s"]["mean"] * 1e3
    share = log.get("data_wait_share", 0.0)
    text = (
        f"A step takes {milliseconds(wall)}, and {percent(share)} of it is waiting for data. "
        f"Without that the run would be {_gain(share)}; a capture would say where the rest goes."
    )
    return {"limit": "data_wait" if share >= 0.5 else None, "share": share, "text": text}


def milliseconds(value: float) -> str:
    if value == 0:
        return "0 ms"
    if abs(value) >= 100:
        return f"{value:,.0f} ms"
    if abs(value) >= 0.1:
        return f"{value:.3g} ms"
    return f"{value * 1e3:.3g} \u00b5s"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _gain(share: float) -> str:
    return (
        f"at most {1 / (1 - share):.2f} times as fast"
        if share < 0.999
        else "over 1000 times as fast"
    )


# Rates how reliable the figures are: data that the capture lacks, and the profiler's cost.

_FEW_STEPS = 3
_SPREAD = 1.5
_UNATTRIBUTED = 0.05
_LEVELS = ("warning", "note", "ok")
_RULES = {
    "launch": "by the range around the launch",
    "forward": "to the forward range of a backward operator",
    "time": "by the range open on the main thread at the time",
    "external id": "by the operator that the trace names",
    "operator": "to an operator only, no range being open",
    "none": "to nothing",
}


def assess(
    table: Table,
    launches: Launches,
    lanes: list[Lane],
    rules: dict[str, float],
    log: dict[str, Any],
) -> list[Note]:
    shares = [f"{percent(rules[rule])} {text}" for rule, text in _RULES.items() if rules.get(rule)]
    attributed = f"work attributed: {', '.join(shares)}"
    notes = [
        *((note.level, note.text) for note in table.notes),
        *_steps(table, lanes),
        *(_launches(table, launches, lanes) if table.has_gpu else ()),
        *([(_warning(rules.get("none", 0.0)), attributed)] if shares else ()),
        *_graphs(table),
        *_overhead(table, lanes),
        *_against_log(lanes, log),
    ]
    # Most serious first.
    unique = sorted(dict.fromkeys(notes), key=lambda note: _LEVELS.index(note[0]))
    return [Note(*note) for note in unique]


def _steps(table: Table, lanes: list[Lane]) -> Iterator[tuple[str, str]]:
    sources = (table.processes[lane.process].source for lane in lanes if not lane.steps.is_found)
    for source in dict.fromkeys(sources):
        yield (
            "warning",
            f"{source} has no ranges that mark steps: the whole capture counts as one step "
            "(--step-range NAME says which ranges do)",
        )
    if counts := {len(lane.steps.windows) for lane in lanes if lane.steps.is_found}:
        least, most = min(counts), max(counts)
        text = f"{least} steps" if least == most else f"{least} to {most} steps"
        text += f" of {len(lanes)} rank{'s' * (len(lanes) != 1)}"
        if least < _FEW_STEPS:
            yield "note", f"{text}: fewer than {_FEW_STEPS} say little about the spread"
        else:
            yield "ok", text
    walls = np.concatenate([lane.wall for lane in lanes]) if lanes else np.zeros(0)
    if len(walls) > 1 and walls.max() > _SPREAD * np.median(walls):
        text = f"the longest step takes {walls.max() / np.median(walls):.1f} times the median: "
        yield "note", text + "--skip N leaves the first N out, if they warm up"


def _launches(table: Table, launches: Launches, lanes: list[Lane]) -> Iterator[tuple[str, str]]:
    rows = np.concatenate([lane.rows for lane in lanes]) if lanes else np.zeros(0, np.int64)
    lost = rows[~launches.is_known[rows]]
    work = table.work["end"] - table.work["start"]
    total = int(work[rows].sum())
    if not len(lost) or not total:
        yield "ok", "every kernel and copy has its launch"
        return
    share = int(work[lost].sum()) / total
    yield (
        _warning(share, otherwise="note"),
        f"{len(lost)} of {len(rows)} kernels and copies, {percent(share)} of their time, have "
        "no record of their launch: it lies outside the capture",
    )


def _warning(share: float, otherwise: str = "ok") -> str:
    return "warning" if share > _UNATTRIBUTED else otherwise


def _graphs(table: Table) -> Iterator[tuple[str, str]]:
    is_kernel = table.work["kind"] == Kind.KERNEL
    in_graph = is_kernel & (table.work["graph_node"] > 0)
    if in_graph.any():
        work = table.work["end"] - table.work["start"]
        share = int(work[in_graph].sum()) / max(int(work[is_kernel].sum()), 1)
        yield (
            "note",
            f"{percent(share)} of the kernels' time is in CUDA graphs, where ranges are not "
            "replayed: their kernels count for the range that launched the graph",
        )


def _overhead(table: Table, lanes: list[Lane]) -> Iterator[tuple[str, str]]:
    spent = wall = 0
    for process, windows in {lane.process: lane.steps.windows for lane in reversed(lanes)}.items():
        rows = table.overhead[table.overhead[:, 0] == process]
        moments = intervals.union(rows[:, 1], rows[:, 2])
        spent += intervals.measure(intervals.intersect(moments, windows))
        wall += intervals.measure(windows)
    if spent and wall:
        text = f"the profiler itself was at work during {percent(spent / wall)} of the steps"
        yield _warning(spent / wall), text


def _against_log(lanes: list[Lane], log: dict[str, Any]) -> Iterator[tuple[str, str]]:
    usual = log.get("step_s", {}).get("median", 0)
    if usual > 0 and any(lane.steps.is_found for lane in lanes):
        profiled = float(np.median(np.concatenate([lane.wall for lane in lanes]))) / 1e9
        ratio = profiled / usual
        yield (
            "warning" if ratio > 1.1 else "ok",
            f"a profiled step takes {ratio:.2f} times the run's median step ({profiled * 1e3:.1f} "
            f"against {usual * 1e3:.1f} ms)",
        )


# Two runs side by side: what changed, and how much of the difference each part explains.

_MOST = 12
_LOGGED = {
    "log": ("step_s", "data_wait_s", "rank_imbalance", "audio_seconds"),
    "padding": ("padding_frames", "padding_tokens"),
}


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    reports = before, after
    result: dict[str, Any] = {"before": before["name"], "after": after["name"]}
    if before["budget"] and after["budget"]:
        named = lambda entries, field: {entry["name"]: entry[field] for entry in entries}
        steps = ({"step": report["budget"]["step_ms"]["mean"]} for report in reports)
        (result["step_ms"],) = _differences(*steps)
        parts = (named(report["budget"]["parts"], "ms") for report in reports)
        result["parts"] = _differences(*parts)
        categories = (named(report["categories"], "work_ms") for report in reports)
        result["categories"] = _differences(*categories)
        # Of all kernels: one that is not among those with most work is not absent.
        changed = _differences(*(report["kernels"]["work_ms"] for report in reports))
        result["kernels"] = sorted(changed, key=lambda row: -abs(row["delta"]))[:_MOST]
    result["log"] = []
    for kind, keys in _LOGGED.items():
        shared = [key for key in keys if all(key in report[kind] for report in reports)]
        means = ({key: report[kind][key]["mean"] for key in shared} for report in reports)
        result["log"] += _differences(*means)
    result["text"] = _sentence(result)
    return result


def _differences(before: dict[str, float], after: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, 0.0), after.get(name, 0.0)
        row = {"name": name, "before": old, "after": new, "delta": new - old}
        rows.append(row | {"ratio": new / old if old else None})
    return rows


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
