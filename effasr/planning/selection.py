"""Selects the utterances of a listing that can be trained on, and their static shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.rules import Dropped, Limits, Reason, rate_outliers
from effasr.data.index.label_room import label_room
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.packing import suggest_node_budget, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import Population
from effasr.planning.listing import Listing


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Utterances to plan, with their static shape.

    Attributes:
        lengths: Encoder frames and decoder tokens.
        seconds: float64 (n,), durations.
        shape: The static shape of a micro-batch.
        dropped: Dropped utterances with the reasons.
        samples: int64 (n,), durations in samples, in which sources share an epoch.
        sources: int64 (n,), source number of each utterance.
        mixture: Requested share of each source; None if an epoch has every utterance once.
    """

    lengths: UtteranceLengths
    seconds: np.ndarray
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    samples: np.ndarray
    sources: np.ndarray
    mixture: Mixture | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def populations(self, seed: int) -> Population | None:
        """Return the function that draws an epoch's utterances; None if an epoch has each once."""
        if self.mixture is None:
            return None
        return self.mixture.populations(self.sources, self.samples, seed=seed)

    @property
    def reasons(self) -> dict[str, int]:
        """Number of dropped utterances by reason, the most frequent first."""
        return dict(Counter(str(drop.reason) for drop in self.dropped).most_common())


def select(
    listing: Listing,
    limits: Limits,
    *,
    frame_budget: int,
    token_budget: int | None = None,
    max_sequences: int | None = None,
    transducer: bool = False,
    rate_deviations: float | None = None,
    label_tokens_per_second: float | None = None,
    mix: MixConfig | None = None,
    sources: Sequence[int] | None = None,
) -> Selection:
    """Drop what `effasr.data.index.corpus.Corpus.load` drops, as far as lengths show it.

    Args:
        listing: The utterances.
        limits: Limits on utterances.
        frame_budget: Encoder frames of a micro-batch.
        token_budget: Decoder tokens of a micro-batch; by default the number that fills along with
            the frame budget.
        max_sequences: Utterances of a micro-batch; by default one per 8 frames.
        transducer: Whether the model has a transducer, whose lattices then get a budget.
        rate_deviations: See `effasr.data.filters.config.FilterConfig`.
        label_tokens_per_second: See `effasr.data.config.DataConfig`.
        mix: Shares of the sources; None if an epoch has every utterance once.
        sources: Source number of each list, for ``mix``.

    Raises:
        ValueError: No utterance is left, of all or of one source, or there is nothing to derive the
            room for labels from.
    """
    sieve = _Sieve(listing)
    seconds = listing.seconds
    sieve.drop(
        Reason.TOO_SHORT,
        seconds < limits.min_duration,
        lambda i: f"{seconds[i]:.3f} s, under `min_duration` {limits.min_duration:g} s",
    )
    sieve.drop(
        Reason.TOO_LONG,
        seconds > limits.max_duration,
        lambda i: f"{seconds[i]:.3f} s, over `max_duration` {limits.max_duration:g} s",
    )
    if limits.text == "required":
        sieve.drop(Reason.EMPTY_TEXT, listing.texts < 1, lambda i: "the text is empty")
    elif limits.text == "optional":
        lacking = (listing.texts < 1) & ~listing.monotonic
        details = "the text is empty, and no teacher translates"
        sieve.drop(Reason.EMPTY_TEXT, lacking, lambda i: details)
    samples = _samples(np.minimum(seconds, limits.max_duration))
    frames = limits.framing.frames(samples)
    of_list = np.zeros(len(listing.paths), np.int64) if sources is None else np.array(sources)
    of = of_list[listing.places[:, 0]]
    tokens = listing.texts + listing.prompts
    for name, most, reason, values, what in (
        ("frame_budget", frame_budget, Reason.FRAME_BUDGET, frames, "encoder frames"),
        ("max_frames", limits.max_frames, Reason.MODEL, frames, "encoder frames"),
        ("max_positions", limits.max_positions, Reason.MODEL, tokens, "tokens"),
    ):
        if most is not None:
            sieve.drop(reason, values > most, _over(values, what, name, most))
    if limits.ctc:
        sieve.drop(
            Reason.CTC_INFEASIBLE,
            listing.monotonic & (listing.texts > frames),
            lambda i: f"CTC needs a frame for each of {listing.texts[i]} tokens, of {frames[i]}",
        )
    # Shorter utterances are dropped.
    rates = listing.texts / np.maximum(seconds, limits.min_duration)
    if limits.max_tokens_per_second is not None:
        most_per_second = limits.max_tokens_per_second
        sieve.drop(
            Reason.TOKEN_RATE,
            rates > most_per_second,
            lambda i: f"{rates[i]:.1f} per second, over {most_per_second:g}",
        )
    if limits.text == "optional":
        kept, rate = sieve.kept, label_tokens_per_second
        tokens[kept] = listing.prompts[kept] + label_room(
            listing.texts[kept], seconds[kept], frames[kept], rate
        )
    if token_budget is not None:
        over = _over(tokens, "tokens", "token_budget", token_budget)
        sieve.drop(Reason.TOKEN_BUDGET, tokens > token_budget, over)
    if rate_deviations is not None:
        fit, outliers = sieve.kept[listing.texts[sieve.kept] > 0], np.zeros(len(listing), bool)
        every = rates[fit], seconds[fit], rate_deviations
        outliers[fit] = rate_outliers(*every, languages=listing.languages[fit])
        sieve.drop(
            Reason.TOKEN_RATE,
            outliers,
            lambda i: f"{rates[i]:.1f} per second, far more than others of {seconds[i]:.1f} s",
        )
    if token_budget is None and sieve.kept.size:
        usual = sieve.kept[_drawn(mix, of[sieve.kept], samples[sieve.kept])]
        token_budget = suggest_token_budget(_lengths(frames, tokens, usual), frame_budget)
        over = _over(tokens, "tokens", "token_budget", token_budget, " (derived)")
        sieve.drop(Reason.TOKEN_BUDGET, tokens > token_budget, over)
    if not sieve.kept.size or token_budget is None:
        shown = ", ".join(listing.paths) or "no list"
        first = f"; the first: {sieve.dropped[0].details}" if sieve.dropped else ""
        raise ValueError(
            f"{shown}: no utterance can be planned ({len(sieve.dropped)} dropped{first})."
        )
    lengths = _lengths(frames, tokens, sieve.kept)
    samples, of = samples[sieve.kept], of[sieve.kept]
    node_budget = None
    if transducer:
        usual = sieve.kept[_drawn(mix, of, samples)]
        usual = _lengths(frames, tokens, usual)
        node_budget = suggest_node_budget(usual, frame_budget, lengths)
    mixture = None if mix is None else Mixture.of(mix, of, samples)
    if mixture is not None:
        mixture.check(of_list)
    return Selection(
        lengths=lengths,
        seconds=seconds[sieve.kept],
        shape=StaticShape(
            frame_budget,
            token_budget,
            max_sequences or limits.framing.sequences(frame_budget),
            longest_frames=max(1, int(lengths.frames.max())),
            longest_tokens=max(1, int(lengths.tokens.max())),
            framing=limits.framing,
            node_budget=node_budget,
        ),
        dropped=tuple(sieve.dropped),
        samples=samples,
        sources=of,
        mixture=mixture,
    )


class _Sieve:
    """Mask of the kept utterances of a listing, and the dropped ones with reasons."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self.kept = np.arange(len(listing))
        self.dropped = list(listing.dropped)

    def drop(self, reason: Reason, out: np.ndarray, details: Callable[[int], str]) -> None:
        """Drop the kept utterances for which ``out``, bool (n,), is true."""
        leaving = out[self.kept]
        for index in self.kept[leaving].tolist():
            name, seconds = self._listing.name(index), float(self._listing.seconds[index])
            self.dropped.append(Dropped(name, reason, details(index), "", seconds))
        self.kept = self.kept[~leaving]


def _over(
    values: np.ndarray, what: str, name: str, most: int, remark: str = ""
) -> Callable[[int], str]:
    return lambda index: f"{values[index]} {what}, over `{name}` {most}{remark}"


def _samples(seconds: np.ndarray) -> np.ndarray:
    """Return samples at `SAMPLE_RATE`, int64 (n,), rounded as in `filters.rules.frames_of`."""
    return np.floor(seconds * SAMPLE_RATE + 0.5).astype(np.int64)


def _drawn(mix: MixConfig | None, sources: np.ndarray, samples: np.ndarray) -> np.ndarray | slice:
    """Return the utterances of an epoch; with shares, their lengths differ from the corpus'."""
    mixture = None if mix is None else Mixture.of(mix, sources, samples)
    draw = None if mixture is None else mixture.populations(sources, samples, seed=0)
    return slice(None) if draw is None else draw(0)


def _lengths(frames: np.ndarray, tokens: np.ndarray, kept: np.ndarray) -> UtteranceLengths:
    return UtteranceLengths(frames[kept].astype(np.int32), tokens[kept].astype(np.int32))
