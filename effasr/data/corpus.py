"""All utterances of a run in a form that millions fit in and worker processes share."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from lhotse.cut import Cut
from lhotse.cut.set import deserialize_cut

from effasr.data.audio import AudioError, load_audio
from effasr.data.batch import Example, StaticShape
from effasr.data.blend import SOURCE_DTYPE, Blend, Mixture, planned
from effasr.data.config import DataConfig
from effasr.data.features import SAMPLE_RATE
from effasr.data.filter_config import TooManyDropped, check_share
from effasr.data.filters import (
    Dropped,
    Limits,
    Reason,
    TokenizedText,
    Unfit,
    check,
    frames_of,
    rate_outliers,
)
from effasr.data.manifests import named, request
from effasr.data.prompt import Prompt
from effasr.data.ragged import Ragged, ragged
from effasr.data.sampling.packing import suggest_token_budget
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.population import Population
from effasr.data.sources.utterance import CutUtterance, Utterance
from effasr.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from effasr.data.text_corpus import TextCorpus


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
    _lines: Ragged
    _tokens: Ragged
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
        sources: Sequence[int] | None = None,
    ) -> Corpus:
        """Read manifests, tokenize their texts and leave out what cannot be trained on.

        Args:
            paths: Manifests of any kind; audio is opened only where a manifest is not lhotse's.
            tokenizer: For texts and prompts.
            config: Budgets, durations and the default language.
            ctc: Whether the model has a CTC head, so that texts must not be too long for it.
            max_frames: Most encoder frames that the model can read; None for no limit.
            max_positions: Most decoder tokens that it can write; None for no limit.
            sources: The number of each manifest's source among the leaves of ``config.mix``; by
                default all are of one.

        Raises:
            ValueError: A manifest is malformed, or no utterance is left, be it of one source.
        """
        gathered = _Gathered()
        sources = [0] * len(paths) if sources is None else sources
        limits = config.limits(ctc=ctc, max_frames=max_frames, max_positions=max_positions)
        for path, source in zip(paths, sources, strict=True):
            for name, utterance in named(path, language=config.language):
                gathered.add(name, utterance, limits, tokenizer, source)
        corpus = gathered.corpus(paths, config, tokenizer)
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

    def blends(self, plan: EpochPlan, text_plan: EpochPlan | None = None) -> list[Blend]:
        """The shares asked for beside those that a plan gives the sources.

        Args:
            plan: Of speech.
            text_plan: Of text, if there is any.

        Returns:
            The blend of speech, and that of text if there is any; nothing without a mixture.
        """
        if self.mixture is None:
            return []
        blends = [planned(self.mixture, self.sources, self.samples, plan.indices)]
        if (text := self.text) is not None and text_plan is not None:
            read = text.lengths.frames
            blends.append(planned(text.mixture, text.sources, read, text_plan.indices))
        return blends

    def cut(self, index: int) -> Cut:
        """The utterance as a lhotse cut."""
        return deserialize_cut(json.loads(self._lines[index].tobytes()))

    def example(self, index: int) -> Example:
        """The utterance with its audio, ready to be packed.

        Raises:
            AudioError: The audio cannot be read; the message names file and utterance.
        """
        cut = self.cut(index)
        try:
            audio = load_audio(cut)
        except AudioError as error:
            raise AudioError(error.problem, f"utterance {cut.id!r}: {error}") from error
        tokens = self._tokens[index].tolist()
        split = int(self._prompt_lengths[index])
        return Example(cut.id, audio, tokens[:split], tokens[split:], bool(self._monotonic[index]))


class _Gathered:
    """A corpus while it is read."""

    def __init__(self) -> None:
        self.dropped: list[Dropped] = []
        self.lines = bytearray()
        self.tokens = array("i")
        self.line_lengths = array("q")
        self.token_lengths = array("i")
        self.prompt_lengths = array("i")
        self.frames = array("i")
        self.durations = array("d")
        self.sources = array("H")
        self.monotonic = array("b")
        self.prompts: Counter[Prompt] = Counter()

    def add(
        self, name: str, utterance: Utterance, limits: Limits, tokenizer: Tokenizer, source: int
    ) -> None:
        """Keep an utterance, or note why not."""
        try:
            cut = utterance.cut(name)
        except AudioError as error:
            self.dropped.append(Dropped(name, error.problem, str(error), utterance.audio))
            return
        try:
            tokens = check(cut, limits, tokenizer)
        except Unfit as error:
            drop = Dropped(name, error.reason, str(error), utterance.audio, cut.duration)
            self.dropped.append(drop)
            return
        assert isinstance(tokens, TokenizedText)
        line = utterance.line if isinstance(utterance, CutUtterance) else None
        data = (line or json.dumps(cut.to_dict(), ensure_ascii=False)).encode()
        self.lines += data
        self.line_lengths.append(len(data))
        self.tokens.extend(tokens.prompt)
        self.tokens.extend(tokens.text)
        self.token_lengths.append(len(tokens.prompt) + len(tokens.text))
        self.prompt_lengths.append(len(tokens.prompt))
        self.frames.append(frames_of(cut))
        self.durations.append(cut.duration)
        self.sources.append(source)
        self.monotonic.append(tokens.monotonic)
        self.prompts[request(cut)] += 1

    def corpus(
        self, paths: Sequence[str | Path], config: DataConfig, tokenizer: Tokenizer
    ) -> Corpus:
        """The corpus, with the shape that the configuration leaves to be derived.

        Raises:
            ValueError: There is no utterance.
            TooManyDropped: None is left.
        """
        shown = ", ".join(map(str, paths)) or "no manifest"
        if not self.frames:
            first = f"; the first: {self.dropped[0].details}" if self.dropped else ""
            message = (
                f"{shown}: no utterance can be trained on ({len(self.dropped)} dropped{first})."
            )
            raise TooManyDropped(message, self.dropped) if self.dropped else ValueError(message)
        lines = ragged(np.frombuffer(self.lines, dtype=np.uint8), self.line_lengths)
        outliers = self._outliers(config.filters.rate_deviations)
        dropped = [*self.dropped, *self._rate_drops(lines, outliers)]
        lengths = UtteranceLengths(_int32(self.frames), _int32(self.token_lengths))
        usual = self._usual(config, lengths, np.flatnonzero(~outliers))
        frame_budget = config.known_frame_budget
        token_budget = config.token_budget or suggest_token_budget(usual, frame_budget)
        shape = StaticShape(
            frame_budget,
            token_budget,
            config.max_sequences or max(8, -(-frame_budget // 8)),
        )
        over = ~outliers & (lengths.tokens > token_budget)
        dropped += self._over_budget(lines, lengths, np.flatnonzero(over), token_budget)
        check_share(dropped, len(self.dropped) + len(lengths), config.filters.max_dropped)
        kept = np.flatnonzero(~outliers & ~over)
        lengths = UtteranceLengths(lengths.frames[kept], lengths.tokens[kept])
        shape = replace(
            shape,
            longest_frames=max(1, int(lengths.frames.max(initial=0))),
            longest_tokens=max(1, int(lengths.tokens.max(initial=0))),
        )
        lines = lines.select(kept)
        tokens = ragged(_int32(self.tokens), self.token_lengths).select(kept)
        sources, samples = self._sources(kept), self._samples(kept)
        mixture = None if config.mix is None else Mixture.of(config.mix, sources, samples)
        return Corpus(
            lengths=lengths,
            shape=shape,
            dropped=tuple(dropped),
            seconds=float(np.array(self.durations)[kept].sum()),
            samples=samples,
            sources=sources,
            mixture=mixture,
            fingerprint=_fingerprint(lengths, tokens, *([] if mixture is None else [sources])),
            prompt=self.prompts.most_common(1)[0][0],
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            text=None,
            _lines=lines,
            _tokens=tokens,
            _prompt_lengths=_int32(self.prompt_lengths)[kept],
            _monotonic=np.array(self.monotonic, dtype=bool)[kept],
        )

    def _usual(
        self, config: DataConfig, lengths: UtteranceLengths, kept: np.ndarray
    ) -> UtteranceLengths:
        """The lengths that an epoch has: with shares, not those of the corpus."""
        if config.mix is not None:
            sources, samples = self._sources(kept), self._samples(kept)
            mixture = Mixture.of(config.mix, sources, samples)
            draw = mixture.populations(sources, samples, seed=0)
            kept = kept if draw is None else kept[draw(0)]
        return UtteranceLengths(lengths.frames[kept], lengths.tokens[kept])

    def _sources(self, kept: np.ndarray) -> np.ndarray:
        return np.array(self.sources, dtype=SOURCE_DTYPE)[kept]

    def _samples(self, kept: np.ndarray) -> np.ndarray:
        """As `samples_in` computes them."""
        return np.floor(np.array(self.durations)[kept] * SAMPLE_RATE + 0.5).astype(np.int32)

    def _rates(self) -> np.ndarray:
        """Tokens of text per second."""
        texts = _int32(self.token_lengths) - _int32(self.prompt_lengths)
        return texts / np.array(self.durations)

    def _outliers(self, deviations: float | None) -> np.ndarray:
        if deviations is None:
            return np.zeros(len(self.durations), dtype=bool)
        return rate_outliers(self._rates(), np.array(self.durations), deviations)

    def _rate_drops(self, lines: Ragged, outliers: np.ndarray) -> Iterable[Dropped]:
        """Texts with far more tokens a second than others as long."""
        rates = self._rates()
        for index in np.flatnonzero(outliers).tolist():
            seconds = self.durations[index]
            details = f"{rates[index]:.1f} per second, far more than others of {seconds:.1f} s"
            yield self._dropped(lines, index, Reason.TOKEN_RATE, details)

    def _over_budget(
        self, lines: Ragged, lengths: UtteranceLengths, over: np.ndarray, token_budget: int
    ) -> Iterable[Dropped]:
        """What does not fit in a token budget that was derived when all lengths were known."""
        for index in over.tolist():
            details = (
                f"{lengths.tokens[index]} tokens, over {token_budget}, which was derived from "
                "`frame_budget`: set `token_budget` to keep it"
            )
            yield self._dropped(lines, index, Reason.TOKEN_BUDGET, details)

    def _dropped(self, lines: Ragged, index: int, reason: Reason, details: str) -> Dropped:
        cut = json.loads(lines[index].tobytes())
        audio = str(cut["recording"]["sources"][0]["source"])
        return Dropped(cut["id"], reason, details, audio, self.durations[index])


def _int32(values: array[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _fingerprint(lengths: UtteranceLengths, tokens: Ragged, *others: np.ndarray) -> str:
    """Of what decides plans and targets; not of paths, so that data may move."""
    digest = hashlib.sha256()
    for values in (lengths.frames, lengths.tokens, tokens.values, *others):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
