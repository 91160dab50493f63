"""Reads lengths of utterances from manifests or lists, without audio where possible."""

import csv
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from lhotse import MonoCut, SupervisionSegment
from lhotse.cut import Cut

from effasr.data.audio.waveform import AudioError, duration_at, name_at, samples_in
from effasr.data.config import DataConfig
from effasr.data.filters.rules import (
    DURATION_RULES,
    EMPTY_TEXT,
    EMPTY_TRANSLATION,
    FRAME_RULES,
    TOKEN_RULES,
    Dropped,
    Lengths,
    Limits,
    Reason,
    RejectedUtterance,
    check_copies,
    require,
    text_of,
)
from effasr.data.index.base_corpus import nothing_left
from effasr.data.index.selection import Selection, Selector, UtteranceColumns
from effasr.data.index.utterance_table import number_languages
from effasr.data.manifest import cuts, nemo
from effasr.data.manifest.cuts import check_supervisions, prompt_of, prompt_values
from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.reader import file_of_lines, named
from effasr.data.manifest.row import ManifestRow, spaced
from effasr.data.manifest.utterance import FileUtterance, ReadOptions, Utterance, custom_fields
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer

PROMPT_TOKENS = 5
"""Default number of tokens before the text, as in the prompts of `effasr tokenizer`."""
BYTES_PER_TOKEN = 3
"""Estimate without a tokenizer: about that of 1,000 pieces of English, and of Chinese, where a
token is a character of three bytes."""
TOKENS_PER_SECOND = 3.6
"""Estimate where only durations are known: LibriSpeech and Earnings-22 with 5,000 pieces."""

_DURATION_COLUMNS = ("duration_seconds", "duration")
_MAX_TOKENS = 2**30  # counts are clipped to this: no budget is as large

_Position = tuple[int, int]  # number of the list, and line


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Utterances of lists at every speed, without those that no token budget allows."""

    paths: tuple[str, ...]
    columns: UtteranceColumns  # where sources are numbers of lists
    by_text: int  # number of texts whose tokens are estimated from characters
    by_duration: int  # number of those estimated from durations
    dropped: tuple[tuple[int, Dropped], ...]  # each with the number of utterances before it
    speeds: tuple[float, ...]  # at which every utterance is listed


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

    A path is a manifest of any format, or a file of

    - JSON lines with ``duration``, and ``num_tokens`` or ``text``;
    - a table, see `_read_table`;
    - durations alone, one a line.

    With a tokenizer, texts are checked and tokenized as in training. Without one, the number of
    tokens is ``num_tokens``, or else one per `BYTES_PER_TOKEN` of the text; in a table without
    tokens, `TOKENS_PER_SECOND`. Audio files are opened only for lines without a duration, to read
    the header. What ``limits`` exclude is dropped, except for the token budget.
    """
    reader = _Reader(paths, limits, tokenizer, prompt_tokens, language, progress)
    for source, path in enumerate(paths):
        reader.read(source, Path(path))
    return reader.listing()


class _Reader:
    """Builds a listing in flat arrays, so that millions of utterances fit in memory."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        limits: Limits,
        tokenizer: Tokenizer | None,
        prompt_tokens: int,
        language: str,
        progress: Callable[[int], None],
    ) -> None:
        self._paths = tuple(map(str, paths))
        # As in training, which applies it to the table: it may be derived from the lengths.
        self._limits = replace(limits, token_budget=None)
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        default = Prompt(language, language)
        self._options = ReadOptions(
            default, untranscribed=limits.text != "required", text_column=limits.text_column
        )
        self._progress, self._count = progress, 0
        # Cuts are made only where more than their length is used.
        self._checks_texts = (
            tokenizer is not None
            or bool(limits.languages)
            or limits.characters is not None
            or limits.max_characters_per_second is not None
        )
        self._positions = array("i")
        self._names: list[str | None] = []
        self._seconds, self._frames = array("d"), array("i")
        self._texts, self._prompts, self._prompt_ids = array("q"), array("q"), array("q")
        self._different_prompts: dict[Prompt, int] = {}
        self._by_text = self._by_duration = 0
        self._dropped: list[tuple[int, Dropped]] = []

    def read(self, source: int, path: Path) -> None:
        options = self._options
        if (file := file_of_lines(path)) is None:
            utterances = named(
                path,
                prompt=options.default,
                untranscribed=options.untranscribed,
                text_column=options.text_column,
            )
            for line, (name, utterance) in enumerate(utterances, 1):
                self._add_utterance(name, (source, line), utterance)
                self._report()
            return
        lines = numbered_lines(file)
        first = next(lines, None)
        if first is None:
            return
        lines = chain([first], lines)
        if first[1].lstrip().startswith("{") or ".jsonl" in file.suffixes:
            rows = (ManifestRow.parse(text, file, line) for line, text in lines)
        else:
            rows = _read_table(file, lines)
        for row in rows:
            self._add_row((source, row.line), row)
            self._report()

    def listing(self) -> Listing:
        positions = np.array(self._positions, dtype=np.int32).reshape(-1, 2)
        prompt_ids = np.array(self._prompt_ids, dtype=np.int64)
        prompts = np.array(self._prompts, dtype=np.int64)
        columns = UtteranceColumns(
            np.array(self._seconds, dtype=np.float64),
            np.array(self._frames, dtype=np.int32),
            (np.array(self._texts, dtype=np.int64) + prompts).astype(np.int32),
            prompts.astype(np.int32),
            positions[:, 0],
            lambda: number_languages(self._different_prompts)[prompt_ids],
            lambda index: (self._name(self._names[index], positions[index]), ""),
        )
        counts, dropped = (self._by_text, self._by_duration), tuple(self._dropped)
        speeds = self._limits.speed_perturbation
        return Listing(self._paths, columns, *counts, dropped, speeds)

    def _name(self, name: str | None, position: Sequence[int]) -> str:
        """Return the name of an utterance, or its file and line."""
        source, line = position
        return name or f"{self._paths[source]}:{line}"

    def _report(self) -> None:
        self._count += 1
        self._progress(self._count)

    def _add(
        self,
        name: str | None,
        position: _Position,
        seconds: float,
        prompt: Prompt,
        text_tokens: int,
        prompt_tokens: int,
        speeds: Sequence[float] | None = None,
    ) -> None:
        """Add an utterance at these speeds, by default at every speed, as far as it is usable."""
        prompt_id = self._different_prompts.setdefault(prompt, len(self._different_prompts))
        for speed in self._limits.speed_perturbation if speeds is None else speeds:
            lengths = Lengths(duration_at(seconds, speed), text=text_tokens, prompt=prompt_tokens)
            # Equal neighbours, which need a blank between, are not known without the tokens.
            lengths.ctc_frames, lengths.monotonic = text_tokens, prompt.monotonic
            copy = name and name_at(name, speed)
            try:
                # Drop what training drops, as far as lengths show.
                limits = self._limits
                require(DURATION_RULES, lengths, limits)
                if not lengths.text and limits.text == "required":
                    raise RejectedUtterance(Reason.EMPTY_TEXT, EMPTY_TEXT)
                if not lengths.text and limits.text == "optional" and not lengths.monotonic:
                    raise RejectedUtterance(Reason.EMPTY_TEXT, EMPTY_TRANSLATION)
                lengths.frames = limits.framing.frames(samples_in(lengths.seconds))
                require((*FRAME_RULES, *TOKEN_RULES), lengths, limits)
            except RejectedUtterance as error:
                copy = self._name(copy, position)
                self._drop(Dropped(copy, error.reason, str(error), "", lengths.seconds))
                continue
            self._names.append(copy)
            self._positions.extend(position)
            self._seconds.append(lengths.seconds)
            self._frames.append(lengths.frames)
            self._texts.append(text_tokens)
            self._prompts.append(prompt_tokens)
            self._prompt_ids.append(prompt_id)

    def _drop(self, drop: Dropped) -> None:
        self._dropped.append((len(self._names), drop))

    def _add_row(self, position: _Position, row: ManifestRow) -> None:
        """Add a line of JSON or of a table."""
        seconds = row.seconds("duration")
        if seconds is None and "audio_filepath" not in row.values:
            raise row.error(
                "`duration` is missing: every line needs it, in seconds, where it names no "
                "audio file (`audio_filepath`).",
                "duration",
            )
        if seconds is None or self._limits.timestamps != "none":
            parse = cuts.parse if "supervisions" in row.values else nemo.FORMAT.parse
            utterance = parse(row, self._options)
            self._add_utterance(utterance.id, position, utterance)
            return
        name, count = row.optional_string("id"), _num_tokens(row)
        if "supervisions" in row.values:
            row = _supervised(row)
        prompt = row.prompt(self._options.default)
        if "text" in row.values and (count is None or self._checks_texts):
            text = row.transcript("text")
            self._add_text(name, position, seconds, text, prompt, row.origin)
        elif self._limits.text == "ignored":
            self._add(name, position, seconds, prompt, 0, 0)
        elif count is not None:
            tokens = min(count, _MAX_TOKENS)
            self._add(name, position, seconds, prompt, tokens, self._prompt_tokens)
        elif "num_tokens" in row.values:
            self._by_duration += len(self._limits.speed_perturbation)
            tokens = max(1, round(min(TOKENS_PER_SECOND * seconds, _MAX_TOKENS)))
            self._add(name, position, seconds, prompt, tokens, self._prompt_tokens)
        elif self._options.untranscribed:
            self._add(name, position, seconds, prompt, 0, 0)
        else:
            raise row.error("`text` and `num_tokens` are missing: every line needs one of them.")

    def _add_utterance(self, name: str, position: _Position, utterance: Utterance) -> None:
        plain = self._limits.timestamps == "none"
        if plain and isinstance(utterance, FileUtterance) and utterance.duration is not None:
            lengths, prompt, origin = utterance.duration, utterance.prompt, utterance.origin
            self._add_text(name, position, lengths, utterance.text, prompt, origin)
            return
        try:
            cut = utterance.cut(name)
        except AudioError as error:
            for speed in self._limits.speed_perturbation:
                copy = name_at(name, speed)
                self._drop(Dropped(copy, error.problem, str(error), utterance.audio))
            return
        self._add_text(name, position, cut.duration, text_of(cut), prompt_of(cut), name, cut)

    def _add_text(
        self,
        name: str | None,
        position: _Position,
        seconds: float,
        text: str,
        prompt: Prompt,
        origin: str,
        cut: Cut | None = None,
    ) -> None:
        """Check a text as in training and count its tokens, or estimate them."""
        text = spaced(text)
        is_used = self._limits.text != "ignored" and bool(text.strip())
        if self._options.untranscribed and not is_used:
            self._add(name, position, seconds, prompt, 0, 0)
            return
        lengths, speeds = (_estimate(text), self._prompt_tokens), self._limits.speed_perturbation
        tokens = None
        if self._checks_texts:
            speech = SupervisionSegment("", "", 0.0, seconds, text=text, language=prompt.source)
            cut = cut or MonoCut(
                *(name or origin, 0.0, seconds, 0),
                supervisions=[speech],
                custom=custom_fields(prompt, ()),
            )
            tokens, usable, dropped = check_copies(cut, "", self._limits, self._tokenizer)
            for drop in dropped:
                self._drop(drop)
            speeds = [speeds[number] for number in usable]
        if tokens is None:
            self._by_text += len(speeds)
        else:
            lengths = len(tokens.text), len(tokens.prompt)
        self._add(name, position, seconds, prompt, *lengths, speeds)


def _estimate(text: str) -> int:
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def _num_tokens(row: ManifestRow) -> int | None:
    value = row.values.get("num_tokens")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        problem = f"must be an integer from 0 on, but is {str(value)[:60]!r}."
        raise row.error(f"`num_tokens` {problem}", "num_tokens")
    return value


def _supervised(row: ManifestRow) -> ManifestRow:
    """Return the fields of a lhotse cut's only supervision under the names of NeMo's manifests."""
    supervisions = row.values["supervisions"]
    check_supervisions(row, "a cut", supervisions)
    if not isinstance(supervisions[0], dict):
        raise row.error("a supervision must be an object.", "supervisions")
    supervision, custom = supervisions[0], row.values.get("custom")
    spoken = replace(row, values=supervision).optional_string("language")
    fields = prompt_values(custom if isinstance(custom, dict) else None, spoken)
    fields |= {"text": supervision["text"]} if "text" in supervision else {}
    return replace(row, values=fields)


def _read_table(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[ManifestRow]:
    """Read durations in seconds, one a line, or a table separated by tabs or commas.

    The header of a table names ``duration_seconds`` or ``duration``, and may name ``id`` and
    ``num_tokens`` or a column that begins with ``n_tokens``, whose cells may be empty. In a list of
    durations ``#`` begins a comment.
    """
    first, header = next(lines)
    if header.lstrip().startswith("#") or isinstance(_number(header.split("#")[0]), float):
        for line, text in chain([(first, header)], lines):
            if value := text.split("#")[0].strip():
                values = {"duration": _number(value), "num_tokens": None}
                yield ManifestRow(values, path, line, f"{path}:{line}")
        return
    delimiter = "\t" if "\t" in header else ","
    columns = [column.strip() for column in _cells(header, delimiter, f"{path}:{first}")]
    duration = next((name for name in _DURATION_COLUMNS if name in columns), None)
    if duration is None:
        raise ValueError(
            f"{path}:{first}: must be a JSON object, a number of seconds, or a header with "
            f"`duration_seconds` or `duration`, but is {header.strip()[:60]!r}."
        )
    counts = (name for name in columns if name == "num_tokens" or name.startswith("n_tokens"))
    tokens = next(counts, None)
    for line, text in lines:
        origin = f"{path}:{line}"
        cells = _cells(text, delimiter, origin)
        if len(cells) != len(columns):
            raise ValueError(
                f"{origin}: must have {len(columns)} columns, as the header has, but has "
                f"{len(cells)}."
            )
        row = dict(zip(columns, map(str.strip, cells), strict=True))
        count = row.get(tokens or "") or None
        values = {
            "id": row.get("id"),
            "duration": _number(row[duration]),
            "num_tokens": int(count) if count and re.fullmatch("[0-9]{1,18}", count) else count,
        }
        yield ManifestRow(values, path, line, origin)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _cells(line: str, delimiter: str, origin: str) -> list[str]:
    # In tab-separated tables quotes belong to the text, as most programs write them.
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    try:
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter, quoting=quoting))
    except csv.Error as error:
        raise ValueError(f"{origin}: not a line of a table ({error}).") from error


def select(
    listing: Listing,
    limits: Limits,
    config: DataConfig,
    *,
    transducer: bool = False,
    sources: Sequence[int] | None = None,
) -> Selection:
    """Drop what `Corpus.load` drops for budgets and rates; ``sources``: that of each list."""
    source_of_list = np.array([0] * len(listing.paths) if sources is None else sources, np.int64)
    columns = listing.columns
    columns = replace(columns, sources=source_of_list[columns.sources])
    selector = Selector(columns, config, limits, listing.dropped)
    if not selector.is_kept.any():
        raise nothing_left(listing.paths, "no utterance can be planned", selector.dropped)
    selection = selector.select(transducer=transducer)
    if selection.mixture is not None:
        selection.mixture.check(source_of_list)
    return selection
