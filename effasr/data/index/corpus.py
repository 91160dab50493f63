"""All utterances of a run, in arrays that worker processes share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from lhotse.cut import Cut

from effasr.data.audio.speed_perturbation import load_at, name_at
from effasr.data.audio.waveform import AudioError, AudioSegment
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate, with_experts
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr.data.filters.config import TooManyDropped, check_share
from effasr.data.filters.rules import Dropped, Reason, rate_outliers
from effasr.data.index.base_corpus import BaseCorpus
from effasr.data.index.columns import AudioColumns, Ragged
from effasr.data.index.index_reader import Reader, build_table
from effasr.data.index.label_room import with_label_room
from effasr.data.index.utterance_table import UtteranceTable
from effasr.data.manifest.cuts import audio_of
from effasr.data.mixture_summary import Mixture
from effasr.data.prompt import Prompt
from effasr.data.sampling.packing import suggest_node_budget, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from effasr.data.index.text_corpus import TextCorpus


@dataclass(frozen=True, slots=True, eq=False)
class Corpus(BaseCorpus):
    """Utterances that can be trained on; made by `Corpus.load`.

    The data are flat arrays, which forked workers share; objects would be copied when their
    reference counts change.

    Attributes:
        lengths: Encoder frames and decoder tokens of each utterance; of one without text, the
            tokens that are reserved for a label.
        shape: The static shape of every batch.
        dropped: Utterances of the manifests that were left out, with the reasons.
        seconds: Total duration of the utterances.
        samples: int32 (n,), duration of each utterance in samples at `SAMPLE_RATE`.
        amounts: ``samples``, by which shares are measured.
        sources: uint16 (n,), the source of each utterance.
        mixture: Requested share of each source; None if an epoch has every utterance once and
            nothing is reported by source.
        fingerprint: Digest of lengths, texts and order, which a resumed run compares.
        text: Text pairs for text-only micro-batches; None without any.
        prompt: The most frequent prompt, which model cards and defaults use.
        eos_id: Token id of the tokenizer's end of sentence.
        pad_id: Token id of the tokenizer's padding.
    """

    lengths: UtteranceLengths
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    seconds: float
    samples: np.ndarray
    amounts: np.ndarray
    sources: np.ndarray
    mixture: Mixture | None
    fingerprint: str
    prompt: Prompt
    eos_id: int
    pad_id: int
    text: TextCorpus | None
    _audio: AudioColumns
    _tokens: Ragged
    _speakers: np.ndarray
    _rows: np.ndarray
    _speeds: np.ndarray
    """Number of each utterance's speed in ``_all_speeds``."""
    _all_speeds: tuple[float, ...]
    _prompt_lengths: np.ndarray
    _monotonic: np.ndarray
    _prompts: tuple[Prompt, ...]
    _prompt_ids: np.ndarray
    _experts: np.ndarray | None = None

    @classmethod
    def load(
        cls,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        ctc: bool = True,
        transducer: bool = False,
        max_frames: int | None = None,
        max_positions: int | None = None,
        framing: Framing = FASTCONFORMER,
        sources: Sequence[int] | None = None,
        read: Reader = build_table,
    ) -> Corpus:
        """Read manifests, tokenize their texts and drop utterances that cannot be trained on.

        Args:
            paths: Manifests of any kind; audio files are opened only for manifests other than
                lhotse's.
            tokenizer: Tokenizer of texts and prompts.
            config: Budgets, durations and the default language.
            ctc: Whether the model has a CTC head, which limits the tokens by the frames.
            transducer: Whether the model has a transducer, whose lattices then get a budget.
            max_frames: Most encoder frames that the model accepts; None for no limit.
            max_positions: Most decoder tokens that the model accepts; None for no limit.
            framing: Frame geometry of the model's features.
            sources: Source of each manifest, as an index into the leaves of ``config.mix``; by
                default all belong to one.
            read: Function that reads the manifests; see
                `effasr.data.index.corpus_cache.CorpusCache`.

        Raises:
            ValueError: A manifest is malformed, or no utterance is left, of all or of one source.
        """
        sources = [0] * len(paths) if sources is None else sources
        limits = config.limits(
            ctc=ctc, max_frames=max_frames, max_positions=max_positions, framing=framing
        )
        # The token budget is applied after reading: a change of it then needs no new reading.
        table = read(paths, tokenizer, replace(limits, token_budget=None), config.language, sources)
        derivation = _Derivation(table, config, limits.framing, transducer=transducer)
        corpus = derivation.corpus(paths, tokenizer)
        if corpus.mixture is not None:
            corpus.mixture.check(sources)
        return corpus

    def collate(
        self, examples: Sequence[Example], shape: StaticShape | None, *, padded: bool = False
    ) -> Batch:
        """Pack utterances on the CPU; see `effasr.data.collate.collate`."""
        batch = collate(
            examples,
            shape,
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            padded=padded,
            framing=self.shape.framing,
        )
        return batch if self._experts is None else with_experts(batch)

    def with_text(self, text: TextCorpus) -> Corpus:
        """Return the same utterances with text pairs for text-only micro-batches."""
        digest = hashlib.sha256(f"{self.fingerprint} {text.fingerprint}".encode())
        dropped = (*self.dropped, *text.dropped)
        return replace(self, text=text, dropped=dropped, fingerprint=digest.hexdigest())

    def with_experts(self, number: Callable[[Prompt], int]) -> Corpus:
        """Return the same utterances, with the expert of each.

        Args:
            number: Returns the number of the expert for the prompt of an utterance.
        """
        used = np.unique(self._prompt_ids)
        by_prompt = np.zeros(len(self._prompts), dtype=np.int64)
        by_prompt[used] = [number(self._prompts[index]) for index in used.tolist()]
        return replace(self, _experts=by_prompt[self._prompt_ids])

    @property
    def speakers(self) -> int:
        """Number of speakers, of those that the manifests name."""
        found = np.unique(self._speakers[self._rows])
        return int((found >= 0).sum())

    @property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each text without its prompt, int32 (n,)."""
        return self.lengths.tokens - self._prompt_lengths

    @property
    def monotonic(self) -> np.ndarray:
        """Whether there is a text that follows the speech in order: bool (n,). CTC applies."""
        return self._monotonic

    def token_ids(self, vocab_size: int) -> np.ndarray:
        """Return the distinct token ids of prompts and texts, sorted."""
        seen = np.zeros(vocab_size, dtype=bool)
        for tokens in self._tokens.blocks(self._rows):
            seen[tokens] = True
        return np.flatnonzero(seen)

    def audio(self, index: int) -> AudioSegment | Cut:
        """Return the audio of an utterance: a segment of a file, or a cut that lhotse must read.

        For an utterance with speed perturbation this is the original audio.
        """
        return self._audio[self._rows[index]]

    def speed(self, index: int) -> float:
        """Return the speed factor of an utterance."""
        return self._all_speeds[self._speeds[index]]

    def name(self, index: int) -> str:
        """Return the id of an utterance, with its speed factor as a suffix unless it is 1."""
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
        """Return the duration of an utterance at its speed, in seconds."""
        return int(self.samples[index]) / SAMPLE_RATE

    def example(self, index: int) -> Example:
        """Return the utterance with its audio, ready to be packed.

        Raises:
            AudioError: The audio cannot be read; the message names file and utterance.
        """
        name = self.name(index)
        try:
            audio = load_at(self.audio(index), self.speed(index))
        except AudioError as error:
            raise AudioError(error.problem, f"utterance {name!r}: {error}") from error
        tokens = self._tokens[self._rows[index]].tolist()
        expert = None if self._experts is None else int(self._experts[index])
        if not tokens:
            room = int(self.lengths.tokens[index])
            return Example(name, audio, [], None, reserved=room, expert=expert)
        split = int(self._prompt_lengths[index])
        follows = bool(self._monotonic[index])
        return Example(name, audio, tokens[:split], tokens[split:], follows, expert=expert)


class _Derivation:
    """Derives a `Corpus` from the table of its manifests: token budget, outliers, shape."""

    def __init__(
        self, table: UtteranceTable, config: DataConfig, framing: Framing, *, transducer: bool
    ) -> None:
        self._table, self._transducer = table, transducer
        self._config = config
        self._framing = framing
        self._has_text = table.token_lengths > 0
        tokens = table.token_lengths
        if config.text == "optional":
            tokens = with_label_room(table, config.label_tokens_per_second)
        self._lengths = UtteranceLengths(table.frames, tokens)

    def corpus(self, paths: Sequence[str | Path], tokenizer: Tokenizer) -> Corpus:
        """Return the corpus, with the shape derived where the configuration leaves it open.

        Raises:
            ValueError: The manifests have no utterance.
            TooManyDropped: Every utterance was dropped.
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
        is_kept = fit & ~outliers & ~over
        kept = _where(is_kept)
        lengths = UtteranceLengths(self._lengths.frames[kept], self._lengths.tokens[kept])
        node_budget = None
        if self._transducer:
            usual = self._usual(np.flatnonzero(is_kept))
            node_budget = suggest_node_budget(usual, frame_budget, lengths)
        shape = StaticShape(
            frame_budget,
            token_budget,
            config.max_sequences or self._framing.sequences(frame_budget),
            longest_frames=max(1, int(lengths.frames.max(initial=0))),
            longest_tokens=max(1, int(lengths.tokens.max(initial=0))),
            framing=self._framing,
            node_budget=node_budget,
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
            amounts=samples,
            sources=sources,
            mixture=mixture,
            fingerprint=_fingerprint([lengths.frames, lengths.tokens], texts, others),
            prompt=self._prompt(fit),
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            text=None,
            _audio=table.audio,
            _tokens=table.tokens,
            _speakers=table.speakers,
            _rows=rows,
            _speeds=table.speeds[kept],
            _all_speeds=config.speed_perturbation,
            _prompt_lengths=table.prompt_lengths[kept],
            _monotonic=monotonic[table.prompt_ids[kept]] & self._has_text[kept],
            _prompts=tuple(table.prompts),
            _prompt_ids=table.prompt_ids[kept],
        )

    def _within(self, token_budget: int | None) -> tuple[np.ndarray, list[Dropped]]:
        """Return the utterances within a budget, and all dropped so far in manifest order."""
        table, tokens = self._table, self._lengths.tokens
        if token_budget is None:
            return np.ones(len(table), dtype=bool), list(table.dropped)
        fit = tokens <= token_budget
        drops = list(zip(table.dropped_before.tolist(), table.dropped, strict=True))
        for index in np.flatnonzero(~fit).tolist():
            details = f"{tokens[index]} tokens, over {token_budget}"
            # Utterances dropped while reading come before the next utterance of the table.
            drops.append((index + 0.5, self._dropped(index, Reason.TOKEN_BUDGET, details)))
        return fit, [drop for _, drop in sorted(drops, key=itemgetter(0))]

    def _usual(self, kept: np.ndarray) -> UtteranceLengths:
        """Return the lengths of an epoch's utterances, drawn by the shares where there are any."""
        if self._config.mix is not None:
            sources, samples = self._table.sources[kept], self._samples(kept)
            mixture = Mixture.of(self._config.mix, sources, samples)
            draw = mixture.populations(sources, samples, seed=0)
            kept = kept if draw is None else kept[draw(0)]
        return UtteranceLengths(self._lengths.frames[kept], self._lengths.tokens[kept])

    def _samples(self, kept: np.ndarray | slice) -> np.ndarray:
        """Return the durations in samples, as `samples_in` computes them."""
        return np.floor(self._table.durations[kept] * SAMPLE_RATE + 0.5).astype(np.int32)

    def _prompt(self, fit: np.ndarray) -> Prompt:
        """Return the most frequent prompt of those that fit, the first one on a tie."""
        return self._table.prompts[int(np.bincount(self._table.prompt_ids[fit]).argmax())]

    def _rate_outliers(self, fit: np.ndarray) -> tuple[np.ndarray, list[Dropped]]:
        """Find texts with far more tokens a second than others of their language and length.

        Returns:
            bool (n,), True for the utterances to leave out, and the list of these.
        """
        durations, outliers = self._table.durations, np.zeros(len(fit), dtype=bool)
        deviations = self._config.filters.rate_deviations
        if deviations is None:
            return outliers, []
        rates = (self._lengths.tokens - self._table.prompt_lengths) / durations
        fit, languages = fit & self._has_text, self._table.languages
        outliers[fit] = rate_outliers(rates[fit], durations[fit], deviations, languages[fit])
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
    """Return an index for the kept rows; a slice if all are kept, so that arrays are not copied."""
    return slice(None) if kept.all() else np.flatnonzero(kept)


def _fingerprint(
    lengths: Iterable[np.ndarray], texts: Iterable[np.ndarray], others: Iterable[np.ndarray]
) -> str:
    """Digest what determines plans and targets; paths are left out, so that data may move."""
    digest = hashlib.sha256()
    for values in chain(lengths, texts, others):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
