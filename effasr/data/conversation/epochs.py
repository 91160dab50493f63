"""What an epoch of mixed conversations holds, so that it fills whole steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.packing import suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import Population, even_population, mean_epoch

_FILL = 0.9975
"""Share of the budgets that an epoch is to fill; the planner reaches it."""


def epoch_mixture(mix: MixConfig, lengths: UtteranceLengths, sources: np.ndarray) -> Mixture:
    """Divide an epoch among sources by rows of the language model, which all conversations have."""
    return Mixture.of(mix, sources, lengths.tokens, unit="tokens", draws_tokens=True)


def populations(
    mixture: Mixture | None, lengths: UtteranceLengths, sources: np.ndarray, *, seed: int
) -> Population | None:
    """Return a function from the epoch to its conversations; None where each has every one once.

    All epochs have the same frames and rows.
    """
    if mixture is None or (quotas := mixture.quotas) is None:
        return None
    return lambda epoch: even_population(lengths, sources, quotas, seed=seed, epoch=epoch)


def epoch_lengths(
    lengths: UtteranceLengths, sources: np.ndarray, mixture: Mixture | None
) -> tuple[UtteranceLengths, tuple[int, int] | None]:
    """Return the lengths of an epoch, and its frames and rows on average.

    `effasr.data.sampling.packing.suggest_token_budget` takes both; the second is None where it is
    the sums of the first.
    """
    draw = populations(mixture, lengths, sources, seed=0)
    if mixture is None or mixture.quotas is None or draw is None:
        return lengths, None
    members = draw(0)
    drawn = UtteranceLengths(lengths.frames[members], lengths.tokens[members])
    return drawn, mean_epoch(lengths, sources, mixture.quotas)


def token_budget(
    lengths: UtteranceLengths, sources: np.ndarray, mixture: Mixture | None, frame_budget: int
) -> int:
    """Return the token budget that epochs fill along with the frame budget."""
    drawn, sums = epoch_lengths(lengths, sources, mixture)
    return suggest_token_budget(drawn, frame_budget, sums)


def of_whole_steps(
    mixture: Mixture,
    lengths: UtteranceLengths,
    sources: np.ndarray,
    shape: StaticShape,
    micro_batches: int,
) -> Mixture:
    """Return a mixture whose epochs fill a whole number of steps, the nearest to its own.

    An epoch of drawn conversations has no natural length, and the room in its last step is lost.
    """
    if mixture.quotas is None:
        return mixture
    frames, rows = mean_epoch(lengths, sources, mixture.quotas)
    fill = max(frames / shape.frame_budget, rows / shape.token_budget) / micro_batches
    scale = max(1, round(fill)) * _FILL / fill
    return replace(mixture, quotas=tuple(round(quota * scale) for quota in mixture.quotas))
