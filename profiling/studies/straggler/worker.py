"""One process of a run: effasr's trainer, on a machine with a configured slowdown.

The forward of each micro-batch lasts a given time, most of which it sleeps; the rest of the step is
as it is. After a step the process notes the time and its utterances, and now and then its weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

# A script finds its own folder, but not the one that its package is in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from effasr import config
from effasr.data.batch import Batch
from effasr.training import trainer
from effasr.training.config import TrainConfig
from effasr.training.step import TrainState
from straggler.settings import ENVIRONMENT, Settings


class Slowed:
    """Replaces `effasr.training.step.train_step` by a slower one.

    Args:
        train_step: The original function.
        settings: Settings of the run.
        rank: Rank of this process.
    """

    def __init__(self, train_step: Callable[..., Any], settings: Settings, rank: int) -> None:
        self._train_step = train_step
        self._settings = settings
        self._rank = rank
        self._seconds = settings.base_s * settings.factors[rank // settings.per_node]
        self._began = 0.0
        self._hooked = False
        self._steps = 0
        self._told = -1
        self._log = settings.log(rank).open("w", buffering=1)

    def __call__(
        self,
        train_state: TrainState,
        micro_batches: Sequence[Batch],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Make a step, and note it."""
        if not self._hooked:
            train_state.model.register_forward_pre_hook(self._begin)
            train_state.model.register_forward_hook(self._end)
            self._hooked = True
        began = time.monotonic()
        report = self._train_step(train_state, micro_batches, *arguments, **options)
        self._steps += 1
        line = {
            "began": began,
            "time": time.monotonic(),
            "samples": sum(len(batch.ids) for batch in micro_batches),
            "micro_batches": len(micro_batches),
        }
        self._log.write(json.dumps(line) + "\n")
        self._tell(train_state, line["time"])
        return report

    def _begin(self, module: torch.nn.Module, inputs: object) -> None:
        del module, inputs
        self._began = time.monotonic()

    def _end(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        del inputs, output
        if module.training and torch.is_grad_enabled():
            time.sleep(max(0.0, self._began + self._seconds - time.monotonic()))

    def _tell(self, train_state: TrainState, now: float) -> None:
        """Write the weights, at the same steps as all others, or every so many seconds."""
        settings = self._settings
        if settings.in_step:
            number, rest = divmod(self._steps, settings.steps_between)
            due = not rest
        else:
            number = int(now / settings.every_s)
            due = number != self._told
        if not due:
            return
        self._told = number
        state = train_state.model.state_dict().values()
        flat = [value.detach().reshape(-1).float().numpy() for value in state]
        path = settings.weights(self._rank, number)
        # The parent may look at any time, also if this process is killed.
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, np.concatenate([np.array([now, self._steps]), *flat]))
        partial.replace(path)


def main() -> int:
    """Train until a signal says stop."""
    settings = Settings.read(Path(os.environ[ENVIRONMENT]))
    slowed = Slowed(trainer.train_step, settings, int(os.environ["RANK"]))
    trainer.train_step = slowed  # type: ignore[assignment]
    return trainer.run(config.load(TrainConfig, settings.recipe))


if __name__ == "__main__":
    sys.exit(main())
