"""Rows of a conversation in a language model, coded in one array of integers.

A token that is given is its id, a token that the model must write is ``~id``, and a clip of speech
is `CLIP`: it becomes as many rows as the adapter makes of it.
"""

from collections.abc import Sequence

import numpy as np

from effasr.data.batch import IGNORED

CLIP = int(np.iinfo(np.int32).min)  # stands for a clip


def num_rows(rows: np.ndarray, clip_rows: Sequence[int]) -> int:
    """Return the input rows of a conversation; its last token is only predicted."""
    return len(rows) - len(clip_rows) + sum(clip_rows) - 1


def num_targets(rows: np.ndarray) -> int:
    return int(((rows[1:] < 0) & (rows[1:] != CLIP)).sum())


def input_rows(
    rows: np.ndarray, clip_rows: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return input tokens, targets, and the first row of each clip.

    Tokens are int64 (u,), `CLIP` in the rows of speech; targets int64 (u,), the next token where it
    is to be written, else `IGNORED`.
    """
    marks = np.flatnonzero(rows == CLIP)
    if len(marks) != len(clip_rows):
        raise ValueError(
            f"`clips` must be as many as the conversation's places for them, {len(marks)}, but are "
            f"{len(clip_rows)}."
        )
    repeats = np.ones(len(rows), dtype=np.int64)
    repeats[marks] = clip_rows
    expanded = np.repeat(rows.astype(np.int64), repeats)
    starts = np.cumsum(repeats) - repeats
    following = expanded[1:]
    written = (following < 0) & (following != CLIP)
    targets = np.where(written, ~following, IGNORED)
    tokens = expanded[:-1]
    tokens = np.where((tokens < 0) & (tokens != CLIP), ~tokens, tokens)
    return tokens, targets, starts[marks].tolist()
