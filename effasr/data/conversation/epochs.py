"""What an epoch of mixed conversations holds, so that it fills whole steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.packing import suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths

_FILL = 0.9975
"""Share of the budgets that an epoch is to fill; the planner reaches it."""

_EPOCHS = 4
"""Epochs that are drawn to find out how full they are."""


def epoch_mixture(mix: MixConfig, lengths: UtteranceLengths, sources: np.ndarray) -> Mixture:
    """Divide an epoch among sources by rows of the language model, which all conversations have.

    Raises:
        ValueError: ``mix.epoch_hours`` is given.
    """
    return Mixture.of(mix, sources, lengths.tokens, unit="tokens", draws_tokens=True)


def token_budget(
    lengths: UtteranceLengths, sources: np.ndarray, mixture: Mixture | None, frame_budget: int
) -> int:
    """Return the token budget that epochs fill along with the frame budget."""
    members = slice(None) if mixture is None else _drawn(lengths, sources, mixture)
    some = UtteranceLengths(lengths.frames[members], lengths.tokens[members])
    return suggest_token_budget(some, frame_budget)


def of_whole_steps(
    mixture: Mixture,
    lengths: UtteranceLengths,
    sources: np.ndarray,
    shape: StaticShape,
    micro_batches: int,
) -> Mixture:
    """Return a mixture whose epochs fill a whole number of steps, the nearest to its own.

    An epoch of drawn conversations has no natural length, and the room in its last step is lost.
    The frames of an epoch vary a little with what is drawn, the less the longer it is.
    """
    draw = mixture.populations(sources, lengths.tokens, seed=0)
    if mixture.quotas is None or draw is None:
        return mixture
    fills = []
    for epoch in range(_EPOCHS):
        members = draw(epoch)
        frames = int(lengths.frames[members].sum(dtype=np.int64)) / shape.frame_budget
        rows = int(lengths.tokens[members].sum(dtype=np.int64)) / shape.token_budget
        fills.append(max(frames, rows) / micro_batches)
    scale = max(1, round(max(fills))) * _FILL / max(fills)
    return replace(mixture, quotas=tuple(round(quota * scale) for quota in mixture.quotas))


def _drawn(lengths: UtteranceLengths, sources: np.ndarray, mixture: Mixture) -> np.ndarray | slice:
    """Return the conversations of several epochs."""
    draw = mixture.populations(sources, lengths.tokens, seed=0)
    if draw is None:
        return slice(None)
    return np.concatenate([draw(epoch) for epoch in range(_EPOCHS)])
