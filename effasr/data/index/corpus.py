"""All utterances of a run, in arrays that worker processes share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from lhotse.cut import Cut

from effasr.data.audio.speed_perturbation import load_at, name_at
from effasr.data.audio.waveform import AudioError, AudioSegment
from effasr.data.batch import StaticShape
from effasr.data.collate import Example
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr.data.filters.config import TooManyDropped, check_share
from effasr.data.filters.rules import Dropped, Reason, rate_outliers
from effasr.data.index.columns import AudioColumns, Ragged
from effasr.data.index.index_reader import Reader, build_table
from effasr.data.index.utterance_table import UtteranceTable
from effasr.data.manifest.cuts import audio_of
from effasr.data.mixture_summary import Mixture, MixtureSummary
from effasr.data.prompt import Prompt
from effasr.data.sampling.packing import suggest_token_budget
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.population import Population
from effasr.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from effasr.data.index.text_corpus import TextCorpus


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Utterances that can be trained on; made by `Corpus.load`.

    Everything is in flat arrays: a forked worker shares them and copies none, as it would
    objects whose reference counts it touches.

    Attributes:
        lengths: Encoder frames and decoder tokens of each utterance.
        shape: The static shape of every batch.
        dropped: What the manifests hold beside, and why it was left out.
        seconds: Duration of all utterances.
        samples: int32 (n,), duration of each utterance in samples at `SAMPLE_RATE`.
        sources: uint16 (n,), the source of each utterance.
        mixture: What share each source is to get; None where an epoch has every utterance once
            and nothing is reported by source.
        fingerprint: Changes if a length, a text or the order does; a resumed run compares it.
        text: Text pairs that are trained on beside; None without any.
        prompt: What is asked most often: what a model trained on this is best at.
        eos_id: The tokenizer's.
        pad_id: The tokenizer's.
    """

    lengths: UtteranceLengths
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    seconds: float
    samples: np.ndarray
    sources: np.ndarray
    mixture: Mixture | None
    fingerprint: str
    prompt: Prompt
    eos_id: int
    pad_id: int
    text: TextCorpus | None
    _audio: AudioColumns
    _tokens: Ragged
    _rows: np.ndarray
    _speeds: np.ndarray
    """Number of each utterance's speed in ``_all_speeds``."""
    _all_speeds: tuple[float, ...]
    _prompt_lengths: np.ndarray
    _monotonic: np.ndarray

    @classmethod
    def load(
        cls,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        ctc: bool = True,
        max_frames: int | None = None,
        max_positions: int | None = None,
        framing: Framing = FASTCONFORMER,
        sources: Sequence[int] | None = None,
        read: Reader = build_table,
    ) -> Corpus:
        """Read manifests, tokenize their texts and leave out what cannot be trained on.

        Args:
            paths: Manifests of any kind; audio is opened only where a manifest is not lhotse's.
            tokenizer: For texts and prompts.
            config: Budgets, durations and the default language.
            ctc: Whether the model has a CTC head, so that texts must not be too long for it.
            max_frames: Most encoder frames that the model can read; None for no limit.
            max_positions: Most decoder tokens that it can write; None for no limit.
            framing: Of the model's features.
            sources: The number of each manifest's source among the leaves of ``config.mix``; by
                default all are of one.
            read: What reads the manifests; see `effasr.data.index.corpus_cache.CorpusCache`.

        Raises:
            ValueError: A manifest is malformed, or no utterance is left, be it of one source.
        """
        sources = [0] * len(paths) if sources is None else sources
        limits = config.limits(
            ctc=ctc, max_frames=max_frames, max_positions=max_positions, framing=framing
        )
        # Of the budgets, what is left out is known when all lengths are: another one then needs no
        # other reading.
        table = read(paths, tokenizer, replace(limits, token_budget=None), config.language, sources)
        corpus = _Derivation(table, config, limits.framing).corpus(paths, tokenizer)
        if corpus.mixture is not None:
            corpus.mixture.check(sources)
        return corpus

    def __len__(self) -> int:
        return len(self.lengths)

    def populations(self, seed: int) -> Population | None:
        """What gives the utterances of an epoch; None where it has every utterance once."""
        if self.mixture is None:
            return None
        return self.mixture.populations(self.sources, self.samples, seed=seed)

    def steps(self, micro_batches: int) -> int:
        """Global steps of an epoch, about: as many as its frames and tokens need."""
        members = slice(None) if (draw := self.populations(seed=0)) is None else draw(0)
        frames = int(self.lengths.frames[members].sum(dtype=np.int64)) / self.shape.frame_budget
        tokens = int(self.lengths.tokens[members].sum(dtype=np.int64)) / self.shape.token_budget
        return max(1, round(max(frames, tokens) / micro_batches))

    def with_text(self, text: TextCorpus) -> Corpus:
        """The same utterances, with text pairs beside them."""
        digest = hashlib.sha256(f"{self.fingerprint} {text.fingerprint}".encode())
        dropped = (*self.dropped, *text.dropped)
        return replace(self, text=text, dropped=dropped, fingerprint=digest.hexdigest())

    def summaries(
        self, plan: EpochPlan, text_plan: EpochPlan | None = None
    ) -> list[MixtureSummary]:
        """The shares that a plan of speech, and one of text, give the sources.

        Nothing without a mixture.
        """
        if self.mixture is None:
            return []
        drawn = self.mixture.count(self.sources, self.samples, plan.indices)
        summaries = [self.mixture.summary(drawn)]
        if (text := self.text) is not None and text_plan is not None:
            drawn = text.mixture.count(text.sources, text.lengths.frames, text_plan.indices)
            summaries.append(text.mixture.summary(drawn))
        return summaries

    def audio(self, index: int) -> AudioSegment | Cut:
        """Where the audio of an utterance is: a part of a file, or a cut that lhotse must read.

        Of an utterance at another speed, the audio from which it is made.
        """
        return self._audio[self._rows[index]]

    def speed(self, index: int) -> float:
        """The speed at which an utterance is trained on."""
        return self._all_speeds[self._speeds[index]]

    def name(self, index: int) -> str:
        """The id of an utterance; of one at another speed, with that."""
        return name_at(self._audio.name(self._rows[index]), self.speed(index))

    def transcripts(self, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """Encoder frames and token ids, int (U,), of at most so many transcriptions.

        They are evenly spaced over the corpus; translations are left out.
        """
        chosen = np.flatnonzero(self._monotonic)
        if len(chosen) > limit:
            chosen = chosen[np.arange(limit) * len(chosen) // limit]
        for index in chosen.tolist():
            tokens = self._tokens[self._rows[index]][self._prompt_lengths[index] :]
            yield int(self.lengths.frames[index]), tokens

    def duration(self, index: int) -> float:
        """Seconds that an utterance lasts at its speed."""
        return int(self.samples[index]) / SAMPLE_RATE

    def example(self, index: int) -> Example:
        """The utterance with its audio, ready to be packed.

        Raises:
            AudioError: The audio cannot be read; the message names file and utterance.
        """
        name = self.name(index)
        try:
            audio = load_at(self.audio(index), self.speed(index))
        except AudioError as error:
            raise AudioError(error.problem, f"utterance {name!r}: {error}") from error
        tokens = self._tokens[self._rows[index]].tolist()
        split = int(self._prompt_lengths[index])
        return Example(name, audio, tokens[:split], tokens[split:], bool(self._monotonic[index]))


class _Derivation:
    """From what manifests hold to what is trained on."""

    def __init__(self, table: UtteranceTable, config: DataConfig, framing: Framing) -> None:
        self._table = table
        self._config = config
        self._framing = framing
        self._lengths = UtteranceLengths(table.frames, table.token_lengths)

    def corpus(self, paths: Sequence[str | Path], tokenizer: Tokenizer) -> Corpus:
        """The corpus, with the shape that the configuration leaves to be derived.

        Raises:
            ValueError: There is no utterance.
            TooManyDropped: None is left.
        """
        table, config = self._table, self._config
        fit, dropped = self._within(config.token_budget)
        shown = ", ".join(map(str, paths)) or "no manifest"
        if not fit.any():
            first = f"; the first: {dropped[0].details}" if dropped else ""
            message = f"{shown}: no utterance can be trained on ({len(dropped)} dropped{first})."
            raise TooManyDropped(message, dropped) if dropped else ValueError(message)
        outliers, rate_drops = self._rate_outliers(fit)
        dropped += rate_drops
        frame_budget = config.known_frame_budget
        token_budget = config.token_budget
        if token_budget is None:
            usual = self._usual(np.flatnonzero(fit & ~outliers))
            token_budget = suggest_token_budget(usual, frame_budget)
        over = fit & ~outliers & (self._lengths.tokens > token_budget)
        for index in np.flatnonzero(over).tolist():
            details = (
                f"{self._lengths.tokens[index]} tokens, over {token_budget}, which was derived "
                "from `frame_budget`: set `token_budget` to keep it"
            )
            dropped.append(self._dropped(index, Reason.TOKEN_BUDGET, details))
        check_share(dropped, len(table.dropped) + len(table), config.filters.max_dropped)
        kept = _where(fit & ~outliers & ~over)
        lengths = UtteranceLengths(self._lengths.frames[kept], self._lengths.tokens[kept])
        shape = StaticShape(
            frame_budget,
            token_budget,
            config.max_sequences or self._framing.sequences(frame_budget),
            longest_frames=max(1, int(lengths.frames.max(initial=0))),
            longest_tokens=max(1, int(lengths.tokens.max(initial=0))),
            framing=self._framing,
        )
        rows, sources, samples = table.rows[kept], table.sources[kept], self._samples(kept)
        mixture = None if config.mix is None else Mixture.of(config.mix, sources, samples)
        texts = table.tokens.blocks(rows)
        monotonic = np.array([prompt.monotonic for prompt in table.prompts])
        others = [] if mixture is None else [sources]
        if config.speed_perturbation != (1.0,):
            others += [np.array(config.speed_perturbation), table.speeds[kept]]
        return Corpus(
            lengths=lengths,
            shape=shape,
            dropped=tuple(dropped),
            seconds=float(table.durations[kept].sum()),
            samples=samples,
            sources=sources,
            mixture=mixture,
            fingerprint=_fingerprint([lengths.frames, lengths.tokens], texts, others),
            prompt=self._prompt(fit),
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            text=None,
            _audio=table.audio,
            _tokens=table.tokens,
            _rows=rows,
            _speeds=table.speeds[kept],
            _all_speeds=config.speed_perturbation,
            _prompt_lengths=table.prompt_lengths[kept],
            _monotonic=monotonic[table.prompt_ids[kept]],
        )

    def _within(self, token_budget: int | None) -> tuple[np.ndarray, list[Dropped]]:
        """What is within a budget that is given, and all that was dropped until here, in order."""
        table, tokens = self._table, self._lengths.tokens
        if token_budget is None:
            return np.ones(len(table), dtype=bool), list(table.dropped)
        fit = tokens <= token_budget
        drops = list(zip(table.dropped_before.tolist(), table.dropped, strict=True))
        for index in np.flatnonzero(~fit).tolist():
            details = f"{tokens[index]} tokens, over {token_budget}"
            # That which was dropped before the next utterance came before this one.
            drops.append((index + 0.5, self._dropped(index, Reason.TOKEN_BUDGET, details)))
        return fit, [drop for _, drop in sorted(drops, key=itemgetter(0))]

    def _usual(self, kept: np.ndarray) -> UtteranceLengths:
        """The lengths that an epoch has: with shares, not those of the corpus."""
        if self._config.mix is not None:
            sources, samples = self._table.sources[kept], self._samples(kept)
            mixture = Mixture.of(self._config.mix, sources, samples)
            draw = mixture.populations(sources, samples, seed=0)
            kept = kept if draw is None else kept[draw(0)]
        return UtteranceLengths(self._lengths.frames[kept], self._lengths.tokens[kept])

    def _samples(self, kept: np.ndarray | slice) -> np.ndarray:
        """As `samples_in` computes them."""
        return np.floor(self._table.durations[kept] * SAMPLE_RATE + 0.5).astype(np.int32)

    def _prompt(self, fit: np.ndarray) -> Prompt:
        """The most frequent one of those that fit; of equally frequent ones, the first."""
        return self._table.prompts[int(np.bincount(self._table.prompt_ids[fit]).argmax())]

    def _rate_outliers(self, fit: np.ndarray) -> tuple[np.ndarray, list[Dropped]]:
        """Texts with far more tokens a second than others as long: bool (n,), and a list."""
        durations, outliers = self._table.durations, np.zeros(len(fit), dtype=bool)
        deviations = self._config.filters.rate_deviations
        if deviations is None:
            return outliers, []
        rates = (self._lengths.tokens - self._table.prompt_lengths) / durations
        outliers[fit] = rate_outliers(rates[fit], durations[fit], deviations)
        details = "{:.1f} per second, far more than others of {:.1f} s"
        return outliers, [
            self._dropped(index, Reason.TOKEN_RATE, details.format(rates[index], durations[index]))
            for index in np.flatnonzero(outliers).tolist()
        ]

    def _dropped(self, index: int, reason: Reason, details: str) -> Dropped:
        table = self._table
        audio, row = table.audio, table.rows[index]
        name = name_at(audio.name(row), self._config.speed_perturbation[table.speeds[index]])
        return Dropped(name, reason, details, audio_of(audio[row]), float(table.durations[index]))


def _where(kept: np.ndarray) -> np.ndarray | slice:
    """What selects: where it is everything, arrays are shared and not copied."""
    return slice(None) if kept.all() else np.flatnonzero(kept)


def _fingerprint(
    lengths: Iterable[np.ndarray], texts: Iterable[np.ndarray], others: Iterable[np.ndarray]
) -> str:
    """Of what decides plans and targets; not of paths, so that data may move."""
    digest = hashlib.sha256()
    for values in chain(lengths, texts, others):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
