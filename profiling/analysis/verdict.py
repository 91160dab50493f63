"""Names the bottleneck of a run in one sentence, with a remedy and its largest possible gain.

The bound is Amdahl's: a part that takes the share r of a step, if it took no time at all, would
make the run 1 / (1 - r) times as fast. No change can gain more from that part.
"""

from __future__ import annotations

from typing import Any

NAMES = {
    "compute": "compute",
    "communication": "exposed communication",
    "copies": "exposed memory copies",
    "data_wait": "waiting for data",
    "host_gap": "host gaps",
    "idle": "other idle time",
}
_COMPUTE_BOUND = 0.10
"""Below this share of everything that is not compute, compute is the limit."""
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
    """Return possible remedies, the most promising first.

    Args:
        summary: Figures with ``budget``, ``categories``, ``padding`` and ``ranks``.
    """
    budget = summary.get("budget")
    found: list[dict[str, Any]] = []
    if not budget:
        share = summary["log"].get("data_wait_share", 0.0)
        _add(found, *_HINTS["data_wait"], share, "data_wait_s of metrics.jsonl")
        return found
    shares = {part["name"]: part["share"] for part in budget["parts"]}
    hints = _HINTS if budget["has_gpu"] else _HINTS | _CPU_HINTS
    for name in ("data_wait", "host_gap", "communication", "copies"):
        _add(found, *hints[name], shares[name], NAMES[name])
    for part in budget["idle"]:
        _add(found, *hints[part["name"]], part["share"], f"idle: {part['name']}")
    wall = budget["step_ms"]["mean"]
    for category in summary["categories"]:
        if category["name"] in hints and wall:
            _add(
                found,
                *hints[category["name"]],
                category["compute_ms"] / wall,
                f"compute: {category['name']}",
            )
    waiting = summary["ranks"].get("waiting_ms", 0.0)
    if wall and waiting:
        slowest = summary["ranks"]["slowest"]
        _add(
            found,
            "Give all ranks the same work",
            f"{slowest} is slowest; look at the padding and the lengths it gets",
            waiting / wall,
            "waiting for the slowest rank, a part of communication",
        )
    frames = summary["padding"].get("padding_frames", {}).get("mean", 0.0)
    _add(
        found,
        "Pad less",
        "data.strategy=packed, a larger data.frame_budget",
        shares["compute"] * frames,
        "compute on padded frames",
    )
    return sorted(found, key=lambda action: -action["share"])


def _add(found: list[dict[str, Any]], title: str, how: str, share: float, basis: str) -> None:
    if share >= _LEAST:
        bound = 1 / (1 - share) if share < 1 else None
        found.append(
            {"title": title, "how": how, "share": share, "speedup_at_most": bound, "basis": basis}
        )


def sentence(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict: what limits the run, and by how much.

    Args:
        summary: All other figures of the report.
    """
    budget = summary.get("budget")
    if not budget:
        return _from_log(summary["log"])
    parts = {part["name"]: part for part in budget["parts"]}
    wall = budget["step_ms"]["mean"]
    others = [part for name, part in parts.items() if name != "compute"]
    worst = max(others, key=lambda part: part["share"])
    compute = parts["compute"]["share"]
    scope = _scope(budget)
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


def _scope(budget: dict[str, Any]) -> str:
    ranks, steps = budget["ranks"], budget["steps"]
    if not budget["is_stepwise"]:
        return " (the whole capture counts as one step)"
    return f" ({steps} steps" + (f" of {ranks} ranks)" if ranks > 1 else ")")


def milliseconds(value: float) -> str:
    """Return a time in ms, with three digits that count."""
    if value == 0:
        return "0 ms"
    if abs(value) >= 100:
        return f"{value:,.0f} ms"
    if abs(value) >= 0.1:
        return f"{value:.3g} ms"
    return f"{value * 1e3:.3g} \u00b5s"


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * share:.1f} %"


def _gain(share: float) -> str:
    return (
        f"at most {1 / (1 - share):.2f} times as fast"
        if share < 0.999
        else "over 1000 times as fast"
    )
