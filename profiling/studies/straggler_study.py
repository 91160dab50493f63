"""Training with one slow node, measured: effasr's own trainer in several processes of this machine.

    python profiling/studies/straggler_study.py --csv FILE.csv [--picture FILE.svg]
    python profiling/studies/straggler_study.py --netns 200 --strategies ddp --slowdowns 1
        --csv FILE.csv
    python profiling/studies/straggler_study.py --table FILE.csv

Nodes are groups of processes that talk by gloo. The forward of a micro-batch lasts --base-s
seconds, most of which is sleep, and a slow node's so many times as long: so a few cores stand for
many. All else is real: the corpus, the loader, the steps, the strategies. Throughput is counted
from the end of a step to the end of another, in a window of --seconds that begins when all ranks
are at work.

Loss is the cross-entropy on held-out recordings of the mean of all learners, from weights that the
processes write about every second. Time begins when all ranks have begun their first step. At equal
time and at equal samples mean: where the strategy ended that had the least of it, among those of
the same slowdown and seed. Consensus distance is the root mean square distance of the learners from
their mean, over its norm, on average over the window. The second node is the slow one. Staleness
is that of metrics.jsonl, where a strategy has it.

With --netns, every node is a network namespace whose link sends and receives at a limited rate; it
needs root, and is skipped with a reason elsewhere.
"""

from __future__ import annotations

import argparse
import csv
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows as table_file
from scale.strategies import Strategy
from straggler import network
from straggler.corpus import config, write_corpus
from straggler.launch import train
from straggler.outcome import Outcome, at_samples, at_time, outcome
from straggler.settings import Settings

from effasr import config as configuration
from effasr.data.atomic_files import write_atomically
from effasr.planning.picture import Panel, draw
from effasr.training.config import TrainConfig

STRATEGIES = ("ddp", "local_sgd:8", "h_adpsgd:2")
SLOWDOWNS = (1.0, 2.0, 5.0, 10.0)
COLUMNS = (
    *("strategy", "slowdown", "seed", "rate_mbit", "nodes", "per_node", "base_s", "seconds"),
    *("micro_batch", "parameters", "samples_per_s", "samples", "loss_at_time", "loss_at_samples"),
    *("equal_time_s", "equal_samples", "consensus", "staleness"),
    "node_steps",
)
"""Columns of the CSV file."""
_TOLD_S = 1.0


def override(given: TrainConfig, strategy: Strategy) -> TrainConfig:
    """Return the run with a strategy, from its first step on.

    Raises:
        ValueError: This version does not know the strategy, or it cannot be compared.
    """
    if strategy.name == "fsdp2":
        raise ValueError(
            "`strategies` must not be fsdp2: no rank has whole weights to be evaluated."
        )
    mapping = configuration.to_mapping(given)
    loop = mapping["training"] | {"strategy": strategy.name}
    own: dict[str, Any] = {}
    if strategy.periods:
        own = {"warmup_steps": 0}
        if strategy.name == "local_sgd":
            own["period"] = next(iter(strategy.periods))
        else:
            own["periods"] = strategy.periods
        loop[strategy.name] = loop[strategy.name] | own
    elif strategy.name == "delayed":
        loop["delayed"] = loop["delayed"] | {"warmup_steps": 0}
    elif not strategy.waits:
        loop["gossip"] = loop.get("gossip", {}) | {"learner_size": strategy.learner_size}
    return configuration.from_mapping(TrainConfig, mapping | {"training": loop})


def measure(
    strategy: Strategy, slowdown: float, seed: int, corpus: Path, given: argparse.Namespace
) -> Outcome:
    """Train once.

    Raises:
        RuntimeError: A process failed.
    """
    ranks = given.nodes * given.per_node
    with tempfile.TemporaryDirectory(prefix="straggler-") as name:
        folder = Path(name)
        run = override(config(corpus, folder, "run", seed, ranks), strategy)
        recipe = folder / "recipe.yaml"
        recipe.write_text(configuration.dump(run))
        settings = Settings(
            recipe=str(recipe),
            folder=name,
            nodes=given.nodes,
            per_node=given.per_node,
            base_s=given.base_s,
            factors=tuple(slowdown if node == 1 else 1.0 for node in range(given.nodes)),
            in_step=strategy.waits,
            every_s=_TOLD_S,
        )
        if given.netns is None:
            window = train(settings, network.plain(given.nodes), given.seconds)
        else:
            with network.limited(given.nodes, given.netns) as limited:
                window = train(settings, limited, given.seconds)
        return outcome(settings, run, window)


def compare(
    slowdown: float, seed: int, corpus: Path, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Train with each strategy; returns a row for each."""
    found = {}
    for text in given.strategies:
        found[text] = measure(Strategy.parse(text), slowdown, seed, corpus, given)
        one = found[text]
        sys.stderr.write(
            f"{text}, one node {slowdown:g} x slower, seed {seed}: {one.samples_per_s:.1f} "
            f"samples / s, steps of nodes {one.node_steps}\n"
        )
    last = [one.points[-1] for one in found.values()]
    fewest = min(point.samples for point in last)
    first = min(point.seconds for point in last)
    rows = []
    for text, one in found.items():
        rows.append(
            {
                "strategy": text,
                "slowdown": f"{slowdown:g}",
                "seed": seed,
                "rate_mbit": "" if given.netns is None else f"{given.netns:g}",
                "nodes": given.nodes,
                "per_node": given.per_node,
                "base_s": given.base_s,
                "seconds": given.seconds,
                "micro_batch": round(one.micro_batch, 4),
                "parameters": one.parameters,
                "samples_per_s": round(one.samples_per_s, 3),
                "samples": one.points[-1].samples,
                "loss_at_time": _rounded(at_time(one.points, first)),
                "loss_at_samples": _rounded(at_samples(one.points, fewest)),
                "equal_time_s": round(first, 2),
                "equal_samples": fewest,
                "consensus": _rounded(one.consensus),
                "staleness": _rounded(one.staleness),
                "node_steps": " ".join(map(str, one.node_steps)),
            }
        )
    return rows


def _rounded(value: float | None) -> object:
    return "" if value is None else float(f"{value:.5g}")


def groups(rows: Sequence[dict[str, str]]) -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """Return the rows that are alike but for their seed, by strategy, slowdown and rate."""
    found: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault((row["rate_mbit"], row["slowdown"], row["strategy"]), []).append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], float(item[0][1]))))


def mean(rows: Sequence[dict[str, str]], name: str) -> float | None:
    """Return the mean over the rows that have the figure."""
    values = [float(row[name]) for row in rows if row[name] != ""]
    return statistics.mean(values) if values else None


def kept(rows: Sequence[dict[str, str]]) -> dict[tuple[str, str, str], float]:
    """Throughput over that of the same strategy without slow node, where that was measured."""
    means = {key: mean(found, "samples_per_s") or 0.0 for key, found in groups(rows).items()}
    return {
        key: value / means[whole]
        for key, value in means.items()
        if means.get(whole := (key[0], "1", key[2]))
    }


def table(rows: Sequence[dict[str, str]]) -> str:
    """Markdown, means over seeds."""
    shares = kept(rows)
    lines = [
        "| one node slower | strategy | samples / s (of even nodes %) | loss at equal time | "
        "loss at equal samples | consensus distance | staleness | steps of the nodes | seeds |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for key, found in groups(rows).items():
        rate, slowdown, strategy = key
        share = f" ({100 * shares[key]:.0f})" if key in shares else ""
        names = ("loss_at_time", "loss_at_samples", "consensus", "staleness")
        cells = [_cell(mean(found, name)) for name in names]
        steps = [list(map(int, row["node_steps"].split())) for row in found]
        shown = " ".join(f"{statistics.mean(column):.0f}" for column in zip(*steps, strict=True))
        where = f"{slowdown} x" + (f", {rate} Mbit/s" if rate else "")
        lines.append(
            f"| {where} | {strategy} | {mean(found, 'samples_per_s'):.1f}{share} | "
            f"{' | '.join(cells)} | {shown} | {len(found)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def write_picture(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Throughput, and loss at equal time and samples, by slowdown and strategy."""
    found = groups(rows)
    columns = [
        ("samples / s", "samples_per_s", ".1f"),
        ("loss, equal time", "loss_at_time", ".2f"),
        ("loss, equal samples", "loss_at_samples", ".2f"),
    ]
    panels = []
    for title, name, form in columns:
        values = [mean(group, name) for group in found.values()]
        labels = ["-" if value is None else format(value, form) for value in values]
        panels.append(Panel(title, [value or 0.0 for value in values], labels))
    some = rows[0]
    headings = [
        ("all nodes alike" if slowdown == "1" else f"one node {slowdown} x slower")
        + (f", {rate} Mbit/s a node" if rate else "")
        for rate, slowdown, _ in found
    ]
    picture = draw(
        [strategy for _, _, strategy in found],
        panels,
        title="Training with a slow node",
        subtitle=f"{some['nodes']} nodes of {some['per_node']} processes, {some['base_s']} s a "
        "step, mostly sleep",
        groups=headings,
    )
    write_atomically(path, picture.encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then print the table; returns the exit code."""
    given = _parser().parse_args(arguments)
    if given.netns is not None and (reason := network.why_not()) is not None:
        sys.stdout.write(f"straggler_study: --netns is skipped: {reason}\n")
        return 0
    rows: list[dict[str, str]] = []
    if given.table is not None:
        with given.table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            raise ValueError(f"{given.table}: holds no run.")
    else:
        _check(given)
        with tempfile.TemporaryDirectory(prefix="straggler-") as name:
            corpus = Path(name)
            write_corpus(corpus, given.utterances)
            for seed in range(given.seeds):
                for slowdown in given.slowdowns:
                    for row in compare(slowdown, seed, corpus, given):
                        rows.append({key: str(value) for key, value in row.items()})
                        if given.csv is not None:
                            table_file.append(given.csv, COLUMNS, row)
    sys.stdout.write(table(rows))
    if given.picture is not None:
        write_picture(given.picture, rows)
    return 0


def _check(given: argparse.Namespace) -> None:
    """Refuse before hours are spent.

    Raises:
        ValueError: A strategy cannot be run, or a number makes no sense.
    """
    if given.nodes < 2:
        raise ValueError(f"`nodes` must be at least 2, but is {given.nodes}: one of them is slow.")
    for name in ("per_node", "seeds"):
        if getattr(given, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {getattr(given, name)}.")
    for name in ("base_s", "seconds"):
        if not getattr(given, name) > 0:
            raise ValueError(f"`{name}` must be positive, but is {getattr(given, name)}.")
    if given.utterances < 10 * given.nodes * given.per_node:
        raise ValueError(
            f"`utterances` must be at least 10 for each process, but are {given.utterances}: a "
            "step takes about 6 each."
        )
    if min(given.slowdowns) < 1:
        raise ValueError(f"`slowdowns` must be at least 1, but one is {min(given.slowdowns):g}.")
    run = config(Path(), Path(), "run", 0, given.nodes * given.per_node)
    run = replace(run, data=replace(run.data, train="train.jsonl"))
    for text in given.strategies:
        override(run, Strategy.parse(text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--strategies", nargs="+", default=list(STRATEGIES), metavar="NAME[:SETTINGS]")
    add("--slowdowns", nargs="+", type=float, default=list(SLOWDOWNS), metavar="FACTOR")
    add("--seeds", type=int, default=3, metavar="N")
    add("--nodes", type=int, default=4, metavar="N")
    add("--per-node", type=int, default=2, metavar="N", help="processes")
    add("--base-s", type=float, default=0.4, metavar="S", help="of a forward")
    add("--seconds", type=float, default=18.0, metavar="S", help="of the window")
    add("--utterances", type=int, default=480, metavar="N", help="of the corpus, a second each")
    add("--netns", type=float, metavar="MBIT", help="a namespace a node, each link so fast")
    add("--csv", type=Path, metavar="FILE", help="to append to, after each comparison")
    add("--table", type=Path, metavar="FILE.csv", help="of a file, in place of measuring")
    add("--picture", type=Path, metavar="FILE.svg")
    return parser


if __name__ == "__main__":
    # Processes and namespaces are taken down on the way out, whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"straggler_study: {error}")
