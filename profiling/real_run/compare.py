"""Compares the files of two runs bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.checkpoint import load_model
from effasr.distributed.tensor_files import read_whole
from effasr.training.checkpointing.run_checkpoints import TENSORS
from effasr.training.run_dir.run_directory import METRICS, read_lines

MEASURED = {
    *("data_wait_s", "step_s", "mfu", "mfu_with_padding", "hfu", "useful_tflops"),
    *("peak_memory_bytes", "slowest_rank", "rank_wait_s"),
}
"""Fields of metrics.jsonl that differ from run to run."""


def state(run: Path, step: int) -> dict[str, Tensor]:
    """Weights, moments and averages of a checkpoint, on the host."""
    path = run / "checkpoints" / f"step_{step:08d}"
    return load_model(path).model.state_dict() | read_whole(path / TENSORS)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without what was measured."""
    lines = read_lines(run / METRICS)
    return [{name: line[name] for name in line.keys() - MEASURED} for line in lines]


def differing(one: Path, other: Path, step: int) -> list[str]:
    """Return the names of tensors in two runs' checkpoints that differ in any bit."""
    ours, theirs = state(one, step), state(other, step)
    names = sorted(ours.keys() | theirs.keys())
    same = lambda name: name in ours and name in theirs and torch.equal(ours[name], theirs[name])
    return [name for name in names if not same(name)]
