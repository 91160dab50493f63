"""Shapes of batches of conversations, and epochs of mixed ones that fill whole steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.features.frame_geometry import Framing
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.packing import suggest_token_budget, with_sequences
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import Population, even_population, mean_epoch

_SHORTEST = 8  # rows of a very short conversation, for the number of sequences of a batch


def static_shape(
    lengths: UtteranceLengths,
    frame_budget: int,
    token_budget: int,
    *,
    framing: Framing,
    shortest_clip: int,
    most_clips: int,
    max_sequences: int | Literal["auto"] | None = None,
    usual: UtteranceLengths | None = None,
) -> tuple[StaticShape, int]:
    """Return the static shape of batches of these conversations, and the most clips of a batch.

    ``lengths`` and budgets are encoder frames and rows of the language model, ``shortest_clip`` is
    in encoder frames, ``most_clips`` of a conversation; ``usual`` are the lengths of an epoch, by
    default these.
    """
    shortest = max(_SHORTEST, int(lengths.tokens.min()))
    shape = StaticShape(
        frame_budget,
        token_budget,
        max(framing.sequences(frame_budget), -(-token_budget // shortest)),
        longest_frames=max(1, int(lengths.frames.max())),
        longest_tokens=max(1, int(lengths.tokens.max())),
        framing=framing,
    )
    shape = with_sequences(shape, max_sequences, lengths if usual is None else usual)
    by_frames = frame_budget // max(1, shortest_clip)
    return shape, max(1, min(by_frames, shape.max_sequences * most_clips))


def split_into_clips(frames: int, longest: int, stack: int) -> Sequence[int]:
    """Divide the speech of a conversation into few clips, none longer than ``longest`` frames.

    All but the last fill their rows of the language model (``stack`` frames each), so that together
    they have as many as one clip of all frames.
    """
    if frames <= longest:
        return [frames] if frames else []
    rows = -(-frames // stack)
    count = -(-rows // max(1, longest // stack))
    clips = [stack * (rows // count + (number < rows % count)) for number in range(count)]
    clips[-1] -= rows * stack - frames
    return clips


_FILL = 0.9975  # share of the budgets that an epoch is to fill; the planner reaches it


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
    return lengths.take(draw(0)), mean_epoch(lengths, sources, mixture.quotas)


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
