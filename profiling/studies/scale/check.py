"""Compares measurements on several processes with the predictions for them."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scale.cluster import Cluster, Link
from scale.gossip import GossipCosts
from scale.strategies import Strategy, predict
from scale.workload import Stragglers, Workload

LOOPBACK = Link(2e-4, 1e9)
"""Between processes of one machine; what it really takes is in the overhead that is fitted."""
COLUMNS: tuple[str, ...] = (
    "strategy",
    "slowdown",
    "rate_mbit",
    "nodes",
    "per_node",
    "base_s",
)
"""Fields that identify the runs of a file except for their seed."""
_FIGURES = ("samples_per_s", "parameters", "micro_batch")


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration, measured and predicted.

    Attributes:
        strategy: Strategy in the form that `Strategy.parse` reads.
        slowdown: Slowdown of one node.
        rate_mbit: Rate in Mbit/s of a node's network, or None where it is not limited.
        measured: Samples a second, the mean over seeds.
        spread: Range of these rates over the seeds, divided by the mean.
        predicted: Samples a second.
        fitted: Whether the overhead of a step was fitted to it.
    """

    strategy: str
    slowdown: float
    rate_mbit: float | None
    measured: float
    spread: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive if it is too high."""
        return self.predicted / self.measured - 1


def check(path: Path) -> list[Checked]:
    """Predict all runs of a file of `straggler_study`.

    A step of these runs sleeps, as long as its node is slow, and then computes in earnest, which
    nothing predicts: so long is what a strategy, without slow node and limit, takes beyond its
    sleep; or ddp, where there is no such row of the strategy. It differs, for the processes share
    the cores of a machine, and wait for them most where all compute at once. All other rows are
    predicted without looking at them.

    Raises:
        ValueError: The file is not one of these, or has no such row.
    """
    groups = _read(path)
    even = {
        (row["strategy"], *_setting(row)): _means(runs)
        for key, runs in groups.items()
        if _is_even(row := dict(zip(COLUMNS, key, strict=True)))
    }
    found = []
    for key, runs in groups.items():
        row = dict(zip(COLUMNS, key, strict=True))
        names = [name for name in (row["strategy"], "ddp") if (name, *_setting(row)) in even]
        if not names:
            raise ValueError(
                f"{path}: must have a row of ddp with slowdown 1 and no limited link, for nodes, "
                f"processes and seconds like those of {row['strategy']}, to fit the overhead to."
            )
        fitted_to = (names[0], even[names[0], *_setting(row)][0])
        mean, parameters, samples = _means(runs)
        predicted = _predict(row, parameters, samples, *fitted_to)
        measured = [rate for rate, *_ in runs]
        rate = float(row["rate_mbit"]) if row["rate_mbit"] else None
        spread = (max(measured) - min(measured)) / mean
        fitted = _is_even(row) and names[0] == row["strategy"]
        slowdown = float(row["slowdown"])
        found.append(Checked(row["strategy"], slowdown, rate, mean, spread, predicted, fitted))
    return found


def _is_even(row: dict[str, str]) -> bool:
    return float(row["slowdown"]) == 1 and not row["rate_mbit"]


def _means(runs: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(statistics.mean, zip(*runs, strict=True)))


def _setting(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("nodes", "per_node", "base_s"))


def _read(path: Path) -> dict[tuple[str, ...], list[tuple[float, ...]]]:
    """Return the `_FIGURES` of the runs that are alike but for their seed."""
    groups: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                key = tuple(row[name] for name in COLUMNS)
                figures = tuple(float(row[name]) for name in _FIGURES)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}:{number}: not a row of straggler_study ({error})."
                ) from error
            groups.setdefault(key, []).append(figures)
    if not groups:
        raise ValueError(f"{path}: holds no run.")
    return groups


def _predict(
    row: dict[str, str], parameters: float, samples: float, fitted_to: str, without: float
) -> float:
    """Samples a second, where ``fitted_to`` made ``without`` with nothing slow."""
    nodes, per_node = int(row["nodes"]), int(row["per_node"])
    gpus, base_s = nodes * per_node, float(row["base_s"])
    inter = LOOPBACK
    if row["rate_mbit"]:
        inter = Link(LOOPBACK.latency_s, float(row["rate_mbit"]) * 1e6 / 8)
    # gloo's all-reduce is a ring. The sleep is the forward: nothing hides what travels after it.
    cluster = Cluster(gpus, per_node, LOOPBACK, inter, "ring")
    workload = Workload(
        step_s=base_s, samples=samples, parameters=parameters, backward=0.0, overlap=0.0
    )
    even, costs = Stragglers(), GossipCosts(staging=Link(0.0, math.inf))
    free = replace(cluster, inter=LOOPBACK)
    ideal = predict(Strategy.parse(fitted_to), free, workload, even, costs)
    overhead = max(0.0, gpus * samples / without - ideal.step_s)
    workload = replace(workload, overhead_s=overhead)
    stragglers = Stragglers(slow_nodes=(1.0, float(row["slowdown"])))
    strategy = Strategy.parse(row["strategy"])
    return predict(strategy, cluster, workload, stragglers, costs).samples_per_s


def check_table(path: Path) -> str:
    """Markdown: predicted, measured, and by how much they differ."""
    found = check(path)
    lines = [
        "| strategy | one node slower | Mbit/s a node | measured samples / s | "
        "of the seeds, +- % | predicted | error % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        rate = "" if one.rate_mbit is None else f"{one.rate_mbit:g}"
        error = "fitted" if one.fitted else f"{100 * one.error:+.1f}"
        lines.append(
            f"| {one.strategy} | {one.slowdown:g} x | {rate} | {one.measured:.1f} | "
            f"{50 * one.spread:.1f} | {one.predicted:.1f} | {error} |"
        )
    lines += ["", _summary(found), ""]
    return "\n".join(lines)


def _summary(found: Sequence[Checked]) -> str:
    errors = [abs(one.error) for one in found if not one.fitted]
    if not errors:
        return "Nothing to compare: the only row is the one that the overhead was fitted to."
    return (
        f"Error of {len(errors)} predictions: {100 * statistics.mean(errors):.1f} % on average, "
        f"{100 * max(errors):.1f} % at most."
    )
