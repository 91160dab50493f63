"""Makes the planner of a batching strategy.

``packed`` fills static shapes. The other strategies produce the batches of other toolkits, made by
lhotse's samplers from lengths alone, for comparison and for training.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from effasr.checks import check
from effasr.data.batch import StaticShape
from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel
from effasr.data.sampling.options import StrategyOptions
from effasr.data.sampling.packing import EpochEnd, plan_epoch
from effasr.data.sampling.plan import EpochPlan, Planner, UtteranceLengths
from effasr.data.sampling.population import Population, PopulationPlanner


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
    """
    options = options or StrategyOptions()
    options.check(strategy)
    for name, value in (("micro_batches", micro_batches), ("world_size", world_size)):
        check(value >= 1, name, "be at least 1", value)
    if strategy == "packed":
        packed = {"micro_batches": micro_batches, "cost": cost, "epoch_end": epoch_end}
        return PackedPlanner(lengths, shape, population, packed | {"seed": seed})
    if micro_batches % world_size:
        lower = micro_batches // world_size * world_size
        nearest = " or ".join(str(n) for n in (lower, lower + world_size) if n)
        raise ValueError(
            f"`micro_batches` must be a multiple of the number of ranks, {world_size}, for "
            f"strategy {strategy}, but is {micro_batches}: use {nearest}, or strategy packed."
        )
    # Imported here so that a configuration does not need lhotse.
    from effasr.data.sampling.lhotse_samplers import LhotsePlanner

    make = partial(
        LhotsePlanner,
        strategy,
        shape=shape,
        micro_batches=micro_batches,
        world_size=world_size,
        seed=seed,
        options=options,
    )
    return make(lengths) if population is None else PopulationPlanner(make, lengths, population)


@dataclass(frozen=True, slots=True)
class PackedPlanner:
    """The planner of ``packed``; ``arguments`` are those of `plan_epoch`."""

    lengths: UtteranceLengths
    shape: StaticShape
    population: Population | None
    arguments: Mapping[str, Any]
    buckets: None = None

    def plan(self, epoch: int) -> EpochPlan:
        """Plan an epoch; see `plan_epoch`."""
        members = None if self.population is None else self.population(epoch)
        return plan_epoch(
            self.lengths, shape=self.shape, epoch=epoch, population=members, **self.arguments
        )
