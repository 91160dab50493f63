"""What a run says about its batches before the first of them."""

from __future__ import annotations

from effasr.data.batch import StaticShape
from effasr.data.config import DataConfig
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths


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
