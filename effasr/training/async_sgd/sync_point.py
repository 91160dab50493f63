"""Where learners that train apart come together: see `effasr.training.async_sgd.learners`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import TYPE_CHECKING, Any, cast

from effasr.data.micro_batch_loader import StepBatch
from effasr.distributed.batch_norm import average
from effasr.distributed.process_group import World
from effasr.training.async_sgd.learners import Learners
from effasr.training.async_sgd.weight_averaging import Mixing
from effasr.training.config import LEARNING_APART, TrainConfig
from effasr.training.strategies import settle
from effasr.training.validation import Validator

if TYPE_CHECKING:
    from effasr.training.trainer import Trainer

log = logging.getLogger(__name__)


def form_learners(config: TrainConfig, world: World) -> Learners | None:
    """The learners of strategy adpsgd or h_adpsgd; None where all ranks make each step together.

    Raises:
        ValueError: The ranks cannot be shared out.
    """
    strategy, gossip = config.training.strategy, config.training.gossip
    if strategy not in LEARNING_APART or world.size == 1:
        return None
    size = gossip.learner_size
    if strategy == "adpsgd":
        size = 1
    elif size is None:
        size = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.size % size:
        raise ValueError(
            f"`training.gossip.learner_size` must divide the {world.size} processes, but is "
            f"{size}{'' if gossip.learner_size else ', those of this node'}: set it to the "
            "processes of each learner, or start as many on every node."
        )
    if world.size == size:
        log.warning(
            "training.strategy %s has a single learner here, of %d processes, and trains as ddp "
            "does: set training.gossip.learner_size to make learners smaller",
            strategy,
            size,
        )
        return None
    return Learners(world, size, gossip)


def steps_of(trainer: Trainer) -> AbstractContextManager[Iterator[StepBatch | None]]:
    """What this rank trains on, from where the run is; None where learners have met."""
    if trainer.learners is None:
        # A generator, whose end is that of the data workers.
        steps = trainer.loader.steps(*trainer.position)
        return closing(cast(Generator[StepBatch | None], steps))

    def goal(step: int) -> int:
        settings = trainer.config.training
        periods = [settings.checkpoint_every]
        if trainer.validator is not None:
            periods.append(settings.validate_every)
        ends = [settings.max_steps]
        if settings.stop_at is not None and settings.stop_at > step:
            ends.append(settings.stop_at)
        return min(*(step - step % period + period for period in periods), *ends)

    return _steps_apart(trainer, trainer.learners, goal)


@contextmanager
def _steps_apart(
    trainer: Trainer, learners: Learners, goal: Callable[[int], int]
) -> Iterator[Iterator[StepBatch | None]]:
    mixing, activity = _mixing(trainer), trainer.trainee.activity
    try:
        with learners.training(
            trainer.loader,
            trainer.step,
            trainer.position,
            goal,
            begin=mixing.start,
            note=activity.begin,
        ) as steps:
            yield steps
    except BaseException:
        mixing.abandon()
        raise


def meet(trainer: Trainer) -> None:
    """Make all learners alike that are left, and let the trainer be where they are together."""
    learners, mixing, world = trainer.learners, _mixing(trainer), trainer.world
    assert learners is not None
    mixing.drain()
    trainer.step, trainer.epoch, trainer.position = learners.step, learners.epoch, learners.position
    if learners.world is not world:
        _go_on_without_the_lost(trainer)
    settle(trainer.trainee)
    average(trainer.trainee.statistics, trainer.world)
    # Each has seen losses of its own; which of them decides does not matter, but all obey it.
    objective = trainer.trainee.objective
    state = {name: value.cpu() for name, value in objective.state_dict().items()}
    objective.load_state_dict(trainer.world.broadcast(state))
    left_out = trainer.world.gather(trainer.left_out)
    if trainer.world.is_main:
        for line in sorted((line for lines in left_out for line in lines), key=_step_of):
            trainer.directory.skipped(line)
    trainer.left_out.clear()
    trainer.meter.merge(trainer.world, counts=learners.own.is_main)
    if trainer.step == trainer.config.training.stop_at:
        learners.stopped = True


class Pace:
    """How fast learners are, for metrics.jsonl."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def line(self, trainer: Trainer, together: bool) -> dict[str, Any]:
        """What there is to say besides; only rank 0 says it.

        Speed since the last line; steps of each learner since the run was started; and where they
        have met, how far they were apart.
        """
        learners, mixing = trainer.learners, _mixing(trainer)
        assert learners is not None
        now, last = (trainer.step, time.perf_counter()), self._last
        self._last = now
        return {
            "plan_steps_per_s": None if last is None else (now[0] - last[0]) / (now[1] - last[1]),
            "learner_steps": learners.made_by_all(),
            **mixing.line(),
            **({"consensus_distance": mixing.distance} if together else {}),
        }


def _go_on_without_the_lost(trainer: Trainer) -> None:
    """Share out among the ranks that are left what all did."""
    assert trainer.learners is not None
    was_main, trainer.world = trainer.world.is_main, trainer.learners.world
    if trainer.validator is not None:
        trainer.validator = Validator(
            trainer.config, trainer.model, trainer.tokenizer, trainer.world
        )
    if trainer.world.is_main and not was_main:
        logging.getLogger("effasr").setLevel(logging.NOTSET)
        trainer.directory.lock(trainer.start, succeeds=True)
        trainer.display = trainer.open()
        trainer.display.say(
            f"rank 0 is lost: from step {trainer.step} on, another writes the files of the run"
        )


def _mixing(trainer: Trainer) -> Mixing:
    mixing = trainer.trainee.averager
    assert isinstance(mixing, Mixing)
    return mixing


def _step_of(line: dict[str, Any]) -> int:
    return line["step"]
