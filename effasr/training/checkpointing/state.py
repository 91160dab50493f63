"""What a checkpoint holds beside the weights to evaluate: all that decides how a run goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effasr import config as configuration
from effasr.distributed import tensor_files
from effasr.optim.adamw import restore as restore_optimizer
from effasr.training.build import Saved
from effasr.training.checkpointing.run_checkpoints import TENSORS
from effasr.training.strategies import is_sharded

if TYPE_CHECKING:
    from effasr.training.trainer import Trainer


def state_of(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of a run between two steps.

    Returns:
        What is small, and the rest by name: moments, and the weights that are trained where others
        are published. Tensors are those in use, on their devices, sharded where the model is.
    """
    trainee, tensors = trainer.trainee, {}
    optimizer = trainee.optimizer.state_dict()
    counts: dict[int, dict[str, Any]] = {}
    for index, row in optimizer["state"].items():
        for name, value in row.items():
            if isinstance(value, Tensor) and value.dim():
                tensors[f"optimizer/{index}/{name}"] = value
            else:
                counts.setdefault(index, {})[name] = value
    if trainee.average is not None:
        tensors |= {f"trained/{name}": value for name, value in _parameters(trainer).items()}
    epoch, step = trainer.position
    state = {
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
        "optimizer": optimizer | {"state": counts},
        "objective": trainee.objective.state_dict(),
        "meter": trainer.meter.state_dict(),
        "blend": trainer.drawn.state_dict(),
        "adascale": trainee.adascale and trainee.adascale.state_dict(),
    }
    return state, tensors


def restore(trainer: Trainer, saved: Saved) -> None:
    """Go on from a checkpoint; the model has the weights to evaluate already."""
    trainee, state = trainer.trainee, saved.state
    trainer.step = state["step"]
    trainer.best = state["best"]
    trainer.is_best = state["is_best"]
    trainer.must_validate = state["must_validate"] and trainer.validator is not None
    if trainer.is_best and trainer.world.is_main:
        # The run may have been killed between the checkpoint and its mark.
        trainer.checkpoints.mark_best(trainer.step)
    trainer.epoch = state["epoch"]
    trainer.position = tuple(state["position"])
    _restore_tensors(trainer, saved)
    trainee.objective.load_state_dict(state["objective"])
    trainer.meter.load_state_dict(state["meter"])
    if "blend" in state:
        trainer.drawn.load_state_dict(state["blend"])
    if (adascale := trainee.adascale) is not None:
        if state.get("adascale") is not None:
            adascale.load_state_dict(state["adascale"])
        else:
            adascale.begin_at(trainer.step)


def _restore_tensors(trainer: Trainer, saved: Saved) -> None:
    """Read moments, and the weights that are trained in place of those to evaluate."""
    optimizer, folder = trainer.trainee.optimizer, saved.path / TENSORS
    state = saved.state["optimizer"]
    rows = {index: dict(row) for index, row in state["state"].items()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named, tensors = _parameters(trainer), {}
    for name, (shape, dtype) in tensor_files.describe(folder).items() if folder.is_dir() else ():
        kind, _, rest = name.partition("/")
        if kind == "trained":
            tensors[name] = named[rest].detach()
            continue
        index, _, moment = rest.partition("/")
        like = own[int(index)]
        if like.shape == shape:
            tensors[name] = torch.zeros_like(like, dtype=dtype)
        else:
            tensors[name] = torch.zeros(shape, dtype=dtype, device=like.device)
        rows.setdefault(int(index), {})[moment] = tensors[name]
    if tensors:
        tensor_files.read(tensors, folder)
    restore_optimizer(optimizer, state | {"state": rows})


def _parameters(trainer: Trainer) -> dict[str, Tensor]:
    """Those that are trained, whole or sharded, by the names of the checkpoints."""
    trainee = trainer.trainee
    model = trainee.model if is_sharded(trainee) else trainer.model
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
