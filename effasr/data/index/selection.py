"""Which utterances of a table are kept under budgets and filters, and the static shape of batches.

Training selects from the utterances of manifests, `effasr plan` from lists of lengths.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from effasr.checks import check
from effasr.data.audio.silence import draw_silence
from effasr.data.batch import StaticShape
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.rules import Dropped, Limits, Reason, rate_outliers
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.packing import (
    suggest_node_budget,
    suggest_token_budget,
    with_sequences,
)
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import Population

_LABEL_ROOM = 1.25
"""Tokens per second that are reserved for a label, relative to the most that a transcript has."""


@dataclass(frozen=True, slots=True, eq=False)
class UtteranceColumns:
    """Utterances before budgets, shares and outliers are considered."""

    seconds: np.ndarray  # float64 (n,)
    frames: np.ndarray  # int32 (n,), of the encoder
    tokens: np.ndarray  # int32 (n,), of prompt and text
    prompt: np.ndarray  # int32 (n,), tokens of prompt and times; all of an utterance without text
    sources: np.ndarray  # int (n,)
    languages: Callable[[], np.ndarray]  # int (n,), number of the language of each text
    identify: Callable[[int], tuple[str, str]]  # name and audio of an utterance, for messages

    @property
    def text(self) -> np.ndarray:
        return self.tokens - self.prompt


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The kept utterances, with the static shape of their batches."""

    lengths: UtteranceLengths
    seconds: np.ndarray
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    samples: np.ndarray  # int32 (k,), durations at `SAMPLE_RATE`, by which shares are measured
    silence: np.ndarray | None  # int32 (k,), those of ``samples`` that `silence_padding` adds
    sources: np.ndarray
    mixture: Mixture | None
    rows: np.ndarray | slice  # of the columns; a slice if all are kept, so that none is copied

    def __len__(self) -> int:
        return len(self.lengths)

    def populations(self, seed: int) -> Population | None:
        if self.mixture is None:
            return None
        return self.mixture.populations(self.sources, self.samples, seed=seed)

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(str(drop.reason) for drop in self.dropped).most_common())


class Selector:
    """Drops utterances, and derives what the configuration leaves open.

    ``dropped`` is what was dropped before, each with the number of utterances before it.
    """

    def __init__(
        self,
        columns: UtteranceColumns,
        config: DataConfig,
        limits: Limits,
        dropped: Iterable[tuple[int, Dropped]],
    ) -> None:
        self.config, self.framing = config, limits.framing
        self.is_kept = np.ones(len(columns.seconds), dtype=bool)
        tokens = columns.tokens
        if config.text == "optional":
            tokens = _with_label_room(columns, config.label_tokens_per_second)
        self._samples = np.floor(columns.seconds * SAMPLE_RATE + 0.5).astype(np.int32)
        self._silence = None
        if config.silence_padding is not None:
            # The samples of the longest utterance within the limits.
            frames = [most for most in (limits.frame_budget, limits.max_frames) if most is not None]
            longest = [limits.framing.samples_of(most) for most in frames]
            room = min([int(limits.max_duration * SAMPLE_RATE), *longest]) - self._samples
            self._silence = draw_silence(config.silence_padding, room)
            self._samples = self._samples + self._silence
            columns = replace(
                columns,
                seconds=columns.seconds + self._silence / SAMPLE_RATE,
                frames=self.framing.frames(self._samples).astype(np.int32),
            )
        self.columns = columns
        self.lengths = UtteranceLengths(columns.frames, tokens)
        self._dropped: list[tuple[float, Dropped]] = list(dropped)
        if (budget := config.token_budget) is not None:
            # An utterance that was dropped before comes before the next one of the columns.
            self._drop_long_texts(budget, "", position=lambda index: index + 0.5)

    @property
    def kept(self) -> np.ndarray:
        return np.flatnonzero(self.is_kept)

    @property
    def dropped(self) -> list[Dropped]:
        return [drop for _, drop in sorted(self._dropped, key=itemgetter(0))]

    def select(self, *, transducer: bool) -> Selection:
        self._drop_outliers()
        config, frame_budget = self.config, self.config.known_frame_budget
        token_budget = config.token_budget
        if token_budget is None:
            token_budget = suggest_token_budget(self._epoch_lengths(), frame_budget)
            remedy = ", which was derived from `frame_budget`: set `token_budget` to keep it"
            self._drop_long_texts(token_budget, remedy)
        rows = slice(None) if self.is_kept.all() else self.kept
        lengths = self.lengths.take(rows)
        node_budget = None
        if transducer:
            node_budget = suggest_node_budget(self._epoch_lengths(), frame_budget, lengths)
        samples, sources = self._samples[rows], self.columns.sources[rows]
        shape = StaticShape(
            frame_budget,
            token_budget,
            self.framing.sequences(frame_budget),
            longest_frames=max(1, int(lengths.frames.max(initial=0))),
            longest_tokens=max(1, int(lengths.tokens.max(initial=0))),
            framing=self.framing,
            node_budget=node_budget,
        )
        shape = with_sequences(shape, config.max_sequences, self._epoch_lengths())
        mixture = None if config.mix is None else Mixture.of(config.mix, sources, samples)
        return Selection(
            lengths=lengths,
            seconds=self.columns.seconds[rows],
            shape=shape,
            dropped=tuple(self.dropped),
            samples=samples,
            silence=None if self._silence is None else self._silence[rows],
            sources=sources,
            mixture=mixture,
            rows=rows,
        )

    def _drop(
        self,
        is_out: np.ndarray,
        reason: Reason,
        details: Callable[[int], str],
        position: Callable[[int], float] = lambda index: math.inf,
    ) -> None:
        """Drop the kept utterances for which ``is_out``, bool (n,), is true."""
        for index in np.flatnonzero(self.is_kept & is_out).tolist():
            name, audio = self.columns.identify(index)
            seconds = float(self.columns.seconds[index])
            drop = Dropped(name, reason, details(index), audio, seconds)
            self._dropped.append((position(index), drop))
        self.is_kept &= ~is_out

    def _drop_long_texts(
        self, budget: int, remedy: str, **position: Callable[[int], float]
    ) -> None:
        tokens = self.lengths.tokens
        self._drop(
            tokens > budget,
            Reason.TOKEN_BUDGET,
            lambda index: f"{tokens[index]} tokens, over {budget}{remedy}",
            **position,
        )

    def _drop_outliers(self) -> None:
        """Drop texts with far more tokens a second than others of their language and length."""
        deviations = self.config.filters.rate_deviations
        if deviations is None:
            return
        seconds, languages = self.columns.seconds, self.columns.languages()
        if self._silence is not None:  # it has no text
            seconds = seconds - self._silence / SAMPLE_RATE
        text = self.columns.text
        rows, rates = np.flatnonzero(self.is_kept & (text > 0)), text / seconds
        outliers = np.zeros(len(seconds), dtype=bool)
        outliers[rows] = rate_outliers(rates[rows], seconds[rows], deviations, languages[rows])
        details = "{:.1f} per second, far more than others of {:.1f} s"
        self._drop(
            outliers,
            Reason.TOKEN_RATE,
            lambda index: details.format(rates[index], seconds[index]),
        )

    def _epoch_lengths(self) -> UtteranceLengths:
        """Return the lengths of an epoch's utterances, drawn by the shares where there are any."""
        rows = self.kept
        if self.config.mix is not None:
            sources, samples = self.columns.sources[rows], self._samples[rows]
            mixture = Mixture.of(self.config.mix, sources, samples)
            draw = mixture.populations(sources, samples, seed=0)
            rows = rows if draw is None else rows[draw(0)]
        return self.lengths.take(rows)


def _with_label_room(columns: UtteranceColumns, rate: float | None) -> np.ndarray:
    """Return the tokens of each utterance; of one without text, those that its label may have.

    ``rate`` is in tokens a second; by default a quarter more than any transcript has.
    """
    text = columns.text
    has_text = text > 0
    if has_text.all():
        return columns.tokens
    if rate is None:
        rule = "be given where no utterance has a text"
        remedy = "10 is enough for most languages and vocabularies"
        check(has_text.any(), "label_tokens_per_second", rule, "null", remedy)
        rate = _LABEL_ROOM * float((text / columns.seconds)[has_text].max())
    # CTC writes at most a token for each frame.
    room = np.minimum(np.ceil(rate * columns.seconds) + 1, columns.frames).astype(text.dtype)
    return columns.prompt + np.where(has_text, text, room)
