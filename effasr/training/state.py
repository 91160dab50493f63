"""What a checkpoint holds beside the weights to evaluate: all that decides how a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from effasr import config as configuration
from effasr.distributed.shard import state_like, whole_tree
from effasr.optim.adamw import restore as restore_optimizer
from effasr.training.parallel import load_trained, whole

if TYPE_CHECKING:
    from effasr.training.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """The state of a run between two steps; where weights are sharded, all ranks call it."""
    trainee, trained = trainer.trainee, None
    if trainee.average is not None:
        with whole(trainee, trainer.model):
            trained = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    epoch, step = trainer.position
    return {
        "step": trainer.step,
        "best": trainer.best,
        "is_best": trainer.is_best,
        "must_validate": trainer.must_validate,
        "config": configuration.to_mapping(trainer.config),
        "corpus": trainer.corpus.fingerprint,
        "epoch": trainer.epoch,
        "position": [epoch, step],
        "ranks": trainer.world.size,
        "plan": trainer.loader.fingerprint(epoch) if step else None,
        "optimizer": whole_tree(trainee.optimizer.state_dict(), torch.device("cpu")),
        "objective": trainee.objective.state_dict(),
        "meter": trainer.meter.state_dict(),
        "blend": trainer.drawn.state_dict(),
        "trained": trained,
        "adascale": trainee.adascale and trainee.adascale.state_dict(),
    }


def restore(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Go on from a `state_of`; the model has the weights to evaluate already."""
    trainee = trainer.trainee
    trainer.step = state["step"]
    trainer.best = state["best"]
    trainer.is_best = state["is_best"]
    trainer.must_validate = state["must_validate"] and trainer.validator is not None
    if trainer.is_best and trainer.world.is_main:
        # The run may have been killed between the checkpoint and its mark.
        trainer.checkpoints.mark_best(trainer.step)
    trainer.epoch = state["epoch"]
    trainer.position = tuple(state["position"])
    restore_optimizer(trainee.optimizer, state_like(state["optimizer"], trainee.optimizer))
    trainee.objective.load_state_dict(state["objective"])
    trainer.meter.load_state_dict(state["meter"])
    if "blend" in state:
        trainer.drawn.load_state_dict(state["blend"])
    if (adascale := trainee.adascale) is not None:
        if state.get("adascale") is not None:
            adascale.load_state_dict(state["adascale"])
        else:
            adascale.begin_at(trainer.step)
    if state["trained"] is not None:
        load_trained(trainee, trainer.model, state["trained"])
