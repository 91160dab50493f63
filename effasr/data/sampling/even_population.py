"""Draws epochs of mixed sources that all have the same frames and the same tokens.

An epoch of `effasr.data.sampling.population` meets the quota of each source in one quantity. The
other varies with what is drawn, by as much as fills a step or leaves a step empty. Here utterances
near the border between two epochs change sides, until what was drawn up to the border has the
frames and tokens that it has on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from effasr.data.sampling.ends import exchanged
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import SourceSequence, sequences

_NEAR = 256
"""Utterances on each side of a border that may change sides."""

_NONE = np.arange(0, dtype=np.int32)


def even_population(
    lengths: UtteranceLengths,
    sources: np.ndarray,
    quotas: Sequence[int],
    *,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """Draw the utterances of an epoch with equal frames and tokens in every epoch.

    A pure function. What it draws over all epochs is what `population` draws from tokens; only
    utterances near the borders between epochs belong to the epoch before or after instead. A border
    has to make up for all that was drawn before it, so shares of sources do not drift.

    Args:
        lengths: Frames of each utterance, and tokens, in which quotas are given.
        sources: int (n,), the source of each utterance.
        quotas: Tokens that each source contributes to an epoch on average.
        seed: Seed of the run.
        epoch: Number of the epoch.

    Returns:
        int32 (p,); the planner shuffles them.

    Raises:
        ValueError: A source with a quota has no utterance, or an utterance has no token.
    """
    found = sequences(sources, lengths.tokens, quotas, seed=seed, epoch=epoch)
    if not found:
        return _NONE
    _, after = _border(lengths, found, epoch)
    before, _ = _border(lengths, found, epoch + 1)
    return np.concatenate([after, before]).astype(np.int32)


def mean_epoch(
    lengths: UtteranceLengths, sources: np.ndarray, quotas: Sequence[int]
) -> tuple[int, int]:
    """Return the frames and tokens of an epoch, on average."""
    count = len(quotas)
    # Sums of integers below 2**53 are exact in float64, whatever their order.
    frames = np.bincount(sources, weights=lengths.frames, minlength=count).astype(np.int64).tolist()
    tokens = np.bincount(sources, weights=lengths.tokens, minlength=count).astype(np.int64).tolist()
    drawn = [quota * f // max(1, t) for quota, f, t in zip(quotas, frames, tokens, strict=True)]
    return sum(drawn), sum(quotas)


def _border(
    lengths: UtteranceLengths, found: Sequence[tuple[int, SourceSequence]], number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the second half of the epoch before border ``number``, and the first half after it.

    Utterances change sides within these halves alone, so neighbouring borders do not interfere.
    """
    values = [lengths.frames, lengths.tokens]
    near = max(1, _NEAR // len(found))
    target, drawn, unit = [0, 0], [0, 0], [0, 0]
    kept_before, kept_after, chosen, waiting = [], [], [], []
    for quota, sequence in found:
        border = quota * number
        before = sequence.stretch(border - quota + quota // 2, border) if number else _NONE
        after = sequence.stretch(border, border + quota // 2)
        cut = max(0, len(before) - near)
        kept_before.append(before[:cut])
        chosen.append(before[cut:])
        waiting.append(after[:near])
        kept_after.append(after[near:])
        passes, begun = sequence.begun(border)
        for kind, value in enumerate(values):
            whole = int(value[sequence.members].sum(dtype=np.int64))
            target[kind] += border * whole // sequence.total
            unit[kind] += quota * whole // sequence.total
            drawn[kind] += passes * whole + int(value[begun].sum(dtype=np.int64))
    ones, others = np.concatenate(chosen), np.concatenate(waiting)
    if number:
        missing = [t - d for t, d in zip(target, drawn, strict=True)]
        ones, others = exchanged(values, missing, unit, ones, others)
    return np.concatenate([*kept_before, ones]), np.concatenate([*kept_after, others])
