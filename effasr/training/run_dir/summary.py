"""What a run says about its batches before the first of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from effasr.data.batch import StaticShape
from effasr.data.config import DataConfig
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths

if TYPE_CHECKING:
    from effasr.training.trainer import Trainer


def describe_batches(
    plan: EpochPlan, shape: StaticShape | None, lengths: UtteranceLengths, config: DataConfig
) -> str:
    """One line about the micro-batches of an epoch.

    Args:
        plan: Of the epoch.
        shape: Of every batch; None where each has its own.
        lengths: Of the utterances.
        config: Strategy and padding.
    """
    begin = f"{plan.micro_batches} micro-batches a step, "
    paddings = (
        f"frames ({100 * plan.padding_frames:.1f} % padding)",
        f"tokens ({100 * plan.padding_tokens:.1f} %)",
    )
    if shape is not None:
        budgets = shape.frame_budget, shape.token_budget
        return f"{begin}each {budgets[0]} {paddings[0]} and {budgets[1]} {paddings[1]}"
    count = len(plan.offsets) - 1
    frames, tokens = (
        round(int(values[plan.indices].sum()) / count)
        for values in (lengths.frames, lengths.tokens)
    )
    return (
        f"{begin}{config.strategy}{', padded' if config.padded else ''}, each on average "
        f"{len(plan.indices) / count:.1f} utterances with {frames} {paddings[0]} and {tokens} "
        f"{paddings[1]}"
    )


def summarise(trainer: Trainer) -> Iterator[str]:
    """What is trained on what: the first lines that a run shows."""
    plan = trainer.loader.plan(trainer.position[0])
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    of_these = f" ({trained / 1e6:.2f} M trained)" if trained < parameters else ""
    yield (
        f"{len(trainer.corpus)} utterances, {trainer.corpus.seconds / 3600:.2f} h, "
        f"{parameters / 1e6:.2f} M parameters{of_these}, "
        f"{trainer.world.size} x {trainer.world.device}"
    )
    if (learners := trainer.learners) is not None:
        yield (
            f"{learners.count} learners of {learners.own.size} processes each, which average their "
            "weights in the background"
        )
    yield describe_batches(plan, trainer.loader.shape, trainer.corpus.lengths, trainer.config.data)
    speeds = trainer.config.data.speed_perturbation
    if speeds != (1.0,):
        yield f"each utterance at the speeds {', '.join(map(str, speeds))}, as one of its own"
    if augmentation := trainer.loader.augmentation:
        yield f"of the utterances, {augmentation}"
    if (text := trainer.corpus.text) is not None:
        yield (
            f"and {trainer.config.data.text_micro_batches} of text alone, each "
            f"{text.shape.frame_budget} tokens to read and {text.shape.token_budget} to write, "
            f"from {len(text)} pairs"
        )
    text_plan = trainer.loader.text_plan(trainer.position[0])
    for summary in trainer.corpus.summaries(plan, text_plan):
        yield from summary.table()
    if trainer.corpus.dropped:
        reasons = Counter(dropped.reason for dropped in trainer.corpus.dropped)
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        yield (
            f"dropped {len(trainer.corpus.dropped)} utterances ({listed}), each listed in "
            f"{trainer.directory.path / 'dropped.jsonl'}"
        )
