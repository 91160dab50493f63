"""Cuts long recordings with long transcripts into utterances, by CTC alignment."""

import itertools
import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from effasr.data.audio.loudness import HOP_SECONDS, is_speech, loudness
from effasr.data.manifest import folder
from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.reader import named
from effasr.data.manifest.utterance import (
    CutUtterance,
    FileUtterance,
    ReadOptions,
    RejectedRow,
    Utterance,
)
from effasr.data.manifest.walk import AUDIO_SUFFIXES
from effasr.data.prompt import WITHOUT_SPACES, Prompt
from effasr.data.scripts import split_words
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.ctc_segmentation import Alignment, Costs, align
from effasr.transcription.inputs.audio_stream import open_stream
from effasr.transcription.inputs.chunking import MARGIN_SECONDS
from effasr.transcription.inputs.sources import Source, source_of
from effasr.transcription.label import NO_TEXT, NOT_SPOKEN, TOO_LONG, checked
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.recordings import Request
from effasr.transcription.word_timestamps import WordGroup, group_times

_log = logging.getLogger(__name__)

_ENDS = re.compile("[.!?\u2026\u3002\uff01\uff1f]['\"\u201d\u2019\u00bb)\\]]*$")
_MOST_WORDS = 40  # of a sentence, on average: a text with longer ones has no punctuation
_PAUSE_SECONDS = 0.15  # shortest between utterances: an abbreviation may look like an end
_LEAST_PAUSE = 0.1
# Audio between two utterances that is in no text is of their ends, unless there is too much.
_UNMATCHED_SECONDS, _UNMATCHED_PER_TOKEN = 1.5, 0.3
_DELAY_SECONDS = 0.5
_HEARD_SHARE = 0.5  # of the tokens of an utterance
_UNHEARD = -20.0  # score of tokens between chunks
_CUE_SECONDS = 1.0  # before and after a cue of subtitles, within which its words may be anywhere
_NUMBER = re.compile(r"(\d+(?:[.,:]\d+)*)((?:st|nd|rd|th|ste|de|er|e)\b)?")  # 3.5, 10:30, 2nd
_YEAR = re.compile(r"1[1-9]\d\d|20\d\d")
_ORDINALS = ("de", "en", "fr", "nl")  # with such endings; num2words has their years, too
_DECIMAL_POINT = frozenset({"am", "bn", "cy", "en", "he", "ja", "kn", "ko", "te", "th"})


@dataclass(frozen=True, slots=True)
class Transcript:
    """A recording with its whole text, as lines."""

    source: Source
    lines: list[str]  # empty ones end paragraphs
    prompt: Prompt
    cues: list[tuple[float, float]]  # of each line, when it is about to be spoken, in seconds


def transcripts(path: Path, default: Prompt) -> Iterator[Transcript | RejectedRow]:
    """Yield the recordings of a manifest, of a folder, or an audio file with a text beside it.

    The times of subtitles may be wrong, and their cues end within sentences: they are rough starts.
    """
    if path.suffix.lower() in AUDIO_SUFFIXES:
        rows = folder.FORMAT.read(path.parent, ReadOptions(default))
        audio = str(path.absolute())
        utterances = [(row.id, row) for row in rows if row.audio == audio]
    else:
        utterances = named(path, prompt=default)
    for _, group in itertools.groupby(utterances, lambda item: _recording(*item)):
        names, rows = zip(*group, strict=True)
        row = rows[0]
        if isinstance(row, RejectedRow):
            yield row
            continue
        source, cues = source_of(names[0], row), [(0.0, math.inf) for _ in rows]
        if len(rows) > 1:
            source = replace(source, offset=0.0, duration=None)
            cues = [(row.offset, row.offset + row.duration) for row in rows]
        texts = [(text, cue) for row, cue in zip(rows, cues, strict=True) for text in _lines(row)]
        lines, cues = [text for text, _ in texts], [cue for _, cue in texts]
        yield Transcript(source, lines, source.prompt or default, cues)


def _recording(name: str, row: Utterance) -> tuple[str, ...]:
    """Return what the cues of a file of subtitles have in common."""
    if isinstance(row, FileUtterance) and row.origin.endswith(folder.SUBTITLES):
        return row.audio, row.origin, str(row.channel)
    return (name,)


def _lines(row: Utterance) -> list[str]:
    if isinstance(row, CutUtterance):
        return [part.text or "" for part in row.value.supervisions]
    if not isinstance(row, FileUtterance):
        return []
    if not row.origin.endswith(".txt"):
        return row.text.splitlines()
    lines, last = [], 0
    for number, line in numbered_lines(Path(row.origin)):
        lines += [""] * (number > last + 1) + [line]
        last = number
    return lines


@dataclass(slots=True)
class _Word:
    text: str
    tokens: list[int]
    ends: bool  # whether it ends a sentence, a paragraph, or a line of a text without marks
    cue: tuple[float, float]  # seconds
    is_heard: bool = False
    start: float = 0.0  # seconds
    end: float = 0.0


class Segmenter:
    """Cuts recordings into utterances, with a model that has CTC."""

    def __init__(
        self,
        recognizer: Recognizer,
        tokenizer: Tokenizer,
        normalize: Callable[[str], str],
        *,
        punctuation: bool,
        longest: float,
    ) -> None:
        self._recognizer, self._tokenizer = recognizer, tokenizer
        # ``normalize`` makes plain words, which are aligned where the model writes no others.
        self._normalize, self._punctuation, self._longest = normalize, punctuation, longest
        pieces = tokenizer.pieces()
        self._spaces = [number for number, piece in enumerate(pieces) if piece == "\u2581"]
        self._costs = Costs()
        self._warned: set[str] = set()

    def segments(self, transcript: Transcript) -> list[dict[str, Any]]:
        """Return the rows of a journal of labels; one with a ``reason`` is left out."""
        prompt, source = transcript.prompt, checked(transcript.source)
        if source.problem is not None:
            raise ValueError(source.problem)
        spaces = prompt.target not in WITHOUT_SPACES
        words = self._words(transcript, prompt.target, spaces)
        tokens = [token for word in words for token in word.tokens]
        if not tokens:
            raise ValueError(f"{source.id}: the text must have words that the tokenizer knows.")
        with tempfile.TemporaryFile() as file:
            heard = self._listen(transcript, sorted(set(tokens)), file)
            alignment = _set_times(words, tokens, heard, self._costs)
        rows = []
        space = " " if spaces else ""
        for number, part in enumerate(_utterances(words, heard.speech, self._longest)):
            # The likelihood of the text by that of the likeliest tokens, as a mean of tokens.
            first, last = np.searchsorted(heard.times, [part.start, part.end])
            skipped = sum(len(word.tokens) for word in part.words if not word.is_heard)
            count = sum(len(word.tokens) for word in part.words)
            cost = float(alignment.costs[first:last].sum()) + self._costs.token * skipped
            row: dict[str, Any] = {
                "id": f"{source.id}#{number}",
                "audio_filepath": str(Path(source.audio).absolute()),
                "offset": round(source.offset + part.start, 3),
                "duration": round(part.duration, 3),
                "text": space.join(word.text for word in part.words),
                "source_lang": prompt.source,
                "target_lang": prompt.target,
                "pnc": prompt.punctuation,
                "confidence": round(math.exp(-cost / max(1, count)), 4),
                "truncated": False,
                **source.fields(),
            }
            if part.words and all(word.is_heard for word in part.words):
                times = np.clip([(x.start, x.end) for x in part.words], part.start, part.end)
                spans = zip(part.words, (times - part.start).round(3).tolist(), strict=True)
                row["words"] = [{"word": x.text, "start": a, "end": b} for x, (a, b) in spans]
            if not part.words:
                row["reason"] = NO_TEXT
            elif part.heard_share() < _HEARD_SHARE:
                row |= {"reason": NOT_SPOKEN, "confidence": 0.0}
            elif part.duration > self._longest:
                row["reason"] = TOO_LONG
            rows.append(row)
        return rows

    def _words(self, transcript: Transcript, language: str, spaces: bool) -> list[_Word]:
        split = [line.split() if spaces else split_words(line) for line in transcript.lines]
        count = sum(map(len, split))
        marked = sum(_ENDS.search(word) is not None for words in split for word in words)
        is_marked = marked * _MOST_WORDS >= count
        result: list[_Word] = []
        for words, cue in zip(split, transcript.cues, strict=True):
            for word in words:
                ends = is_marked and _ENDS.search(word) is not None
                result.append(_Word(word, self._encoded(word, language), ends, cue))
            if result and (not words or not is_marked):
                result[-1].ends = True
        return result

    def _encoded(self, word: str, language: str) -> list[int]:
        """Return the tokens of a word as the model writes it, as far as it can."""
        digits = set(re.findall(r"\d", word))
        if not all(self._known(self._tokenizer.encode(digit, language)) for digit in digits):
            word = self._spelled(word, language)
        plain = self._normalize(word)
        tokens: list[int] = []
        for text in (word, plain, plain.upper())[0 if self._punctuation else 1 :]:
            tokens = self._tokenizer.encode(text, language)
            if not self._tokenizer.count_unknown(tokens):
                break
        return self._known(tokens)

    def _known(self, tokens: list[int]) -> list[int]:
        unknown = self._tokenizer.count_unknown
        return [x for x in tokens if x not in self._spaces and not unknown([x])]

    def _spelled(self, word: str, language: str) -> str:
        try:
            return spell_numbers(word, language)
        except ImportError:
            remedy = "run `pip install num2words`, and choose another OUT"
        except (NotImplementedError, LookupError, TypeError):
            remedy = f"num2words lacks the language {language}: write numbers as words"
        if remedy not in self._warned:
            self._warned.add(remedy)
            _log.warning("the model writes no digits, so that numbers are not aligned: %s", remedy)
        return word

    def _listen(self, transcript: Transcript, classes: list[int], file: Any) -> "_Heard":
        """Write the scores of a recording to a file: 2 bytes for each class and frame."""
        source, rate = transcript.source, self._recognizer.sample_rate
        load = partial(open_stream, source.audio, rate, offset=source.offset)
        load = partial(load, duration=source.duration, channels=source.channels)
        request = Request(source.id, load, transcript.prompt)
        times, speech = [np.zeros(0)], np.zeros(0, dtype=bool)
        between = np.full(len(classes) + 1, _UNHEARD, dtype=np.float16)
        between[0] = 0.0
        column = {token: number for number, token in enumerate(classes, 1)}
        seconds = self._recognizer.frame_seconds
        for chunk, audio, scores in self._recognizer.ctc_scores(request):
            blank = scores[:, [-1, *self._spaces]].amax(1, keepdim=True)
            chosen = np.concatenate([blank.numpy(), scores[:, classes].numpy()], axis=1)
            file.write(np.maximum(chosen, -1e4).astype(np.float16).tobytes() + between.tobytes())
            start, first = chunk.start / rate, round(chunk.start / rate / HOP_SECONDS)
            # A frame without tokens: the words of two chunks, perhaps minutes apart, are different.
            times.append(np.minimum(start + seconds * np.arange(len(chosen) + 1), chunk.end / rate))
            part = is_speech(loudness(audio, rate))
            speech = np.pad(speech, (0, max(0, first + len(part) - len(speech))))
            speech[first : first + len(part)] = part
        if not file.tell():
            raise ValueError(f"{source.id}: no speech is heard.")
        file.flush()
        shape = file.tell() // between.nbytes, len(between)
        scores = np.memmap(file, dtype=np.float16, mode="r", shape=shape)
        return _Heard(scores, column, np.concatenate(times), speech, seconds)


def spell_numbers(word: str, language: str) -> str:
    """Return a word with its numbers as they are read aloud, for models that write no digits."""
    from num2words import num2words

    def read(text: str, kind: str = "cardinal") -> str:
        return num2words(int(text) if text.isdigit() else Decimal(text), lang=language, to=kind)

    def spell(match: re.Match[str]) -> str:
        number, suffix = match.groups(default="")
        separator = "," if language in _DECIMAL_POINT else r"\."
        number = re.sub(rf"{separator}(?=\d{{3}}(?!\d))", "", number)
        parts = re.split("[.,:]", number)
        if language in _ORDINALS and number.isdigit() and (suffix or _YEAR.fullmatch(number)):
            return read(number, "ordinal" if suffix else "year")
        if len(parts) == 2 and ":" not in number:
            return read(".".join(parts)) + suffix
        # Codes are read digit by digit; long numbers, too, which some languages lack.
        texts = (x for y in parts for x in (y if y[0] == "0" or len(y) > 9 else [y]))
        return " ".join(map(read, texts)) + suffix

    return _NUMBER.sub(spell, word)


@dataclass(frozen=True, slots=True)
class _Heard:
    scores: np.ndarray  # float16 (T, C) of `align`
    column: dict[int, int]  # class of each token
    times: np.ndarray  # when each frame begins, in seconds
    speech: np.ndarray  # bool (hops,)
    frame_seconds: float


def _set_times(words: list[_Word], tokens: list[int], heard: _Heard, costs: Costs) -> Alignment:
    """Align the words, and set the times of those that are heard."""
    firsts = np.cumsum([0, *(len(word.tokens) for word in words)])
    begins = [int(first) for first, word in zip(firsts, words, strict=False) if word.tokens]
    expected = None
    if any(word.cue[1] < math.inf for word in words):
        cues = np.array([word.cue for word in words for _ in word.tokens])
        cues += [-_CUE_SECONDS, _CUE_SECONDS]
        expected = np.searchsorted(heard.times[:-1], cues)
    classes = [heard.column[token] for token in tokens]
    alignment = align(heard.scores, classes, begins, costs, expected=expected)
    groups, timed = [], []
    frames = heard.times / heard.frame_seconds
    for first, word in zip(firsts, words, strict=False):
        spans = alignment.spans[first : first + len(word.tokens)]
        if spans and spans[0] is not None and spans[-1] is not None:
            begin, end = frames[spans[0][0]], frames[spans[-1][1] - 1] + 1
            groups.append(WordGroup([word.text], float(begin), float(end)))
            timed.append(word)
    times = group_times(groups, heard.speech, heard.frame_seconds)
    for word, (start, end) in zip(timed, times, strict=True):
        word.is_heard, word.start, word.end = True, start, max(start + HOP_SECONDS, end)
    return alignment


class _Utterance:
    def __init__(self, words: list[_Word]) -> None:
        self.words = words
        heard = [number for number, word in enumerate(words) if word.is_heard]
        self.is_heard = bool(heard)
        self.start = words[heard[0]].start if heard else 0.0  # seconds
        self.end = words[heard[-1]].end if heard else 0.0
        first, last = (heard[0], heard[-1] + 1) if heard else (0, 0)
        # Seconds of speech at each end that may be of words of it, which are not aligned.
        self.before, self.after = (
            _UNMATCHED_SECONDS + _UNMATCHED_PER_TOKEN * sum(len(word.tokens) for word in part)
            for part in (words[:first], words[last:])
        )

    @property
    def duration(self) -> float:
        return self.end - self.start

    def heard_share(self) -> float:
        heard = sum(len(word.tokens) for word in self.words if word.is_heard)
        return heard / max(1, sum(len(word.tokens) for word in self.words))

    def halves(self, longest: float) -> "Iterator[_Utterance]":
        """Yield its parts between its longest pauses, none longer than allowed if possible."""
        heard = [number for number, word in enumerate(self.words) if word.is_heard]
        pauses = [
            (self.words[b].start - self.words[a].end, b) for a, b in itertools.pairwise(heard)
        ]
        pause, place = max(pauses, default=(0.0, 0))
        if self.duration <= longest or pause < _LEAST_PAUSE:
            yield self
            return
        for words in (self.words[:place], self.words[place:]):
            yield from _Utterance(words).halves(longest)


def _utterances(words: list[_Word], speech: np.ndarray, longest: float) -> list[_Utterance]:
    """Cut at ends of sentences where there is a pause, and long sentences at their pauses."""
    sentences: list[_Utterance] = []
    begin = 0
    for number, word in enumerate(words, 1):
        if word.ends or number == len(words):
            sentences.append(_Utterance(words[begin:number]))
            begin = number
    joined: list[_Utterance] = []
    for sentence in sentences:
        last = joined[-1] if joined else None
        if last is not None and last.is_heard and sentence.is_heard:
            is_close = sentence.start - last.end < _PAUSE_SECONDS
            if is_close and sentence.end - last.start <= longest:
                joined[-1] = _Utterance(last.words + sentence.words)
                continue
        joined.append(sentence)
    result = [part for utterance in joined for part in utterance.halves(longest)]
    heard = [part for part in result if part.is_heard]
    _place_ends(heard, speech)
    return result + _without_text(heard, speech)


def _without_text(utterances: list[_Utterance], speech: np.ndarray) -> list[_Utterance]:
    """Return the stretches between utterances that have speech, as utterances without words."""
    starts = [*(part.start for part in utterances), len(speech) * HOP_SECONDS]
    result = []
    for start, end in zip([0.0, *(part.end for part in utterances)], starts, strict=True):
        part = speech[round(start / HOP_SECONDS) : round(end / HOP_SECONDS)]
        if part.sum() * HOP_SECONDS >= _UNMATCHED_SECONDS:
            result.append(_Utterance([]))
            result[-1].start, result[-1].end = start, end
    return result


def _place_ends(utterances: list[_Utterance], speech: np.ndarray) -> None:
    """Move ends to pauses, with some background: words at ends may be wrong or missing."""
    for before, after in itertools.pairwise([None, *utterances, None]):
        begin = 0.0 if before is None else before.end
        end = len(speech) * HOP_SECONDS if after is None else after.start
        pauses = _pauses(speech, begin, end)
        if before is not None and after is not None:
            room = before.after, after.before
            fitting = [x for x in pauses if x[0] - begin <= room[0] and end - x[1] <= room[1]]
            pauses = [max(fitting, key=lambda x: x[1] - x[0])] if fitting else pauses
        if not pauses:
            continue
        (first, first_end), (last, last_end) = pauses[0], pauses[-1]
        if before is not None and before.start < first <= begin + before.after:
            before.end = first + min(MARGIN_SECONDS, (first_end - first) / 2)
        if after is not None and end - after.before <= last_end < after.end:
            after.start = last_end - min(MARGIN_SECONDS, (last_end - last) / 2)


def _pauses(speech: np.ndarray, begin: float, end: float) -> list[tuple[float, float]]:
    """Return the stretches without speech that touch the time between two words."""
    # Tokens are also emitted in the silence before a word, or long after it.
    first = max(0, round((begin - _DELAY_SECONDS) / HOP_SECONDS))
    part = speech[first : max(first, round((end + _DELAY_SECONDS) / HOP_SECONDS))]
    edges = np.flatnonzero(np.diff(np.concatenate([[True], part, [True]]).astype(np.int8)))
    pairs = ((first + edges) * HOP_SECONDS).reshape(-1, 2).tolist()
    touching = [(a, b) for a, b in pairs if b > begin and a < end]
    return [(a, b) for a, b in touching if b - a >= _LEAST_PAUSE]
