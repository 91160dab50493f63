"""Correction of transcripts by a model that reads their alternatives."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import islice

import torch

from effasr.checkpoint import load_best
from effasr.checks import check
from effasr.data.prompt import Prompt
from effasr.decoding.config import CORRECTOR_MARGIN, DecodingConfig
from effasr.transcription.results import (
    Alternative,
    Correction,
    Failure,
    Result,
    Segment,
    Transcription,
)
from effasr.transcription.second_pass.text_to_text import TextToText, Written, source_of
from effasr.transcription.word_timestamps import Word

# Between the texts of a list. A tokenizer without it reads its unknown token, which separates too.
SEPARATOR = " | "

_RECORDINGS = 32  # recordings whose segments are corrected together


def joined_texts(alternatives: Iterable[Alternative]) -> str:
    """Join the different texts of a list in the order of ranks; of equal ones the text decides."""
    ranked = sorted(alternatives, key=lambda item: (-item.rank, " ".join(item.text.split())))
    texts = dict.fromkeys(" ".join(item.text.split()) for item in ranked)
    return SEPARATOR.join(text for text in texts if text)


def text_prompt(prompt: Prompt) -> Prompt:
    """Return the request to correct what answers a request: to transcribe, in its language."""
    return Prompt(prompt.target, prompt.target, "transcribe", prompt.punctuation)


class Corrector:
    """Replaces the text of a segment by what a model writes that reads its alternatives.

    The transcript stays if the model gives it nearly the same probability as what it writes: if the
    difference of both log-probabilities is at most the margin. It also stays if the model cannot
    write it, for example a word with a letter that it does not know, so that both do not compare,
    or if what the model writes is empty or has reached the limit.
    """

    def __init__(self, writer: TextToText, margin: float, *, words: bool = False) -> None:
        check(margin >= 0, "margin", "be at least 0", margin)
        self._writer, self._margin, self._words = writer, margin, words

    def results(self, results: Iterable[Result]) -> Iterator[Result]:
        """Correct recordings, in order; one in a language without an expert becomes a failure."""
        coming = iter(results)
        while group := list(islice(coming, _RECORDINGS)):
            checked = [self._checked(item) for item in group]
            recordings = [item for item in checked if isinstance(item, Transcription)]
            pairs = [(item, segment) for item in recordings for segment in item.segments]
            lists = [joined_texts(segment.alternatives) for _, segment in pairs]
            readable = [index for index, text in enumerate(lists) if text]
            written = self._writer.write(
                [(lists[index], text_prompt(pairs[index][0].prompt)) for index in readable],
                [pairs[index][1].text for index in readable],
            )
            by_index = dict(zip(readable, written, strict=True))
            segments = iter(
                self._corrected(item, segment, by_index.get(index))
                for index, (item, segment) in enumerate(pairs)
            )
            for item in checked:
                if isinstance(item, Transcription):
                    item = item.with_segments(tuple(islice(segments, len(item.segments))))
                yield item

    def _checked(self, result: Result) -> Result:
        if isinstance(result, Transcription):
            try:
                self._writer.check(text_prompt(result.prompt))
            except ValueError as error:
                return Failure(result.id, f"the corrector cannot write it: {error}")
        return result

    def _corrected(
        self, result: Transcription, segment: Segment, written: Written | None
    ) -> Segment:
        if written is None or written.gain is None or written.truncated or not written.text:
            return segment
        if written.text == segment.text:
            return segment
        proposed = Correction(segment.text, written.text, written.gain)
        if written.gain <= self._margin:
            return replace(segment, correction=proposed)
        words = segment.words
        if self._words and words is not None:
            # Where a language has no spaces, the times are those of tokens.
            words = retimed(segment, written.text) if result.space else None
        return replace(segment, text=written.text, words=words, correction=proposed)


def retimed(segment: Segment, text: str) -> tuple[Word, ...]:
    """Return the words of another text, with times from those of a segment.

    Words that both have in common keep their times. Words in place of others share the time of
    these evenly, and added ones the time between their neighbours, which may be none.
    """
    old, new = list(segment.words or ()), text.split()
    matcher = SequenceMatcher(None, [word.text for word in old], new, autojunk=False)
    words: list[Word] = []
    for kind, first, last, begin, end in matcher.get_opcodes():
        if kind == "equal":
            words += old[first:last]
        elif begin < end:
            replaced = old[first:last]
            if replaced:
                start, stop = replaced[0].start, replaced[-1].end
            else:
                start = old[first - 1].end if first else segment.start
                stop = old[first].start if first < len(old) else segment.end
            each = max(0.0, stop - start) / (end - begin)
            words += [
                Word(word, start + number * each, start + (number + 1) * each)
                for number, word in enumerate(new[begin:end])
            ]
    return tuple(words)


def load_corrector(config: DecodingConfig, device: torch.device) -> Corrector | None:
    if config.corrector is None:
        return None
    loaded = load_best(config.corrector, device)
    if loaded.model.config.text_encoder is None:
        raise ValueError(
            f"`corrector` must be a run of a model with a text encoder, but {config.corrector} "
            "has none: train one with the recipe corrector."
        )
    writer = TextToText(
        loaded.model,
        loaded.tokenizer,
        DecodingConfig(precision=config.precision),
        source=source_of(loaded.model.config, config.corrector_source),
    )
    margin = CORRECTOR_MARGIN if config.corrector_margin is None else config.corrector_margin
    return Corrector(writer, margin, words=config.wants_words)
