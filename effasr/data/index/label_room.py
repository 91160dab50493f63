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
    has_text = table.token_lengths > 0
    if has_text.all():
        return table.token_lengths
    if rate is None:
        if not has_text.any():
            raise ValueError(
                "`label_tokens_per_second` must be given where no utterance has a text, but is "
                "null: 10 is enough for most languages and vocabularies."
            )
        texts = (table.token_lengths - table.prompt_lengths)[has_text]
        rate = _ROOM * float((texts / table.durations[has_text]).max())
    # CTC writes at most a token for each frame.
    room = np.minimum(np.ceil(rate * table.durations) + 1, table.frames).astype(np.int32)
    return np.where(has_text, table.token_lengths, room)
