"""How utterances become micro-batches: one planner for each value of ``data.strategy``.

``packed`` fills static shapes. The others are the batches of other toolkits, made by lhotse's
samplers from lengths alone, to measure and to train against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from effasr.data.batch import StaticShape
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel
from effasr.data.sampling.packing import EpochEnd, plan_epoch
from effasr.data.sampling.plan import EpochPlan, Planner, UtteranceLengths
from effasr.data.sampling.population import Population, PopulationPlanner

Strategy = Literal["packed", "random", "bucketed", "sync_bucketed", "sync_bucketed_2d"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOptions:
    """What the strategies other than ``packed`` leave open.

    Attributes:
        batch_duration: Seconds of a micro-batch, padding included; by default what the frame
            budget holds.
        batch_size: Utterances of a micro-batch, in place of a duration.
        buckets: Buckets by duration, each with about the same total duration.
        table: Buckets and batch sizes of ``sync_bucketed_2d``; by default derived from the
            budgets.
        padded: Whether a micro-batch is computed at the length of its longest utterance, which
            is what padding then counts.
    """

    batch_duration: float | None = None
    batch_size: int | None = None
    buckets: int = 20
    table: BucketTable | None = None
    padded: bool = False

    def check(self, strategy: str) -> None:
        """Check that a strategy can obey these options.

        Raises:
            ValueError: The strategy is unknown, a value is out of range, or an option has no
                meaning for the strategy.
        """
        if strategy not in STRATEGIES:
            raise ValueError(
                f"`strategy` must be one of {', '.join(STRATEGIES)}, but is {strategy!r}."
            )
        for name in ("batch_duration", "batch_size"):
            value = getattr(self, name)
            if value is None:
                continue
            if strategy == "packed":
                raise ValueError(
                    f"`{name}` must be left out for strategy packed, whose micro-batches "
                    f"`frame_budget` and `token_budget` fill, but is {value}."
                )
            if not value > 0:
                raise ValueError(
                    f"`{name}` must be greater than 0, but is {value}: leave it out to derive it "
                    "from `frame_budget`."
                )
        if self.batch_duration is not None and self.batch_size is not None:
            raise ValueError(
                f"`batch_size` must be left out where `batch_duration` is given, but they are "
                f"{self.batch_size} and {self.batch_duration}."
            )
        if self.buckets < 2:
            raise ValueError(
                f"`buckets` must be at least 2, but is {self.buckets}: strategy random is one "
                "bucket for all."
            )
        if self.padded and strategy == "packed":
            raise ValueError(
                "`padded` must be false for strategy packed, which exists to avoid padding: "
                "choose another `strategy`."
            )
        self._check_table(strategy)

    def _check_table(self, strategy: str) -> None:
        if self.table is not None and strategy != "sync_bucketed_2d":
            raise ValueError(
                "`bucket_batch_sizes` must be left out but for strategy sync_bucketed_2d, and "
                f"`strategy` is {strategy!r}."
            )
        if strategy != "sync_bucketed_2d":
            return
        if self.batch_size is not None:
            raise ValueError(
                "`batch_size` must be left out for strategy sync_bucketed_2d, whose buckets have "
                f"a batch size each, but is {self.batch_size}: give `batch_duration` or "
                "`bucket_batch_sizes`."
            )
        if self.table is not None and self.batch_duration is not None:
            raise ValueError(
                "`batch_duration` must be left out where `bucket_batch_sizes` gives the batch "
                f"sizes, but is {self.batch_duration}."
            )


def planner(
    strategy: str,
    lengths: UtteranceLengths,
    *,
    shape: StaticShape,
    micro_batches: int,
    world_size: int = 1,
    seed: int = 0,
    options: StrategyOptions | None = None,
    population: Population | None = None,
    cost: CostModel = CANARY_180M_FLASH,
    epoch_end: EpochEnd | None = None,
) -> Planner:
    """Make the planner of a strategy.

    Micro-batch number m of a global step belongs to rank m modulo ``world_size``. Plans of
    ``packed`` do not depend on the number of ranks; those of lhotse's samplers do.

    Args:
        strategy: One of `STRATEGIES`.
        lengths: Frames and tokens of the utterances.
        shape: Budgets of a micro-batch: what ``packed`` fills, and what the others' batch sizes
            are derived from.
        micro_batches: Micro-batches of a global step, over all ranks.
        world_size: Number of ranks; anything but ``packed`` gives each as many micro-batches.
        seed: Seed of the run.
        options: Of the strategies other than ``packed``.
        population: The utterances of an epoch, with repetitions; by default every one once.
        cost: By what ``packed`` balances the ranks.
        epoch_end: Of ``packed``; see `plan_epoch`.

    Raises:
        ValueError: An argument is out of range, does not suit the strategy, or an utterance fits
            in no micro-batch.
    """
    options = options or StrategyOptions()
    options.check(strategy)
    for name, value in (("micro_batches", micro_batches), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}.")
    if strategy == "packed":
        return PackedPlanner(lengths, shape, micro_batches, seed, population, cost, epoch_end)
    if micro_batches % world_size:
        lower = micro_batches // world_size * world_size
        nearest = " or ".join(str(n) for n in (lower, lower + world_size) if n)
        raise ValueError(
            f"`micro_batches` must be a multiple of the number of ranks, {world_size}, for "
            f"strategy {strategy}, but is {micro_batches}: use {nearest}, or strategy packed."
        )
    # Here, so that a configuration does not need lhotse.
    from effasr.data.sampling.lhotse_samplers import LhotsePlanner

    make = partial(
        LhotsePlanner,
        strategy,
        shape=shape,
        micro_batches=micro_batches,
        world_size=world_size,
        seed=seed,
        batch_duration=options.batch_duration,
        batch_size=options.batch_size,
        num_buckets=options.buckets,
        table=options.table,
        padded=options.padded,
    )
    return make(lengths) if population is None else PopulationPlanner(make, lengths, population)


@dataclass(frozen=True, slots=True)
class PackedPlanner:
    """The planner of ``packed``; see `plan_epoch`."""

    lengths: UtteranceLengths
    shape: StaticShape
    micro_batches: int
    seed: int
    population: Population | None = None
    cost: CostModel = CANARY_180M_FLASH
    epoch_end: EpochEnd | None = None

    @property
    def buckets(self) -> None:
        """It has none."""
        return None

    def plan(self, epoch: int) -> EpochPlan:
        """Plan an epoch.

        Raises:
            ValueError: See `plan_epoch`.
        """
        return plan_epoch(
            self.lengths,
            shape=self.shape,
            micro_batches=self.micro_batches,
            seed=self.seed,
            epoch=epoch,
            population=None if self.population is None else self.population(epoch),
            cost=self.cost,
            epoch_end=self.epoch_end,
        )
