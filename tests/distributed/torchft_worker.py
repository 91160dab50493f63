"""What each replica does in test_torchft.py: torchft_worker.py NAME FOLDER."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.distributed.process_group import World
from effasr.distributed.torchft import Replicas
from effasr.model.asr import ASRModel
from effasr.optim.adamw import OptimizerConfig
from effasr.training import build
from effasr.training.step import Trainee, train_step
from tests.training.conftest import VOCABULARY
from tests.training.scaling_workers import quiet_config, uneven_batch

ALONE = World(0, 1, torch.device("cpu"))
MICRO_BATCHES = 4
MOST_STEPS = 400


def make(seed: int) -> tuple[ASRModel, Trainee]:
    config = replace(quiet_config(OptimizerConfig(lr=1e-2, eps=1e-4)), seed=seed)
    model = build.build_model(config, VOCABULARY, None, ALONE.device)
    return model, build.build_trainee(config, model, ALONE)


def make_step(trainee: Trainee, world: World, step: int) -> bool:
    """This replica's part of a step; whether the update was made."""
    batches = [uneven_batch(MICRO_BATCHES * step + n) for n in range(MICRO_BATCHES)]
    own = batches[world.rank :: world.size]
    return bool(train_step(replace(trainee, world=world), own, step).values.read()[6])


def weights(model: ASRModel) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def main(name: str, folder: Path) -> None:
    # The last one is to be given the weights of the others.
    model, trainee = make(1 if name == "late" else 0)
    optimizer = trainee.optimizer

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    replicas = Replicas(ALONE.device, state, restore, timeout_s=20, name=name)
    trainee = replace(trainee, model=replicas.replicate(model), commit=replicas.commit)
    end, shared, failed = folder / "end", 0, False
    while replicas.step < (int(end.read_text()) if end.exists() else MOST_STEPS):
        world, step = replicas.begin(), replicas.step
        shared += world.size == 2
        if name == "dies" and shared == 3:
            # The other waits for its counts.
            os._exit(9)
        if name == "first" and failed and world.size == 2 and not end.exists():
            # The other takes part in this step, and so sees it after that.
            end.write_text(str(step + 3))
        made = make_step(trainee, world, step)
        failed |= not made
        sys.stdout.write(f"step {step} of {world.size}: {'made' if made else 'failed'}\n")
        sys.stdout.flush()
        # So that others can come in the meantime.
        time.sleep(0.1)
    torch.save(weights(model), folder / name)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
