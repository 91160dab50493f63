"""The same global batch on more ranks than it has micro-batches: each of them is divided."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from effasr import config as configuration
from effasr.checks import check
from effasr.training.checkpointing.resume import Saved, must_stay
from effasr.training.config import TrainConfig

if TYPE_CHECKING:
    from effasr.training.corpus import TrainingCorpus

_BUDGETS = ("frame_budget", "token_budget", "max_sequences", "text_token_budget")


def requested(config: TrainConfig) -> dict[str, Any]:
    """Return the fields that a division changes."""
    return {name: getattr(config.data, name) for name in ("micro_batches", *_BUDGETS)}


def divide(config: TrainConfig, corpus: TrainingCorpus, ranks: int) -> tuple[TrainConfig, int, str]:
    """Return the configuration of this many ranks, the parts of a micro-batch, and a line.

    No part is smaller than the longest utterance: else the batch grows.
    """
    data = config.data
    parts = -(-ranks // data.micro_batches)
    if parts == 1:
        return config, 1, ""
    rule = f"be at least the number of ranks, {ranks}, with data.strategy {data.strategy}"
    remedy = f"set data.micro_batches={ranks}, and a smaller batch each, or start fewer ranks"
    check(data.strategy == "packed", "data.micro_batches", rule, data.micro_batches, remedy)
    text = corpus.text
    lengths = [corpus.lengths, *([] if text is None else [text.lengths])]
    longest = int(corpus.lengths.frames.max())
    tokens = max(int(each.tokens.max()) for each in lengths)
    least = {"frame_budget": longest, "token_budget": tokens, "text_token_budget": tokens}
    before = data.known_frame_budget
    # A budget of the corpus is what it fills with the frames.
    shares = {"token_budget": corpus.shape.token_budget} if text is not None else {}
    values = {
        name: max(-(-value // parts), least.get(name, 1))
        for name in _BUDGETS
        if (value := getattr(data, name) or shares.get(name)) not in (None, "auto")
    }
    count, budget = parts * data.micro_batches, values["frame_budget"]
    line = f"{ranks} ranks share {data.micro_batches} x {before} frames, as {count} x {budget}"
    growth = count * budget / (data.micro_batches * before)
    if budget == longest and growth > 1.02:
        lr = config.optimizer.lr
        line += (
            f": the longest utterance needs that many, and the batch is {growth:.1f} times as "
            f"large. optimizer.lr stays {lr:g}; by the square-root rule it would be "
            f"{lr * math.sqrt(growth):.2g}"
        )
    else:
        line += ": the batch is the same"
    return with_parts(config, values | {"micro_batches": count}, parts), parts, line


def with_parts(config: TrainConfig, values: dict[str, Any], parts: int) -> TrainConfig:
    """Return the configuration with values of ``data``, and what counts micro-batches with it."""
    reference, ema = (
        config.optimizer.lr_reference_micro_batches,
        config.training.ema_reference_micro_batches,
    )
    return replace(
        config,
        data=replace(config.data, **values),
        optimizer=replace(
            config.optimizer, lr_reference_micro_batches=reference and reference * parts
        ),
        training=replace(config.training, ema_reference_micro_batches=ema and ema * parts),
    )


def as_before(config: TrainConfig, saved: Saved | None) -> TrainConfig:
    """Return the configuration with the division of the checkpoint, on any number of ranks."""
    division = None if saved is None else saved.state.get("division")
    if saved is None or division is None:
        return config
    data = configuration.complete(TrainConfig, saved.state["config"])["data"]
    values = {name: data[name] for name in ("micro_batches", *_BUDGETS)}
    now, run = requested(config), configuration.to_mapping(config)
    if now == values:
        return config
    for name, before in division["requested"].items():
        if now[name] not in (before, "auto"):
            raise ValueError(must_stay(f"data.{name}", before, now[name], run))
    return with_parts(config, values, division["parts"])
