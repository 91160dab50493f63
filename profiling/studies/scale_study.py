"""Predicted (not measured) scaling of each training strategy, with and without slow nodes.

    python profiling/studies/scale_study.py --model canary_180m_flash --step-s 0.4 [--slow 10]
    python profiling/studies/scale_study.py --model canary_180m_flash --run runs/NAME [--slow 10 2]
    python profiling/studies/scale_study.py --check profiling/results/straggler.csv

A clock that only counts runs every strategy on clusters of 8 to 1,024 GPUs: the time of a step is
given, or read from a run on one GPU; links cost latency and bytes over bandwidth; GPUs are slow,
jitter or pause as told. Everything assumed is printed. Efficiency is that of as many GPUs which
neither wait nor communicate. It says nothing about how well a model converges.

--check predicts the runs that profiling/studies/straggler_study.py measured, and prints both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scale.check import check_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows as csv_rows
from scale.cluster import Cluster, Link
from scale.gossip import GossipCosts
from scale.strategies import Prediction, Strategy, predict
from scale.workload import Stragglers, Workload, count_parameters, observe

from effasr.data.atomic_files import write_atomically
from effasr.planning.picture import Panel, draw

STRATEGIES = ("ddp", "fsdp2", "local_sgd:8", "hierarchical:2x8,16", "delayed", "adpsgd", "h_adpsgd")
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
_SHOWN = 4
"""Sizes of cluster that a picture has room for."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Clusters that differ only in size.

    Attributes:
        name: Name of the scenario.
        stragglers: Sources of slowness.
    """

    name: str
    stragglers: Stragglers


@dataclass(frozen=True, slots=True)
class Study:
    """Inputs of the predictions.

    Attributes:
        sizes: GPUs of the clusters.
        cluster: Links and nodes; its size is replaced.
        workload: Workload of each GPU.
        unit: Unit of the samples.
        scenarios: Scenarios to predict.
        costs: Costs of gossip.
        strategies: Strategies to compare.
        steps: Number of simulated steps.
        seed: Seed of the jitter.
    """

    sizes: Sequence[int]
    cluster: Cluster
    workload: Workload
    unit: str
    scenarios: Sequence[Scenario]
    costs: GossipCosts
    strategies: Sequence[Strategy]
    steps: int
    seed: int

    def run(self) -> list[list[Prediction]]:
        """Return the predictions of each scenario, by strategy, then by size."""
        return [
            [
                predict(
                    strategy,
                    replace(self.cluster, gpus=gpus, slowest_inter=scenario.stragglers.slow_link),
                    self.workload,
                    scenario.stragglers,
                    self.costs,
                    steps=self.steps,
                    seed=self.seed,
                )
                for strategy in self.strategies
                for gpus in self.sizes
            ]
            for scenario in self.scenarios
        ]

    def assumptions(self) -> list[str]:
        """Return the assumptions of the predictions, one a line."""
        cluster, work, costs = self.cluster, self.workload, self.costs
        size = work.parameters / 1e6
        gossip = costs.link or cluster.inter
        return [
            f"{cluster.gpus_per_node} GPUs a node; inside a node {_link(cluster.intra)}, between "
            f"nodes {_link(cluster.inter)} (all cards of a node together)",
            f"all-reduce: {cluster.algorithm}"
            + (" (the fastest of ring, tree, two_level)" if cluster.algorithm == "auto" else ""),
            f"a step of one GPU: {work.step_s:g} s to compute, of which {work.backward:.0%} is "
            f"backward, {work.samples:g} {self.unit}, {work.overhead_s:g} s besides",
            f"{size:,.1f} M parameters in {work.layers} layers; a parameter is "
            f"{work.gradient_bytes:g} bytes as a gradient of ddp, {work.gathered_bytes:g} as fsdp2 "
            f"gathers it, {work.weight_bytes:g} when weights are averaged",
            f"ddp's gradients travel in the last {work.overlap:.0%} of the backward; fsdp2 gathers "
            "a layer while it computes the one before",
            "ddp, fsdp2, local_sgd, hierarchical and delayed add up counts and losses over all "
            "GPUs in every step, as effasr does: a step is as long as that of the slowest GPU",
            "learners of adpsgd and h_adpsgd claim work one share at a time, "
            f"{1e6 * costs.claim_s:g} us each at one store; on a ring, they exchange weights after "
            f"every {_ordinal(costs.period)}update, or as often as the network allows: by "
            f"{_link(gossip)}, there and then back, {_link(costs.staging)} between GPU and CPU, "
            f"{costs.host_bytes_per_s / 1e9:g} GB/s to average on the CPU",
            "no congestion between nodes beyond their own links, no failures, no evaluation, no "
            f"checkpoints; {self.steps} steps, seed {self.seed}",
        ]


def table(study: Study, found: Sequence[Sequence[Prediction]]) -> str:
    """Markdown: a table for each scenario."""
    lines = []
    for scenario, predictions in zip(study.scenarios, found, strict=True):
        lines += [
            f"### {scenario.name}: {study.unit} / s (efficiency %)",
            "",
            f"| strategy | {' | '.join(f'{size:,} GPUs' for size in study.sizes)} |",
            "|---|" + "---:|" * len(study.sizes),
        ]
        for strategy in study.strategies:
            cells = [
                f"{one.samples_per_s:,.0f} ({100 * one.efficiency:.1f})"
                for one in predictions
                if one.strategy == strategy.text
            ]
            lines.append(f"| {strategy.text} | {' | '.join(cells)} |")
        lines += ["", *_mixing(study, predictions)]
    return "\n".join(lines)


def _mixing(study: Study, predictions: Sequence[Prediction]) -> list[str]:
    """Return the interval of weight exchanges and the staleness of the weights."""
    lines = []
    for strategy in study.strategies:
        shown = [
            f"{one.gpus:,}: {one.updates_per_exchange:.1f} / {one.staleness:.1f}"
            for one in predictions
            if one.strategy == strategy.text and one.updates_per_exchange is not None
        ]
        if shown:
            lines.append(f"- {strategy.text}: {', '.join(shown)}")
    if lines:
        lines = ["Updates of a learner per exchange / during it, by GPUs:", "", *lines, ""]
    return lines


def write_csv(path: Path, study: Study, found: Sequence[Sequence[Prediction]]) -> None:
    """Write a row for each prediction."""
    rows = [
        {"scenario": scenario.name}
        | {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in asdict(one).items()
        }
        for scenario, predictions in zip(study.scenarios, found, strict=True)
        for one in predictions
    ]
    csv_rows.write(path, list(rows[0]), rows)


def write_picture(path: Path, study: Study, found: Sequence[Sequence[Prediction]]) -> None:
    """Efficiency by strategy, a panel for each of some sizes of the cluster."""
    # Evenly over the sizes, with the smallest and the largest.
    last = len(study.sizes) - 1
    chosen = sorted({round(n * last / (_SHOWN - 1)) for n in range(_SHOWN)})
    groups = [scenario.name for scenario in study.scenarios for _ in study.strategies]
    panels = []
    for size in (study.sizes[n] for n in chosen):
        shares = [one.efficiency for group in found for one in group if one.gpus == size]
        labels = [f"{100 * share:.1f}" for share in shares]
        lost = [max(0.0, 1 - share) for share in shares]
        panels.append(Panel(f"{size:,} GPUs: %", shares, labels, lost))
    picture = draw(
        [strategy.text for _ in study.scenarios for strategy in study.strategies],
        panels,
        title="Predicted efficiency against linear scaling",
        subtitle=f"{study.workload.parameters / 1e6:,.0f} M parameters, "
        f"{study.workload.step_s:g} s a step, {study.cluster.gpus_per_node} GPUs a node, "
        f"{_link(study.cluster.inter)} between nodes",
        legend=("kept", "lost"),
        groups=groups,
    )
    write_atomically(path, picture.encode())


def _link(link: Link) -> str:
    return f"{1e6 * link.latency_s:g} us + {link.bytes_per_s / 1e9:g} GB/s"


def _ordinal(period: int) -> str:
    return "" if period == 1 else f"{period}th "


def _parse_link(text: str) -> Link:
    try:
        latency, bandwidth = map(float, text.split(":"))
        return Link(latency * 1e-6, bandwidth * 1e9)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be microseconds:GB/s, such as 20:12.5, but is {text!r}"
        ) from error


def _study(given: argparse.Namespace) -> Study:
    """Create the study from the command line.

    Raises:
        ValueError: A required option is missing, or options contradict each other.
    """
    step_s, jitter, samples, unit = given.step_s, given.jitter, given.samples, "samples"
    if given.run is not None:
        seen = observe(given.run / "metrics.jsonl")
        step_s = seen.step_s if step_s is None else step_s
        jitter = seen.jitter if jitter is None else jitter
        if samples is None:
            samples, unit = seen.audio_seconds, "s of audio"
    if step_s is None:
        raise ValueError(
            "`--step-s` must be given, the seconds that a step takes one GPU, or `--run`, a run on "
            "one GPU that measured it."
        )
    parameters, layers = given.parameters, 24
    if given.model is not None:
        known, layers = count_parameters(given.model)
        parameters = known if parameters is None else parameters
    if parameters is None:
        raise ValueError("`--model` or `--parameters` must be given: what is to travel.")
    workload = Workload(
        step_s=step_s,
        samples=1.0 if samples is None else samples,
        parameters=parameters,
        layers=given.layers or layers,
        overlap=given.overlap,
        gradient_bytes=given.gradient_bytes,
        overhead_s=given.overhead_s,
    )
    even = Stragglers(jitter=jitter or 0.0)
    stragglers = replace(
        even,
        slow_nodes=tuple(given.slow),
        slow_link=given.slow_link,
        pauses_per_hour=given.pauses[0],
        pause_s=given.pauses[1],
    )
    scenarios = [Scenario(_describe(even), even)]
    if stragglers != even:
        scenarios.append(Scenario(_describe(stragglers), stragglers))
    return Study(
        sizes=sorted(set(given.gpus)),
        cluster=Cluster(1, given.gpus_per_node, given.intra, given.inter, given.algorithm),
        workload=workload,
        unit=unit,
        scenarios=scenarios,
        costs=GossipCosts(
            link=given.gossip,
            staging=given.staging,
            host_bytes_per_s=given.host * 1e9,
            period=given.gossip_period,
            claim_s=given.claim_s,
        ),
        strategies=[Strategy.parse(text) for text in given.strategies],
        steps=given.steps,
        seed=given.seed,
    )


def _describe(stragglers: Stragglers) -> str:
    parts = [f"a node {factor:g} x slower" for factor in stragglers.slow_nodes]
    if stragglers.slow_link > 1:
        parts.append(f"a link {stragglers.slow_link:g} x slower")
    if stragglers.pauses_per_hour and stragglers.pause_s:
        parts.append(
            f"{stragglers.pauses_per_hour:g} pauses an hour and node of {stragglers.pause_s:g} s"
        )
    if stragglers.jitter:
        parts.append(f"jitter {stragglers.jitter:.1%}")
    return ", ".join(parts) if len(parts) else "all alike"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print assumptions and tables."""
    given = _parser().parse_args(arguments)
    if given.check is not None:
        sys.stdout.write(check_table(given.check))
        return
    study = _study(given)
    found = study.run()
    if given.json:
        content = {
            "assumptions": study.assumptions(),
            "scenarios": [
                {"name": scenario.name, "predictions": [asdict(one) for one in predictions]}
                for scenario, predictions in zip(study.scenarios, found, strict=True)
            ],
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        sys.stdout.write("Assumed, not measured:\n")
        sys.stdout.writelines(f"- {line}\n" for line in study.assumptions())
        sys.stdout.write("\n" + table(study, found))
    if given.csv is not None:
        write_csv(given.csv, study, found)
    if given.picture is not None:
        write_picture(given.picture, study, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--check", type=Path, metavar="FILE.csv", help="compare with what was measured")
    add("--gpus", nargs="+", type=int, default=list(GPUS), metavar="N")
    add("--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME[:SETTINGS]")
    step = parser.add_argument_group("a step of one GPU")
    step.add_argument("--run", type=Path, metavar="RUN", help="its metrics, of a run on one GPU")
    step.add_argument("--step-s", type=float, metavar="S", help="seconds to compute")
    step.add_argument("--jitter", type=float, metavar="PART", help="standard deviation over mean")
    step.add_argument("--samples", type=float, metavar="N", help="of the step; seconds of audio")
    step.add_argument("--overhead-s", type=float, default=0.0, metavar="S", help="besides")
    step.add_argument("--model", metavar="NAME", help="a preset or recipe: what is to travel")
    step.add_argument("--parameters", type=float, metavar="N", help="in its place")
    step.add_argument("--layers", type=int, metavar="N", help="that fsdp2 gathers")
    step.add_argument("--gradient-bytes", type=float, default=4.0, metavar="N")
    step.add_argument("--overlap", type=float, default=0.9, metavar="PART", help="of the backward")
    slow = parser.add_argument_group("what is slow, in a second scenario")
    slow.add_argument("--slow", nargs="+", type=float, default=[], metavar="FACTOR", help="nodes")
    slow.add_argument("--slow-link", type=float, default=1.0, metavar="FACTOR", help="of a node")
    slow.add_argument(
        "--pauses", nargs=2, type=float, default=(0.0, 0.0), metavar=("PER_HOUR", "S")
    )
    links = parser.add_argument_group("links, each microseconds:GB/s in one direction")
    links.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    links.add_argument("--intra", type=_parse_link, default="5:150", metavar="US:GB/S")
    links.add_argument("--inter", type=_parse_link, default="20:12.5", metavar="US:GB/S")
    links.add_argument("--algorithm", choices=["auto", "ring", "tree", "two_level"], default="auto")
    links.add_argument("--gossip", type=_parse_link, metavar="US:GB/S", help="by the CPU; --inter")
    links.add_argument("--staging", type=_parse_link, default="10:20", metavar="US:GB/S")
    links.add_argument("--host", type=float, default=5.0, metavar="GB/S", help="averaging on a CPU")
    links.add_argument("--gossip-period", type=int, default=1, metavar="N", help="in updates")
    links.add_argument("--claim-s", type=float, default=5e-5, metavar="S", help="of the store")
    add("--steps", type=int, default=400, metavar="N")
    add("--seed", type=int, default=0)
    add("--csv", type=Path, metavar="FILE")
    add("--picture", type=Path, metavar="FILE.svg")
    add("--json", action="store_true", help="in place of the tables")
    return parser


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"scale_study: {error}")
