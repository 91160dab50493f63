"""The packed planner: micro-batches that fill a frame budget and a token budget at once.

Utterances come in a random order. Each micro-batch takes the oldest that wait until little room
is left, and the last few are chosen from a pool of waiting ones so that frames and tokens run
out together. As the oldest is always taken first, none waits for long.
"""

from __future__ import annotations

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.filling import Aim, Queue
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.shuffle import shuffled

_COMPLETE = 98
"""A last step filled to less than this percentage of the steps before it is deferred."""


def plan_epoch(
    lengths: UtteranceLengths, *, shape: StaticShape, micro_batches: int, seed: int, epoch: int
) -> EpochPlan:
    """Plan an epoch; a pure function of its arguments.

    Every utterance is planned once or deferred. Deferred are those of an incomplete last step,
    a different random set in each epoch; an epoch without a full step keeps one partial step,
    in which micro-batches may be empty.

    Args:
        lengths: Frames and tokens of the utterances.
        shape: Budgets of a micro-batch.
        micro_batches: Micro-batches of a global step, over all ranks.
        seed: Seed of the run.
        epoch: Number of the epoch.

    Raises:
        ValueError: There is no utterance, ``micro_batches`` or ``epoch`` is too small, or an
            utterance alone exceeds a budget; these must be dropped before.
    """
    if micro_batches < 1:
        raise ValueError(f"`micro_batches` must be at least 1, but is {micro_batches}.")
    if epoch < 0:
        raise ValueError(f"`epoch` must be at least 0, but is {epoch}.")
    if not len(lengths):
        raise ValueError("`lengths` must hold at least one utterance, but is empty.")
    _check_fits(lengths.frames, shape.frame_budget, "frame_budget", "frames")
    _check_fits(lengths.tokens, shape.token_budget, "token_budget", "tokens")
    order = shuffled(len(lengths), seed, epoch)
    queue = Queue(lengths.frames[order], lengths.tokens[order], Aim.of(lengths, shape))
    members = []
    while queue.waiting:
        members.append(queue.next_micro_batch())
    return _assemble(lengths, shape, micro_batches, order, members)


def suggest_token_budget(lengths: UtteranceLengths, frame_budget: int) -> int:
    """The token budget that this corpus fills at the same time as the frame budget.

    It is raised, where need be, so that no more than one utterance in a thousand exceeds it.

    Raises:
        ValueError: The corpus has no frames.
    """
    frames = int(lengths.frames.sum(dtype=np.int64))
    if frames < 1:
        raise ValueError("`lengths` must hold at least one frame, but holds none.")
    tokens = int(lengths.tokens.sum(dtype=np.int64))
    rank = len(lengths) - 1 - len(lengths) // 1000
    return max(
        -(-frame_budget * tokens // frames), int(np.partition(lengths.tokens, rank)[rank]), 1
    )


def _check_fits(values: np.ndarray, budget: int, name: str, what: str) -> None:
    over = np.flatnonzero(values > budget)
    if over.size:
        shown = ", ".join(f"{index} ({values[index]})" for index in over[:5])
        raise ValueError(
            f"plan_epoch: every utterance must fit in `{name}` = {budget}, but {over.size} have "
            f"more {what}: {shown}{', ...' if over.size > 5 else ''}: drop them or raise the "
            "budget."
        )


def _assemble(
    lengths: UtteranceLengths,
    shape: StaticShape,
    micro_batches: int,
    order: np.ndarray,
    members: list[np.ndarray],
) -> EpochPlan:
    """Group micro-batches into steps and defer what is left."""
    sizes = np.array([len(places) for places in members])
    indices = order[np.concatenate(members)].astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    frames = np.add.reduceat(lengths.frames[indices].astype(np.int64), starts[:-1])
    tokens = np.add.reduceat(lengths.tokens[indices].astype(np.int64), starts[:-1])
    steps = _complete_steps(frames, tokens, shape, micro_batches)
    kept = min(max(1, steps) * micro_batches, len(members))
    planned = int(starts[kept])
    # The partial step of an epoch without a full one ends with empty micro-batches.
    offsets = np.full(max(1, steps) * micro_batches + 1, planned, dtype=np.int64)
    offsets[: kept + 1] = starts[: kept + 1]
    rows = len(offsets) - 1
    return EpochPlan(
        micro_batches=micro_batches,
        indices=indices[:planned],
        offsets=offsets,
        deferred=np.sort(indices[planned:]),
        padding_frames=1 - int(frames[:kept].sum()) / (rows * shape.frame_budget),
        padding_tokens=1 - int(tokens[:kept].sum()) / (rows * shape.token_budget),
    )


def _complete_steps(
    frames: np.ndarray, tokens: np.ndarray, shape: StaticShape, micro_batches: int
) -> int:
    """How many steps to keep: not the last ones where the pool had run too dry to fill them."""
    steps = len(frames) // micro_batches
    # In integers, so that every rank counts the same.
    fill = np.maximum(frames * shape.token_budget, tokens * shape.frame_budget)
    by_step = fill[: steps * micro_batches].reshape(steps, micro_batches).sum(axis=1).tolist()
    before = sum(by_step)
    while steps > 1:
        before -= by_step[steps - 1]
        if 100 * (steps - 1) * by_step[steps - 1] >= _COMPLETE * before:
            break
        steps -= 1
    return steps
