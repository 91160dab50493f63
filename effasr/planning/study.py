"""Compares batching strategies on the same utterances."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.mixture_summary import MixtureSummary
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.cost import CostModel
from effasr.data.sampling.options import StrategyOptions
from effasr.data.sampling.packing import EpochEnd
from effasr.data.sampling.plan import EpochPlan
from effasr.data.sampling.report import PlanReport, measure
from effasr.data.sampling.strategies import planner
from effasr.planning.selection import Selection

LADDER = ("random", "bucketed", "sync_bucketed", "sync_bucketed_2d", "packed")
"""All strategies, in the order of decreasing padding."""

_BY_SIZE = ("random", "bucketed", "sync_bucketed")
"""Strategies that accept a number of utterances instead of a duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """Options of the plans.

    Attributes:
        world_size: Number of ranks.
        micro_batches: Micro-batches of a global step, over all ranks; by default one per rank.
        seed: Seed of the plans.
        epochs: Number of epochs to plan.
        epoch_end: End of an epoch with packed; see `effasr.data.sampling.packing.plan_epoch`.
        batch_duration: Seconds of a micro-batch of all strategies but packed, with padding; by
            default derived from the frame budget.
        batch_size: Utterances of a micro-batch of random, bucketed or sync_bucketed, instead.
        buckets: Number of duration buckets, for the strategies that have them.
        table: Buckets and batch sizes of sync_bucketed_2d; by default derived from the budgets.
    """

    world_size: int = 8
    micro_batches: int | None = None
    seed: int = 0
    epochs: int = 1
    epoch_end: EpochEnd | None = None
    batch_duration: float | None = None
    batch_size: int | None = None
    buckets: int = 20
    table: BucketTable | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "micro_batches", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value}.")

    @property
    def of_step(self) -> int:
        """Number of micro-batches of a global step."""
        return self.micro_batches or self.world_size


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a strategy.

    Attributes:
        strategy: Name of the strategy.
        report: Figures of its plans.
        seconds: Time to plan, in seconds.
    """

    strategy: str
    report: PlanReport
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return a flat mapping with the names of `PlanReport`."""
        return {"strategy": self.strategy, **asdict(self.report), "seconds": round(self.seconds, 3)}


def compare(
    selection: Selection,
    strategies: Sequence[str],
    cost: CostModel,
    options: StudyOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Plan the utterances by each strategy.

    All but ``packed`` are computed with padding, as in the toolkits they come from: every utterance
    at the length of the longest of its micro-batch.

    Args:
        selection: The utterances.
        strategies: Names of the strategies.
        cost: Cost model.
        options: Options of the plans.
        progress: Called with the number of strategies done so far, and of all.

    Raises:
        ValueError: A strategy is unknown, or cannot plan these utterances.
    """
    outcomes = []
    for done, strategy in enumerate(strategies):
        progress(done, len(strategies))
        outcomes.append(_outcome(selection, strategy, cost, options))
    return outcomes


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """Epochs planned by a strategy.

    Attributes:
        plans: One plan for each epoch.
        shape: The static shape of every micro-batch; None if they are padded.
        buckets: See `effasr.data.sampling.plan.Planner`.
    """

    plans: list[EpochPlan]
    shape: StaticShape | None
    buckets: np.ndarray | None


def plan_by(strategy: str, selection: Selection, cost: CostModel, options: StudyOptions) -> Planned:
    """Plan the utterances by one strategy.

    Raises:
        ValueError: See `compare`.
    """
    is_packed = strategy == "packed"
    made = planner(
        strategy,
        selection.lengths,
        shape=selection.shape,
        micro_batches=options.of_step,
        world_size=options.world_size,
        seed=options.seed,
        options=None if is_packed else _strategy_options(strategy, options),
        population=selection.populations(options.seed),
        cost=cost,
        epoch_end=options.epoch_end if is_packed else None,
    )
    plans = [made.plan(epoch) for epoch in range(options.epochs)]
    return Planned(plans, made.shape, made.buckets)


def summarise_mixture(selection: Selection, options: StudyOptions) -> MixtureSummary | None:
    """Return requested and planned shares of the sources; None without shares."""
    draw = selection.populations(options.seed)
    if draw is None or selection.mixture is None:
        return None
    indices = np.concatenate([draw(epoch) for epoch in range(options.epochs)])
    drawn = selection.mixture.count(selection.sources, selection.samples, indices)
    return selection.mixture.summary(drawn)


def _outcome(
    selection: Selection, strategy: str, cost: CostModel, options: StudyOptions
) -> Outcome:
    started = time.perf_counter()
    made = plan_by(strategy, selection, cost, options)
    seconds = time.perf_counter() - started
    report = measure(
        made.plans,
        selection.lengths,
        selection.seconds,
        cost=cost,
        world_size=options.world_size,
        shape=made.shape,
        buckets=made.buckets,
    )
    return Outcome(strategy, report, seconds)


def _strategy_options(strategy: str, options: StudyOptions) -> StrategyOptions:
    """Return the options that apply to the strategy."""
    by_size = strategy in _BY_SIZE and options.batch_size is not None
    table = options.table if strategy == "sync_bucketed_2d" else None
    return StrategyOptions(
        batch_duration=None if by_size or table else options.batch_duration,
        batch_size=options.batch_size if by_size else None,
        buckets=options.buckets,
        table=table,
        padded=True,
    )
