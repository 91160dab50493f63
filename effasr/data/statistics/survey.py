"""Counts of a corpus by language, taken in one pass, with a sample of its texts."""

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np
from lhotse.cut import Cut

from effasr.checks import check
from effasr.data.features.frame_geometry import SAMPLE_RATE, Framing
from effasr.data.filters.rules import frames_for_ctc, text_of
from effasr.data.index.columns import to_numpy
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.reader import cut_of, named
from effasr.data.manifest.row import spaced
from effasr.data.manifest.utterance import FileUtterance
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer

MOST_IMPOSSIBLE = 0.02  # largest acceptable share of utterances that CTC cannot align at all


def least_median(subsampling: int) -> float:
    """Return the least median of frames per token with which CTC learns well.

    At 4x, few pieces with 1.6 frames learn sooner than more pieces with 3. At 8x, a corpus with
    1.5 frames takes twice the audio of 4x to align (profiling/results/small_corpora.csv).
    """
    return 2.5 if subsampling > 4 else _LEAST_MEDIAN


_LEAST_MEDIAN = 1.5


@dataclass(frozen=True, slots=True)
class FramesPerToken:
    """The distribution of frames per token over the utterances of a corpus."""

    median: float  # encoder frames per token
    under_two: float  # share of utterances with fewer than two frames per token
    impossible: float  # share of utterances with too few frames for any CTC alignment
    utterances: int

    @classmethod
    def of(
        cls,
        frames: np.ndarray,
        tokens: np.ndarray,
        needed: np.ndarray | None = None,
        *,
        excluded: int = 0,
    ) -> "FramesPerToken":
        """Compute the distribution.

        ``needed`` is the least number of frames that CTC needs for each text; by default
        ``tokens``, which ignores the blanks between equal tokens. ``excluded`` is the number of
        further utterances, which were left out because CTC cannot align them.
        """
        count = len(frames) + excluded
        check(count, "frames", "have at least one utterance", "empty")
        # Excluded utterances count as having less than one frame per token.
        ratios = np.concatenate([np.zeros(excluded), frames / tokens])
        lacking = int((frames < (tokens if needed is None else needed)).sum())
        return cls(
            median=float(np.median(ratios)),
            under_two=float((ratios < 2).mean()),
            impossible=(lacking + excluded) / count,
            utterances=count,
        )

    def is_hard(self, framing: Framing) -> bool:
        """Return whether CTC will learn late or not at all, at least from a small corpus."""
        return self.median < least_median(framing.subsampling) or not self.can_align

    @property
    def can_align(self) -> bool:
        return self.median >= _LEAST_MEDIAN and self.impossible <= MOST_IMPOSSIBLE


def frames_in(seconds: np.ndarray, framing: Framing) -> np.ndarray:
    """Return the encoder frames of utterances of these durations: float (n,) to int64 (n,)."""
    return framing.frames(np.floor(seconds * SAMPLE_RATE + 0.5).astype(np.int64))


SAMPLE = 10_000  # number of texts kept per language: enough for choosing a vocabulary


@dataclass(slots=True)
class LanguageSurvey:
    """The texts of one language."""

    utterances: int = 0  # including translations and texts without audio
    hours: float = 0.0
    length: int = 0  # characters of all texts
    characters: set[str] = field(default_factory=set)  # distinct ones, without spaces
    # at most `SAMPLE` texts that follow the speech; of all texts if none does
    texts: list[str] = field(default_factory=list)
    # of the sampled texts; NaN without speech
    seconds: array = field(default_factory=lambda: array("d"))
    _offered: int = 0
    _has_speech: bool = False

    def offer(self, text: str, seconds: float | None, generator: random.Random) -> None:
        """Add a text to the sample with equal probability for each text (reservoir sampling)."""
        if seconds is None and self._has_speech:
            return
        if seconds is not None and not self._has_speech:
            self._has_speech, self._offered = True, 0
            self.texts.clear()
            self.seconds = array("d")
        self._offered += 1
        seconds = float("nan") if seconds is None else seconds
        if len(self.texts) < SAMPLE:
            self.texts.append(text)
            self.seconds.append(seconds)
        elif (slot := generator.randrange(self._offered)) < SAMPLE:
            self.texts[slot], self.seconds[slot] = text, seconds

    @property
    def has_speech(self) -> bool:
        return self._has_speech


class Survey:
    """Counts of a corpus during and after reading; memory is bounded except for the lengths."""

    def __init__(self) -> None:
        self.languages: dict[str, LanguageSurvey] = {}
        self.speakers: set[str] = set()
        self.utterances = 0
        self.hours = self.longest = 0.0
        self._generator = random.Random(0)
        self._seconds, self._tokens, self._needed = array("d"), array("i"), array("i")

    def add(
        self,
        prompt: Prompt,
        text: str,
        seconds: float,
        speaker: str | None = None,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Count an utterance; ``tokens`` are the ids of its text."""
        follows = seconds if prompt.monotonic and text else None
        counts = self.add_text(prompt.target, text, follows)
        counts.hours += seconds / 3600
        self.utterances += 1
        self.hours += seconds / 3600
        self.longest = max(self.longest, seconds)
        if speaker:
            self.speakers.add(speaker)
        if tokens and follows is not None:
            self._seconds.append(seconds)
            self._tokens.append(len(tokens))
            self._needed.append(frames_for_ctc(list(tokens)))

    def add_text(self, language: str, text: str, seconds: float | None = None) -> LanguageSurvey:
        """Count a text; ``seconds`` is the duration of the speech that it follows, if any."""
        counts = self.languages.setdefault(language, LanguageSurvey())
        counts.utterances += 1
        counts.length += len(text)
        counts.characters.update(text)
        counts.offer(text, seconds, self._generator)
        return counts

    def add_cut(self, cut: Cut, tokens: Sequence[int] | None = None) -> None:
        speaker = cut.supervisions[0].speaker
        self.add(prompt_of(cut), text_of(cut), cut.duration, speaker, tokens)

    @property
    def characters(self) -> int:
        """Number of distinct characters of all texts, without spaces."""
        characters = set(
            chain.from_iterable(counts.characters for counts in self.languages.values())
        )
        return sum(not character.isspace() for character in characters)

    def counted(self, framing: Framing, *, excluded: int = 0) -> FramesPerToken | None:
        """Return frames per token of all utterances added with tokens, or None if there are none.

        ``excluded``: see `FramesPerToken.of`.
        """
        if not self._tokens and not excluded:
            return None
        frames = frames_in(to_numpy(self._seconds), framing)
        lengths = to_numpy(self._tokens), to_numpy(self._needed)
        return FramesPerToken.of(frames, *lengths, excluded=excluded)

    def sampled(self, tokenizer: Tokenizer, framing: Framing) -> FramesPerToken | None:
        """Return frames per token of the sampled texts, weighted as the languages in the sample.

        None if no text follows the speech in a language of the tokenizer.
        """
        seconds, ids = self.sample_tokens(tokenizer)
        if not ids:
            return None
        tokens = np.array([len(tokens) for tokens in ids])
        needed = np.array([frames_for_ctc(tokens) for tokens in ids])
        return FramesPerToken.of(frames_in(seconds, framing), tokens, needed)

    def sampled_texts(self) -> set[str]:
        return set(chain.from_iterable(counts.texts for counts in self.languages.values()))

    def sample_seconds(self) -> np.ndarray:
        """Return durations of the sampled texts that follow the speech: float64 (n,), seconds."""
        spoken = (counts.seconds for counts in self.languages.values() if counts.has_speech)
        return np.array(list(chain.from_iterable(spoken)))

    def sample_tokens(self, tokenizer: Tokenizer) -> tuple[np.ndarray, list[list[int]]]:
        """Return durations (float64 (n,), seconds) and token ids of texts that follow speech."""
        seconds, ids = [], []
        for language, counts in self.languages.items():
            # A tokenizer that names no languages has one vocabulary for all.
            is_known = not tokenizer.languages or tokenizer.knows(language)
            if not counts.has_speech or not is_known:
                continue
            for text, duration in zip(counts.texts, counts.seconds, strict=True):
                if tokens := tokenizer.encode(text, language):
                    seconds.append(duration)
                    ids.append(tokens)
        return np.array(seconds), ids


def survey(
    paths: Iterable[str | Path],
    *,
    language: str = "en",
    most: int | None = None,
    untranscribed: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Survey:
    """Count the utterances of manifests with audio, or the first ``most`` of each.

    Audio files are opened only where a manifest gives no duration, and only their headers. With
    ``untranscribed``, utterances may lack a text; these are not counted.
    """
    counts, read = Survey(), 0
    for path in paths:
        for utterance in _utterances(path, language, most, untranscribed):
            read += 1
            progress(read)
            if utterance[1] or not untranscribed:
                counts.add(*utterance)
    return counts


def _utterances(
    path: str | Path, language: str, most: int | None, untranscribed: bool
) -> Iterator[tuple[Prompt, str, float, str | None]]:
    utterances = named(path, language=language, untranscribed=untranscribed)
    for name, utterance in islice(utterances, most):
        if isinstance(utterance, FileUtterance) and utterance.duration is not None:
            yield utterance.prompt, spaced(utterance.text), utterance.duration, utterance.speaker
        else:
            cut = cut_of(name, utterance)
            yield prompt_of(cut), text_of(cut), cut.duration, cut.supervisions[0].speaker
