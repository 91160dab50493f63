"""Answers to a batch of conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from effasr.data.conversation.batch import ConversationBatch
from effasr.decoding.decoded import Decoded
from effasr.decoding.language_model.engine import ConversationEngine
from effasr.model.asr import ASRModel
from effasr.model.checks import check
from effasr.model.language_model.architecture import max_rows


def answer_limits(
    model: ASRModel, batch: ConversationBatch, limit: Callable[[int], int]
) -> list[int]:
    """Return the most tokens of each answer: as requested, and as the language model has rows.

    Args:
        model: Model with a language model.
        batch: The conversations.
        limit: Most tokens of the answer to a conversation of this many encoder frames.

    Raises:
        ValueError: A conversation has as many rows as the language model, or more.
    """
    settings = model.config.language_model
    assert settings is not None
    assert settings.architecture is not None
    most = max_rows(settings.architecture)
    limits = []
    for name, frames, rows in zip(batch.ids, batch.frame_lengths, batch.token_lengths, strict=True):
        tokens = limit(frames)
        if most is not None:
            check(rows < most, name, f"have fewer rows than the language model's {most}", rows)
            tokens = min(tokens, most - rows)
        limits.append(tokens)
    return limits


def answers(
    model: ASRModel,
    batch: ConversationBatch,
    limits: Sequence[int],
    stop_ids: Collection[int],
    *,
    classes: int | None = None,
    beam: int = 1,
    length_penalty: float = 0.0,
) -> list[Decoded]:
    """Continue conversations that ask for an answer.

    The answer of a conversation does not depend on the others in the batch, up to rounding.

    Args:
        model: Model with a language model, in evaluation mode.
        batch: Conversations whose last row is the last that is given, on the model's device.
        limits: Most tokens of each answer, without its end; at least 1.
        stop_ids: Tokens that end an answer.
        classes: Number of the model's classes that are tokens; all by default.
        beam: K, hypotheses of each conversation; 1 for greedy search.
        length_penalty: See `effasr.decoding.language_model.engine.ConversationEngine`.

    Returns:
        One answer for each of ``batch.ids``.

    Raises:
        ValueError: There is not one limit for each conversation, or one is less than 1.
    """
    engine = ConversationEngine(
        model,
        stop_ids,
        slots=max(1, len(limits)),
        classes=classes,
        beam=beam,
        length_penalty=length_penalty,
    )
    engine.submit(batch, limits, range(len(limits)))
    found = dict(engine.results())
    return [found[place] for place in range(len(limits))]
