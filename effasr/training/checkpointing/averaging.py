"""The average of several checkpoints of a run."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from effasr.checkpoint import (
    CheckpointError,
    LoadedModel,
    load_model,
    load_while_pruned,
    read_description,
    resolve,
)
from effasr.checks import check


def load_run(
    run: Path,
    averaged: int | None,
    device: torch.device | str = "cpu",
    progress: Callable[..., AbstractContextManager[object]] = lambda *_: nullcontext(),
) -> tuple[LoadedModel, list[Path]]:
    """Load the best checkpoint of a run, or the average of its last ones; and return which.

    Reading happens within ``progress(*checkpoints)``.
    """

    def list_checkpoints() -> list[Path]:
        return [resolve(run)] if averaged is None else newest_checkpoints(run, averaged)

    def load(checkpoints: list[Path]) -> tuple[LoadedModel, list[Path]]:
        with progress(*checkpoints):
            return average(checkpoints, device), checkpoints

    return load_while_pruned(list_checkpoints, load)


def newest_checkpoints(run: Path, count: int) -> list[Path]:
    """Return the last ``count`` checkpoints of a run, or of a folder, the newest first."""
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    found = sorted((path for path in folder.glob("step_*") if path.is_dir()), reverse=True)
    if not found:
        raise ValueError(
            f"`--averaged` must have a run with checkpoints, but {run} has none: give runs/NAME."
        )
    rule = f"be from 1 to {len(found)}, the checkpoints that {run} has"
    remedy = "train with a higher `training.keep` to have more"
    check(1 <= count <= len(found), "--averaged", rule, count, remedy)
    return found[:count]


def average(checkpoints: list[Path], device: torch.device | str = "cpu") -> LoadedModel:
    """Return a model with the mean of weights and batch-norm statistics of model directories.

    Sums are float64. Integers, tokenizer and prompt are those of the first checkpoint, which is
    returned as it is if it is the only one.
    """
    if len(checkpoints) == 1:
        return load_model(checkpoints[0], device)
    first = load_model(checkpoints[0])
    model, state = first.model, first.model.state_dict()
    sums = {
        name: value.to(torch.float64)
        for name, value in state.items()
        if value.dtype.is_floating_point
    }
    for path in checkpoints[1:]:
        if read_description(path).model != model.config:
            raise CheckpointError(
                f"{path} must be of the architecture of {checkpoints[0]}, but is of another: "
                "average checkpoints of one training only."
            )
        _add(sums, load_model(path).model.state_dict())
    for name, value in sums.items():
        state[name].copy_(value / len(checkpoints))
    return LoadedModel(model.to(device), first.tokenizer, first.prompt)


def _add(sums: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for name, value in sums.items():
        value += state[name]
