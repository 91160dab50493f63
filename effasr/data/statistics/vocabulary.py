"""Chooses the size of a vocabulary by the hours of a corpus and its frames per token.

Practice: icefall trains 500 pieces on LibriSpeech (100 and 960 hours) and Common Voice; ESPnet
150 on the languages of Common Voice; NeMo recommends 128 or 256 at a subsampling of 4, 128 or 256
for about 1,000 hours and 1,024 for 10,000 hours and more. Larger vocabularies have more frames per
token, and fewer examples of each token. With few hours of many speakers CTC begins to align long
before with little more than characters (`profiling/studies/small_corpora.yaml`), if speech is slow
enough for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sentencepiece

from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.rules import frames_for_ctc
from effasr.data.statistics.survey import FramesPerToken, LanguageSurvey, Survey, frames_in
from effasr.data.tokenizer.sentence_piece import ModelType, VocabularyTooSmall, train_model

SIZES = (40, 128, 256, 500, 1024, 2048, 4096)  # candidate vocabulary sizes

SUBSAMPLINGS = (8, 4)
"""Factors of a FastConformer, the cheaper first: halving the frames more than halves the work."""

_BY_HOURS = ((5.0, 40), (300.0, 500))  # usual sizes below the given hours; `_MOST_USUAL` above
_MOST_USUAL = 1024

_LEAST_EXAMPLES = 40
"""Least mean occurrences of a piece: with fewer examples its embedding is not learned."""

_FEW = 128  # pieces for which any corpus has examples enough, and of texts that nobody speaks

_CHARACTERS_PER_HOUR = 54_000
"""Characters per hour, assumed for texts without audio: 15 a second, as in read speech."""


@dataclass(frozen=True, slots=True)
class VocabularyChoice:
    """Vocabulary sizes for a corpus."""

    sizes: Mapping[str, int]  # pieces by language
    subsampling: int  # mel rows per encoder frame that the sizes are for
    frames_per_token: FramesPerToken | None  # of the sampled texts; None if no text follows speech
    tokens_per_second: float  # of these texts; 0 without any

    @property
    def is_hard(self) -> bool:
        framing = Framing(subsampling=self.subsampling)
        return self.frames_per_token is not None and self.frames_per_token.is_hard(framing)


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """A vocabulary of one language on its sample; arrays cover the texts that follow speech."""

    size: int
    seconds: np.ndarray
    tokens: np.ndarray
    needed: np.ndarray

    def frames_per_token(self, framing: Framing) -> FramesPerToken | None:
        if not len(self.tokens):
            return None
        return FramesPerToken.of(frames_in(self.seconds, framing), self.tokens, self.needed)

    def suffices(self, framing: Framing) -> bool:
        ratios = self.frames_per_token(framing)
        return ratios is None or not ratios.is_hard(framing)


def choose_vocabulary(
    survey: Survey,
    *,
    subsampling: int | None = None,
    model_type: ModelType = "bpe",
) -> VocabularyChoice:
    """Choose the vocabulary size of each language.

    The size is the usual one for the hours, or the next larger one with enough frames per token, as
    long as the corpus has enough examples of each piece. If no size suffices at a subsampling of 8,
    the choice is for a subsampling of 4. Vocabularies are trained on the sample of the survey.
    """
    if not any(counts.length for counts in survey.languages.values()):
        raise ValueError("`survey` must have texts to choose a vocabulary for, but has none.")
    ladders = {
        language: _Ladder(language, counts, model_type)
        for language, counts in survey.languages.items()
        if counts.length
    }
    options = SUBSAMPLINGS if subsampling is None else (subsampling,)
    choice = _choose(ladders, options[0])
    for option in options[1:]:
        if not choice.is_hard:
            break
        choice = _choose(ladders, option)
    return choice


class _Ladder:
    """Vocabularies of a language from the usual size upwards, each trained on first use."""

    def __init__(self, language: str, counts: LanguageSurvey, model_type: ModelType) -> None:
        self._language = language
        self._counts = counts
        self._model_type: ModelType = model_type
        self._sizes = _sizes(counts)
        self._rungs: list[_Measured] = []

    def best(self, framing: Framing) -> _Measured:
        """Return the first with enough frames per token, or else the first that CTC can align.

        A larger one has more frames for each of its pieces, but fewer examples, and learns later.
        """
        for rung in range(len(self._sizes)):
            if rung == len(self._rungs) and not self._climb(rung):
                break
            if self._rungs[rung].suffices(framing):
                return self._rungs[rung]
        ratios = ((rung, rung.frames_per_token(framing)) for rung in self._rungs)
        return next((rung for rung, item in ratios if item and item.can_align), self._rungs[-1])

    def _climb(self, rung: int) -> bool:
        """Train the next vocabulary; return False if the corpus has too few examples for it."""
        measured = _measure(self._language, self._counts, self._sizes[rung], self._model_type)
        if rung:
            share = self._counts.utterances / max(len(self._counts.texts), 1)
            least = _LEAST_EXAMPLES * measured.size if measured.size > _FEW else 0
            if measured.tokens.sum() * share < least:
                return False
            if measured.size <= self._rungs[-1].size:
                return False
        self._rungs.append(measured)
        return True


def _choose(ladders: Mapping[str, _Ladder], subsampling: int) -> VocabularyChoice:
    framing = Framing(subsampling=subsampling)
    best = {language: ladder.best(framing) for language, ladder in ladders.items()}
    seconds, tokens, needed = (
        np.concatenate([getattr(measured, name) for measured in best.values()])
        for name in ("seconds", "tokens", "needed")
    )
    ratios = None
    if len(tokens):
        ratios = FramesPerToken.of(frames_in(seconds, framing), tokens, needed)
    return VocabularyChoice(
        sizes={language: measured.size for language, measured in best.items()},
        subsampling=subsampling,
        frames_per_token=ratios,
        tokens_per_second=float(tokens.sum() / seconds.sum()) if len(tokens) else 0.0,
    )


def _sizes(counts: LanguageSurvey) -> Sequence[int]:
    """Return the usual size and the larger ones."""
    hours = counts.hours if counts.has_speech else counts.length / _CHARACTERS_PER_HOUR
    usual = next((size for under, size in _BY_HOURS if hours < under), _MOST_USUAL)
    usual = usual if counts.has_speech else max(usual, _FEW)
    return [size for size in SIZES if size >= usual]


def _measure(language: str, counts: LanguageSurvey, size: int, model_type: ModelType) -> _Measured:
    """Train a vocabulary on the sample, and count frames and tokens with it."""
    # Every character of the corpus is a piece, those outside the sample as well.
    texts = [*counts.texts, *sorted(counts.characters.difference(*counts.texts))]
    try:
        model = train_model(language, texts, size, model_type)
    except VocabularyTooSmall as error:
        # A script with thousands of characters determines the size.
        model = train_model(language, texts, error.needed, model_type)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = list(_encoded(processor, counts)) if counts.has_speech else []
    return _Measured(
        processor.vocab_size(),
        np.array([seconds for seconds, _ in ids], dtype=np.float64),
        np.array([len(tokens) for _, tokens in ids], dtype=np.int64),
        np.array([frames_for_ctc(tokens) for _, tokens in ids], dtype=np.int64),
    )


def _encoded(
    processor: sentencepiece.SentencePieceProcessor, counts: LanguageSurvey
) -> Iterator[tuple[float, list[int]]]:
    for seconds, tokens in zip(counts.seconds, processor.encode(counts.texts), strict=True):
        if tokens:
            yield seconds, tokens
