"""Reads lengths of utterances from manifests or lists, without audio where possible."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from lhotse import MonoCut, SupervisionSegment
from lhotse.cut import Cut

from effasr.data.audio.speed_perturbation import duration_at, name_at
from effasr.data.audio.waveform import AudioError
from effasr.data.filters.rules import Dropped, Limits, check_copies, text_of
from effasr.data.manifest import nemo
from effasr.data.manifest.cuts import CUTS_FILE
from effasr.data.manifest.fields import (
    optional_text,
    prompt_fields,
    seconds_field,
    transcript_field,
)
from effasr.data.manifest.lines import check_file, numbered_lines, parse_object
from effasr.data.manifest.reader import named, request
from effasr.data.manifest.utterance import FileUtterance, Utterance, custom_fields
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.planning.tables import MOST_TOKENS, Row, is_number, read_durations, read_table

PROMPT_TOKENS = 5
"""Default number of tokens before the text, as in the prompts of `effasr tokenizer`."""
BYTES_PER_TOKEN = 3
"""Estimate without a tokenizer: about that of 1,000 pieces of English, and of Chinese, where a
token is a character of three bytes."""
TOKENS_PER_SECOND = 3.6
"""Estimate where only durations are known: LibriSpeech and Earnings-22 with 5,000 pieces."""

_Place = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Utterances of lists at every speed, before any is dropped for its length.

    Attributes:
        paths: The lists.
        places: int32 (n, 2), index of the list and line number of each utterance.
        names: Names of the utterances; None for an utterance without one.
        seconds: float64 (n,), durations.
        texts: int64 (n,), tokens of the texts; 0 for an utterance that is used without one.
        prompts: int64 (n,), tokens of the prompts.
        request_ids: int64 (n,), index of each utterance's request in ``requests``.
        requests: The different requests, in order of first appearance.
        by_text: Number of ``texts`` estimated from characters.
        by_duration: Number of ``texts`` estimated from durations.
        dropped: Utterances dropped for their text or audio.
        speeds: Speeds at which every utterance is listed.
    """

    paths: tuple[str, ...]
    places: np.ndarray
    names: Sequence[str | None]
    seconds: np.ndarray
    texts: np.ndarray
    prompts: np.ndarray
    request_ids: np.ndarray
    requests: tuple[Prompt, ...]
    by_text: int
    by_duration: int
    dropped: tuple[Dropped, ...]
    speeds: tuple[float, ...] = (1.0,)

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def monotonic(self) -> np.ndarray:
        """Whether each text follows the speech in order: bool (n,)."""
        return np.array([one.monotonic for one in self.requests], dtype=bool)[self.request_ids]

    @property
    def languages(self) -> np.ndarray:
        """Number of the language of each text: int64 (n,)."""
        _, numbers = np.unique([one.target for one in self.requests], return_inverse=True)
        return numbers[self.request_ids]

    def name(self, index: int) -> str:
        """Return the name of an utterance, or its file and line."""
        source, line = self.places[index].tolist()
        return self.names[index] or f"{self.paths[source]}:{line}"


def read_listing(
    paths: Sequence[str | Path],
    *,
    limits: Limits,
    tokenizer: Tokenizer | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    language: str = "en",
    progress: Callable[[int], None] = lambda count: None,
) -> Listing:
    """Read the lengths of utterances.

    A path is a manifest of any kind that `effasr.data.manifest.reader.read` takes, or a file of

    - JSON lines with ``duration``, and ``num_tokens`` or ``text``;
    - a table, see `effasr.planning.tables.read_table`;
    - durations alone, one a line.

    With a tokenizer, texts are checked and tokenized as in training. Without one, the number of
    tokens is ``num_tokens``, or else one per `BYTES_PER_TOKEN` of the text; in a table without
    tokens, `TOKENS_PER_SECOND`. Audio files are opened only for lines without a duration, to read
    the header.

    Args:
        paths: Manifests and lists.
        limits: Limits on texts, see `effasr.data.filters.rules.check`, and the speeds at which
            every utterance is listed.
        tokenizer: Tokenizer of texts and prompts; None to estimate.
        prompt_tokens: Tokens of a prompt if there is no tokenizer.
        language: Default language of utterances.
        progress: Called with the number of utterances read so far.

    Raises:
        ValueError: A line is malformed or incomplete; the message names file and line.
    """
    reader = _Reader(limits, tokenizer, prompt_tokens, language, progress)
    for source, path in enumerate(paths):
        reader.read(source, Path(path))
    return reader.listing(tuple(map(str, paths)))


class _Reader:
    """Builds a listing in flat arrays, so that millions of utterances fit in memory."""

    def __init__(
        self,
        limits: Limits,
        tokenizer: Tokenizer | None,
        prompt_tokens: int,
        language: str,
        progress: Callable[[int], None],
    ) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._language = language
        self._progress, self._read = progress, 0
        self._untranscribed = limits.text != "required"
        # Cuts are made only where more than their length is used.
        self._looks_at_texts = (
            tokenizer is not None
            or bool(limits.languages)
            or limits.characters is not None
            or limits.max_characters_per_second is not None
        )
        self._places = array("i")
        self._names: list[str | None] = []
        self._seconds = array("d")
        self._texts = array("q")
        self._prompts = array("q")
        self._request_ids = array("q")
        self._requests: dict[Prompt, int] = {}
        self._by_text = 0
        self._by_duration = 0
        self._dropped: list[Dropped] = []

    def read(self, source: int, path: Path) -> None:
        """Read one manifest or list."""
        file = path / CUTS_FILE
        if path.is_dir() and not file.is_file():
            utterances = named(path, language=self._language, untranscribed=self._untranscribed)
            for line, (name, utterance) in enumerate(utterances, 1):
                self._add_utterance(name, (source, line), utterance)
                self._count()
            return
        file = file if path.is_dir() else path
        check_file(file)
        lines = numbered_lines(file)
        first = next(lines, None)
        if first is None:
            return
        lines = chain([first], lines)
        start = first[1].lstrip()
        if start.startswith("{") or ".jsonl" in file.suffixes:
            self._add_objects(source, file, lines)
        elif start.startswith("#") or is_number(start.split("#")[0]):
            self._add_rows(source, read_durations(file, lines))
        else:
            self._add_rows(source, read_table(file, lines))

    def listing(self, paths: tuple[str, ...]) -> Listing:
        """Return what was read so far."""
        return Listing(
            paths=paths,
            places=np.array(self._places, dtype=np.int32).reshape(-1, 2),
            names=self._names,
            seconds=np.array(self._seconds, dtype=np.float64),
            texts=np.array(self._texts, dtype=np.int64),
            prompts=np.array(self._prompts, dtype=np.int64),
            request_ids=np.array(self._request_ids, dtype=np.int64),
            requests=tuple(self._requests),
            by_text=self._by_text,
            by_duration=self._by_duration,
            dropped=tuple(self._dropped),
            speeds=self._limits.speed_perturbation,
        )

    def _count(self) -> None:
        self._read += 1
        self._progress(self._read)

    def _add(
        self,
        name: str | None,
        place: _Place,
        seconds: float,
        asked: Prompt,
        text: int,
        prompt: int,
        speeds: Sequence[float] | None = None,
    ) -> None:
        """Add an utterance at these speeds, by default at every speed."""
        request_id = self._requests.setdefault(asked, len(self._requests))
        for speed in self._limits.speed_perturbation if speeds is None else speeds:
            self._names.append(name and name_at(name, speed))
            self._places.extend(place)
            self._seconds.append(duration_at(seconds, speed))
            self._texts.append(text)
            self._prompts.append(prompt)
            self._request_ids.append(request_id)

    def _add_rows(self, source: int, rows: Iterator[Row]) -> None:
        asked = Prompt(self._language, self._language)
        for row in rows:
            tokens = row.tokens
            if tokens is None:
                self._by_duration += len(self._limits.speed_perturbation)
                tokens = _tokens_in(row.seconds)
            place = source, row.line
            if self._limits.text == "ignored":
                tokens, prompt = 0, 0
            else:
                prompt = self._prompt_tokens
            self._add(row.name, place, row.seconds, asked, tokens, prompt)
            self._count()

    def _add_objects(self, source: int, path: Path, lines: Iterator[tuple[int, str]]) -> None:
        for line, json_text in lines:
            self._count()
            origin = f"{path}:{line}"
            row = parse_object(json_text, origin)
            seconds = seconds_field(row, "duration", origin)
            if seconds is not None:
                self._add_object((source, line), seconds, row, origin)
                continue
            if "audio_filepath" not in row:
                raise ValueError(
                    f"{origin}: `duration` is missing: every line needs it, in seconds, where it "
                    "names no audio file (`audio_filepath`)."
                )
            for utterance in nemo.utterances(
                [(line, json_text)], path, self._language, untranscribed=self._untranscribed
            ):
                self._add_utterance(utterance.id, (source, line), utterance)

    def _add_object(
        self, place: _Place, seconds: float, row: Mapping[str, Any], origin: str
    ) -> None:
        """Add a JSON line with a duration."""
        name = optional_text(row, "id", origin)
        counted = _num_tokens(row, origin)
        if "supervisions" in row:
            row = _supervised(row, origin)
        asked = prompt_fields(row, origin, self._language)
        if self._untranscribed and self._lacks_text(row.get("text")):
            self._add(name, place, seconds, asked, 0, 0)
        elif "text" in row and (counted is None or self._looks_at_texts):
            text = transcript_field(row, "text", origin)
            self._add_text(name, place, seconds, text, asked, origin)
        elif counted is not None:
            tokens = min(counted, MOST_TOKENS)
            self._add(name, place, seconds, asked, tokens, self._prompt_tokens)
        else:
            raise ValueError(
                f"{origin}: `text` and `num_tokens` are missing: every line needs one of them."
            )

    def _add_utterance(self, name: str, place: _Place, utterance: Utterance) -> None:
        """Add an utterance of a manifest reader."""
        if isinstance(utterance, FileUtterance) and utterance.duration is not None:
            seconds, asked = utterance.duration, utterance.prompt
            if self._untranscribed and self._lacks_text(utterance.text):
                self._add(name, place, seconds, asked, 0, 0)
            else:
                self._add_text(name, place, seconds, utterance.text, asked, utterance.origin)
            return
        try:
            cut = utterance.cut(name)
        except AudioError as error:
            for speed in self._limits.speed_perturbation:
                copy = name_at(name, speed)
                self._dropped.append(Dropped(copy, error.problem, str(error), utterance.audio))
            return
        if self._untranscribed and self._lacks_text(text_of(cut)):
            self._add(name, place, cut.duration, request(cut), 0, 0)
        else:
            self._add_cut(name, place, cut, request(cut))

    def _lacks_text(self, text: object) -> bool:
        """Return whether an utterance with this text is used without one."""
        return self._limits.text == "ignored" or not isinstance(text, str) or not text.strip()

    def _add_text(
        self,
        name: str | None,
        place: _Place,
        seconds: float,
        text: str,
        asked: Prompt,
        origin: str,
    ) -> None:
        if not self._looks_at_texts:
            self._by_text += len(self._limits.speed_perturbation)
            self._add(name, place, seconds, asked, _estimate(text), self._prompt_tokens)
            return
        spoken = SupervisionSegment("", "", 0.0, seconds, text=text, language=asked.source)
        cut = MonoCut(
            name or origin, 0.0, seconds, 0, supervisions=[spoken], custom=custom_fields(asked)
        )
        self._add_cut(name, place, cut, asked)

    def _add_cut(self, name: str | None, place: _Place, cut: Cut, asked: Prompt) -> None:
        """Check a text as in training and count its tokens."""
        tokens, fitting, dropped = check_copies(cut, "", self._limits, self._tokenizer)
        self._dropped += dropped
        if tokens is None:
            self._by_text += len(fitting)
            lengths = _estimate(text_of(cut)), self._prompt_tokens
        else:
            lengths = len(tokens.text), len(tokens.prompt)
        speeds = [self._limits.speed_perturbation[number] for number in fitting]
        self._add(name, place, cut.duration, asked, *lengths, speeds)


def _tokens_in(seconds: float) -> int:
    """Estimate the tokens of an utterance from its duration."""
    return max(1, round(min(TOKENS_PER_SECOND * seconds, MOST_TOKENS)))


def _estimate(text: str) -> int:
    """Estimate the tokens of a text from its bytes."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def _num_tokens(row: Mapping[str, Any], origin: str) -> int | None:
    value = row.get("num_tokens")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
            f"{origin}: `num_tokens` must be an integer from 0 on, but is {str(value)[:60]!r}."
        )
    return value


def _supervised(row: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the fields of a lhotse cut's only supervision under the names of NeMo's manifests."""
    supervisions = row["supervisions"]
    count = len(supervisions) if isinstance(supervisions, list) else 0
    if count != 1 or not isinstance(supervisions[0], dict):
        raise ValueError(
            f"{origin}: a cut must have one supervision, but has {count}: use "
            "`cuts.trim_to_supervisions()`."
        )
    custom = row.get("custom")
    own: dict[str, Any] = dict(custom) if isinstance(custom, dict) else {}
    spoken = optional_text(supervisions[0], "language", origin)
    fields = {**own, "lang": spoken} if spoken else own
    text = {"text": supervisions[0]["text"]} if "text" in supervisions[0] else {}
    return {"source_lang": spoken or own.get("lang"), **fields, **text}
