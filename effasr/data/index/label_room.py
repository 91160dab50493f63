"""Room for the labels that a teacher writes during training."""

from __future__ import annotations

import numpy as np

from effasr.data.index.utterance_table import UtteranceTable

_ROOM = 1.25
"""Tokens per second that are reserved, relative to the most that a transcript has."""


def with_label_room(table: UtteranceTable, rate: float | None) -> np.ndarray:
    """Return the tokens of each utterance; of one without text, those that its label may have.

    Args:
        table: The utterances.
        rate: Tokens per second of a label; by default a quarter more than any transcript has.

    Returns:
        int32 (n,).

    Raises:
        ValueError: There is no rate, and no transcript to derive it from.
    """
    texts = table.token_lengths - table.prompt_lengths
    return table.prompt_lengths + label_room(texts, table.durations, table.frames, rate)


def label_room(
    texts: np.ndarray, seconds: np.ndarray, frames: np.ndarray, rate: float | None
) -> np.ndarray:
    """Return the tokens of each text; where there is none, those that its label may have.

    Args:
        texts: int (n,), tokens of each text; 0 for an utterance without one.
        seconds: float64 (n,), durations.
        frames: int (n,), encoder frames.
        rate: As of `with_label_room`.

    Returns:
        int (n,), of the type of ``texts``.

    Raises:
        ValueError: There is no rate, and no transcript to derive it from.
    """
    has_text = texts > 0
    if has_text.all():
        return texts
    if rate is None:
        if not has_text.any():
            raise ValueError(
                "`label_tokens_per_second` must be given where no utterance has a text, but is "
                "null: 10 is enough for most languages and vocabularies."
            )
        rate = _ROOM * float((texts / seconds)[has_text].max())
    # CTC writes at most a token for each frame.
    room = np.minimum(np.ceil(rate * seconds) + 1, frames).astype(texts.dtype)
    return np.where(has_text, texts, room)
