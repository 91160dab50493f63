"""All utterances of a run in a form that millions fit in and worker processes share."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from lhotse.cut import Cut
from lhotse.cut.set import deserialize_cut

from effasr.data.audio import AudioError, load_audio
from effasr.data.batch import Example, StaticShape
from effasr.data.config import DataConfig
from effasr.data.filter_config import check_share
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
from effasr.data.sampling.packing import suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sources.utterance import CutUtterance, Utterance
from effasr.data.tokenizer import Tokenizer


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
        fingerprint: Changes if a length, a text or the order does; a resumed run compares it.
        prompt: What is asked most often: what a model trained on this is best at.
        eos_id: The tokenizer's.
        pad_id: The tokenizer's.
    """

    lengths: UtteranceLengths
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    seconds: float
    fingerprint: str
    prompt: Prompt
    eos_id: int
    pad_id: int
    _lines: _Ragged
    _tokens: _Ragged
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
    ) -> Corpus:
        """Read manifests, tokenize their texts and leave out what cannot be trained on.

        Args:
            paths: Manifests of any kind; audio is opened only where a manifest is not lhotse's.
            tokenizer: For texts and prompts.
            config: Budgets, durations and the default language.
            ctc: Whether the model has a CTC head, so that texts must not be too long for it.
            max_frames: Most encoder frames that the model can read; None for no limit.
            max_positions: Most decoder tokens that it can write; None for no limit.

        Raises:
            ValueError: A manifest is malformed, or no utterance is left.
        """
        gathered = _Gathered()
        limits = config.limits(ctc=ctc, max_frames=max_frames, max_positions=max_positions)
        for path in paths:
            for name, utterance in named(path, language=config.language):
                gathered.add(name, utterance, limits, tokenizer)
        return gathered.corpus(paths, config, tokenizer)

    def __len__(self) -> int:
        return len(self.lengths)

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


@dataclass(frozen=True, slots=True, eq=False)
class _Ragged:
    """Arrays of unequal length, end to end."""

    values: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def select(self, kept: np.ndarray) -> _Ragged:
        """Those at the ascending indices ``kept``."""
        if len(kept) == len(self.offsets) - 1:
            return self
        lengths = np.diff(self.offsets)
        mask = np.zeros(len(lengths), dtype=bool)
        mask[kept] = True
        return _ragged(self.values[np.repeat(mask, lengths)], lengths[kept])


def _ragged(values: np.ndarray, lengths: Iterable[int] | np.ndarray) -> _Ragged:
    return _Ragged(values, np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]))


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
        self.monotonic = array("b")
        self.prompts: Counter[Prompt] = Counter()

    def add(self, name: str, utterance: Utterance, limits: Limits, tokenizer: Tokenizer) -> None:
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
        self.monotonic.append(tokens.monotonic)
        self.prompts[request(cut)] += 1

    def corpus(
        self, paths: Sequence[str | Path], config: DataConfig, tokenizer: Tokenizer
    ) -> Corpus:
        """The corpus, with the shape that the configuration leaves to be derived.

        Raises:
            ValueError: No utterance is left.
        """
        shown = ", ".join(map(str, paths)) or "no manifest"
        if not self.frames:
            first = f"; the first: {self.dropped[0].details}" if self.dropped else ""
            raise ValueError(
                f"{shown}: no utterance can be trained on ({len(self.dropped)} dropped{first})."
            )
        lines = _ragged(np.frombuffer(self.lines, dtype=np.uint8), self.line_lengths)
        outliers = self._outliers(config.filters.rate_deviations)
        dropped = [*self.dropped, *self._rate_drops(lines, outliers)]
        lengths = UtteranceLengths(_int32(self.frames), _int32(self.token_lengths))
        usual = UtteranceLengths(lengths.frames[~outliers], lengths.tokens[~outliers])
        token_budget = config.token_budget or suggest_token_budget(usual, config.frame_budget)
        shape = StaticShape(
            config.frame_budget,
            token_budget,
            config.max_sequences or max(8, -(-config.frame_budget // 8)),
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
        tokens = _ragged(_int32(self.tokens), self.token_lengths).select(kept)
        return Corpus(
            lengths=lengths,
            shape=shape,
            dropped=tuple(dropped),
            seconds=float(np.array(self.durations)[kept].sum()),
            fingerprint=_fingerprint(lengths, tokens),
            prompt=self.prompts.most_common(1)[0][0],
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            _lines=lines,
            _tokens=tokens,
            _prompt_lengths=_int32(self.prompt_lengths)[kept],
            _monotonic=np.array(self.monotonic, dtype=bool)[kept],
        )

    def _rates(self) -> np.ndarray:
        """Tokens of text per second."""
        texts = _int32(self.token_lengths) - _int32(self.prompt_lengths)
        return texts / np.array(self.durations)

    def _outliers(self, deviations: float | None) -> np.ndarray:
        if deviations is None:
            return np.zeros(len(self.durations), dtype=bool)
        return rate_outliers(self._rates(), np.array(self.durations), deviations)

    def _rate_drops(self, lines: _Ragged, outliers: np.ndarray) -> Iterable[Dropped]:
        """Texts with far more tokens a second than others as long."""
        rates = self._rates()
        for index in np.flatnonzero(outliers).tolist():
            seconds = self.durations[index]
            details = f"{rates[index]:.1f} per second, far more than others of {seconds:.1f} s"
            yield self._dropped(lines, index, Reason.TOKEN_RATE, details)

    def _over_budget(
        self, lines: _Ragged, lengths: UtteranceLengths, over: np.ndarray, token_budget: int
    ) -> Iterable[Dropped]:
        """What does not fit in a token budget that was derived when all lengths were known."""
        for index in over.tolist():
            details = (
                f"{lengths.tokens[index]} tokens, over {token_budget}, which was derived from "
                "`frame_budget`: set `token_budget` to keep it"
            )
            yield self._dropped(lines, index, Reason.TOKEN_BUDGET, details)

    def _dropped(self, lines: _Ragged, index: int, reason: Reason, details: str) -> Dropped:
        cut = json.loads(lines[index].tobytes())
        audio = str(cut["recording"]["sources"][0]["source"])
        return Dropped(cut["id"], reason, details, audio, self.durations[index])


def _int32(values: array[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _fingerprint(lengths: UtteranceLengths, tokens: _Ragged) -> str:
    """Of what decides plans and targets; not of paths, so that data may move."""
    digest = hashlib.sha256()
    for values in (lengths.frames, lengths.tokens, tokens.values):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
