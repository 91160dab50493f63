"""Folders of audio files with transcripts."""

import html
import logging
import math
import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap
from pathlib import Path

from effasr.data.languages import code_or_name
from effasr.data.manifest import nemo
from effasr.data.manifest.lines import check_text, numbered_lines
from effasr.data.manifest.row import absolute, spaced
from effasr.data.manifest.utterance import (
    FileUtterance,
    FolderFormat,
    ReadOptions,
    RejectedRow,
    Utterance,
    existing,
)
from effasr.data.manifest.walk import AUDIO_SUFFIXES, walk
from effasr.data.prompt import Prompt

# Parts of a recording from the subtitles or the word times beside it: SRT, WebVTT and CTM.


_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{2})[.,](\d{1,3})"
_TIMES = re.compile(rf"{_TIME}\s*-->\s*{_TIME}")
# Such as 00:00:01.5 -> 00:00:03: the beginning of a cue that cannot be read.
_UNREADABLE = re.compile(r"\d+:[\d:.,\s]*-+>")
_NO_CUES = ("WEBVTT", "NOTE", "STYLE", "REGION")  # paragraphs of WebVTT that are none
_MARKUP = re.compile(r"</?[a-z\d][^<>]*>|\{\\[^}]*\}", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d+|#x[\da-f]+|\w+);", re.IGNORECASE)
_GAP_S = 0.1  # between cues that follow each other at once
# Words of CTM that are closer, and no longer together, are one part.
_PAUSE_S, _LONGEST_S = 0.6, 20.0


@dataclass(frozen=True, slots=True)
class Part:
    """A text with its place in the recording."""

    start: float  # seconds
    end: float
    text: str
    channel: int | None = None  # from 0; None for all


def _cues(path: Path) -> Iterator[Part | str]:
    """Yield cues; captions that roll up, as YouTube writes them, show each line several times."""
    rows = list(_timed_lines(path))
    cues = [row for row in rows if not isinstance(row, str)]
    shown = [0, *starmap(_shown_before, pairwise(cues))]
    repeats = sum(map(bool, shown))
    is_rolling = repeats >= 3 and 2 * repeats > len(cues)  # else somebody says a thing twice
    for row in rows:
        if isinstance(row, str):
            yield row
            continue
        lines = row[2][shown.pop(0) if is_rolling else 0 :]
        if lines or not is_rolling:
            yield _part(row[0], row[1], lines, path)


_Cue = tuple[float, float, list[str]]


def _shown_before(previous: _Cue, cue: _Cue) -> int:
    """Return how many lines of a cue are the last ones of the cue that it follows at once."""
    most = min(len(previous[2]), len(cue[2])) if abs(cue[0] - previous[1]) < _GAP_S else 0
    return next((n for n in range(most, 0, -1) if previous[2][-n:] == cue[2][:n]), 0)


def _timed_lines(path: Path) -> Iterator[_Cue | str]:
    """Yield start, end and lines of each cue, or why a line is in none."""
    times: tuple[float, float] | None = None
    words: list[str] = []
    outside: list[tuple[int, str]] = []  # lines of a paragraph before its times
    previous = ""
    for number, line in [*_lines_with_blanks(path), (0, "")]:
        match = _TIMES.search(line)
        is_unreadable = match is None and _UNREADABLE.match(line) is not None
        if match is not None or is_unreadable or not line:
            # The line before the times is a number or a name, even where no blank line is.
            if line and words and words[-1] == previous and previous.isdigit():
                words.pop()
            if times is not None:
                yield *times, [text for word in words if (text := _plain(word))]
            elif not line and outside and not outside[0][1].startswith(_NO_CUES):
                for at, text in [row for row in outside if not row[1].isdigit()][:1]:
                    yield f"{path}:{at}: has no times that can be read: {text[:60]!a}."
            words, outside = [], []
            times = None if match is None else (_seconds(match, 1), _seconds(match, 5))
        elif times is not None:
            words.append(line)
        if line and times is None:
            outside.append((number, line))
        previous = line


def _plain(line: str) -> str:
    text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), _MARKUP.sub("", line))
    return " ".join(text.split())


def _part(
    start: float, end: float, words: list[str], path: Path, channel: int | None = None
) -> Part | str:
    text = " ".join(filter(None, words))
    if end <= start:
        return f"{path}: a cue must end after it begins, but is {start:g} to {end:g} s: {text!a}."
    try:
        check_text(text, str(path))
    except ValueError as error:
        return str(error)
    return Part(start, end, text, channel)


def _lines_with_blanks(path: Path) -> Iterator[tuple[int, str]]:
    before = 0
    for number, line in numbered_lines(path, "surrogateescape", spaces=True):
        if number > before + 1:
            yield number, ""
        before = number
        if line := line.strip():
            yield number, line


def _seconds(match: re.Match[str], group: int) -> float:
    hours, minutes, seconds, fraction = match.group(group, group + 1, group + 2, group + 3)
    return int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds) + float(f"0.{fraction}")


def _ctm(path: Path, recording: str) -> Iterator[Part | str]:
    """Join the words of ``recording channel start duration word`` between pauses."""
    rows: list[tuple[int, list[str]]] = []
    for number, line in numbered_lines(path, "surrogateescape"):
        if not line.startswith(";;"):
            rows.append((number, line.split()))
    names = {fields[0] for _, fields in rows}
    channels: dict[str, list[tuple[float, float, str]]] = {}
    for number, fields in rows:
        try:
            begin, duration, word = float(fields[2]), float(fields[3]), _MARKUP.sub("", fields[4])
            if not (0 <= begin < math.inf and 0 <= duration < math.inf):
                raise ValueError("out of range")
        except (IndexError, ValueError):
            yield f"{path}:{number}: must be `recording channel start duration word`."
            continue
        # A file of a single recording may give it any name.
        if len(names) > 1 and fields[0] != recording:
            yield f"{path}:{number}: is of recording {fields[0]!r}, not of {recording!r}."
            continue
        channels.setdefault(fields[1].upper(), []).append((begin, begin + duration, word))
    for label, words in channels.items():
        # Where there is only the first channel, it is that of programs that know no others.
        is_all = len(channels) == 1 and label in ("1", "A")
        channel = None if is_all else {"A": 0, "B": 1}.get(label)
        if channel is None and label.isdecimal() and not is_all:
            channel = max(int(label) - 1, 0)
        yield from _joined(sorted(words), path, channel)


def _joined(
    words: list[tuple[float, float, str]], path: Path, channel: int | None
) -> Iterator[Part | str]:
    part: list[tuple[float, float, str]] = []
    for word in words:
        if part and (word[0] - part[-1][1] > _PAUSE_S or word[1] - part[0][0] > _LONGEST_S):
            yield _part(part[0][0], part[-1][1], [text for _, _, text in part], path, channel)
            part = []
        part.append(word)
    if part:
        yield _part(part[0][0], part[-1][1], [text for _, _, text in part], path, channel)


log = logging.getLogger(__name__)

SUBTITLES = (".srt", ".vtt", ".ctm")


def _read(folder: Path, options: ReadOptions) -> Iterator[Utterance]:
    """Read a folder in one of four arrangements, in a fixed order.

    - ``metadata.jsonl`` with ``file_name`` and ``text``, ``transcription`` or ``sentence``, as
      Hugging Face's audiofolder has it; tables are read by `table`;
    - LibriSpeech's ``*.trans.txt``, lines of ``name TEXT`` beside the audio files;
    - ``NAME.txt`` beside each ``NAME.wav`` (or another suffix), at any depth;
    - ``NAME.srt``, ``NAME.vtt`` or ``NAME.ctm`` beside it, with the times of parts of it. A text
      may also be named ``NAME.wav.txt`` or, with its language, ``NAME.en.srt``.

    Links to folders are followed; names that begin with a dot are left out.
    """
    if (metadata := folder / "metadata.jsonl").is_file():
        lines = numbered_lines(metadata, "surrogateescape")
        return with_others(nemo.FORMAT.read(lines, metadata, options), folder)
    files = all_files(folder)
    transcripts = [path for path in files if path.name.endswith(".trans.txt")]
    if transcripts:
        return _from_librispeech(transcripts, files, options.default)
    return _from_neighbours(folder, files, options)


FORMAT = FolderFormat(detect=Path.is_dir, read=_read, files=lambda folder: None)


def all_files(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted; warn of each folder that cannot be read."""
    unreadable: list[OSError] = []
    files = sorted(map(Path, walk(folder, unreadable)))
    for error in unreadable:
        log.warning("%s is left out: it cannot be read: %s", error.filename, error.strerror)
    return files


def with_others(utterances: Iterator[Utterance], folder: Path) -> Iterator[Utterance]:
    """Yield utterances, and a rejection of each recording of the folder that none names."""
    used = set()
    for utterance in utterances:
        used.add(os.path.normpath(existing(utterance.audio)))
        yield utterance
    for path in all_files(folder):
        if _is_audio(path) and os.path.normpath(path.absolute()) not in used:
            yield _without_text(path, "no line names it")


def _from_librispeech(
    transcripts: list[Path], files: list[Path], prompt: Prompt
) -> Iterator[Utterance]:
    # Of several suffixes the first one, such as FLAC before MP3.
    recordings = {_spelled(path.with_suffix("")): path for path in files[::-1] if _is_audio(path)}
    used = set()
    for path in transcripts:
        for number, line in numbered_lines(path, "surrogateescape"):
            origin = f"{path}:{number}"
            try:
                check_text(line, origin)
            except ValueError as error:
                yield RejectedRow(f"{path.name}:{number}", origin, str(error))
                continue
            name, text = (*line.strip().split(maxsplit=1), "")[:2]
            audio = recordings.get(_spelled(path.parent / name))
            used.add(audio)
            yield FileUtterance(
                id=name,
                named=True,
                origin=origin,
                audio=str(audio.absolute()) if audio else absolute(f"{name}.flac", path.parent),
                text=text.strip(),
                prompt=prompt,
            )
    for path in files:
        if _is_audio(path) and path not in used:
            yield _without_text(path, "is in no *.trans.txt")


def _spelled(path: Path) -> str:
    """Return a path by which names are compared: macOS writes accents as letters of their own."""
    return unicodedata.normalize("NFC", str(path))


def _is_audio(path: Path) -> bool:
    return path.suffix.lower() in AUDIO_SUFFIXES


def _without_text(path: Path, problem: str) -> RejectedRow:
    return RejectedRow(path.stem, str(path), f"{path}: {problem}.", str(path.absolute()))


def _from_neighbours(folder: Path, files: list[Path], options: ReadOptions) -> Iterator[Utterance]:
    recordings = [path for path in files if _is_audio(path)]
    if not recordings:
        raise ValueError(
            f"{folder}: not a folder of utterances: it needs cuts.jsonl.gz (from `effasr "
            f"prepare`), wav.scp (Kaldi), metadata.csv, metadata.jsonl, or audio files "
            f"({', '.join(AUDIO_SUFFIXES[:6])} ...) with a .txt, .srt, .vtt or .ctm beside "
            f"each.{_other_format(folder)}"
        )
    beside = _Texts(files, options.default.source)
    if not options.untranscribed and not any(map(beside.of, recordings)):
        first = recordings[0]
        raise ValueError(
            f"{first}: there is no {first.with_suffix('.txt').name} beside it (and so for "
            f"{len(recordings)} of {len(recordings)} audio files): write the transcripts, or move "
            f"the files away.{_other_format(folder)}"
        )
    for path in recordings:
        texts = beside.of(path)
        if len(texts) > 1:
            names = ", ".join(text.name for text in texts)
            yield _without_text(path, f"{names} are beside it: choose by `--language`, or keep one")
        elif not texts and not options.untranscribed:
            yield _without_text(path, f"there is no {path.with_suffix('.txt').name} beside it")
        else:
            yield from _beside(path, texts[0] if texts else None, options)
    used = {text for path in recordings for text in beside.of(path)}
    for path in files:
        # Perhaps a recording: it has a text, and a suffix that nothing reads.
        if not _is_audio(path) and not _is_text(path) and not used.issuperset(beside.of(path)):
            yield _without_text(path, f"{path.suffix or 'no suffix'} is no known suffix of audio")


def _is_text(path: Path) -> bool:
    return path.suffix.lower() in _TEXTS


_TEXTS = (".txt", *SUBTITLES)
_LANGUAGE = re.compile(r"\.([a-z]{2,3})([-_][a-z\d]+)*", re.IGNORECASE)


class _Texts:
    """The texts beside recordings, by the names of these."""

    def __init__(self, files: list[Path], language: str) -> None:
        self._by_name: dict[str, list[Path]] = {}
        self._by_language: dict[str, list[Path]] = {}
        self._language = language
        for path in filter(_is_text, files):
            name = path.with_suffix("")
            self._by_name.setdefault(_spelled(name), []).append(path)
            if _LANGUAGE.fullmatch(name.suffix):
                self._by_language.setdefault(_spelled(name.with_suffix("")), []).append(path)

    def of(self, recording: Path) -> list[Path]:
        """Return its text; several where they differ in language, and none is the usual one."""
        stem = _spelled(recording.with_suffix(""))
        plain = self._by_name.get(stem) or self._by_name.get(_spelled(recording))
        if plain:
            return [min(plain, key=lambda path: _TEXTS.index(path.suffix.lower()))]
        texts = self._by_language.get(stem, [])
        spoken = [text for text in texts if _language_of(text) == self._language]
        return spoken[:1] or texts


def _language_of(text: Path) -> str | None:
    match = _LANGUAGE.fullmatch(text.with_suffix("").suffix)
    code = "" if match is None else code_or_name(match[1])
    return code if len(code) == 2 else None  # three letters may mean anything else


_SAMPLES = re.compile(r"0 \d{4,} (?=\D)")  # the first and the last, before a text of TIMIT


def _beside(path: Path, text: Path | None, options: ReadOptions) -> Iterator[Utterance]:
    """Yield the utterances of a recording with a text beside it."""
    audio, origin = str(path.absolute()), str(text or path.with_suffix(".txt"))
    language = None
    if text is not None and text.with_suffix("").name != path.stem:
        language = _language_of(text)
    prompt = options.default.stating(language)
    stated = frozenset({"lang"} if language else ())
    try:
        if text is None or text.suffix.lower() not in SUBTITLES:
            lines = () if text is None else numbered_lines(text)
            words = spaced(" ".join(line for _, line in lines))
            words = words[match.end() :] if (match := _SAMPLES.match(words)) else words
            yield FileUtterance(path.stem, False, origin, audio, words, prompt, stated=stated)
            return
        part = None
        for part in _ctm(text, path.stem) if text.suffix.lower() == ".ctm" else _cues(text):
            if isinstance(part, str):
                yield RejectedRow(path.stem, origin, part, audio)
                continue
            yield FileUtterance(
                *(path.stem, False, origin, audio, part.text, prompt),
                offset=part.start,
                duration=part.end - part.start,
                channel=part.channel,
                stated=stated,
            )
        if part is None:
            yield RejectedRow(path.stem, origin, f"{text}: has no times and texts.", audio)
    except ValueError as error:
        yield RejectedRow(path.stem, origin, str(error), audio)


def _other_format(folder: Path) -> str:
    """Name a format that is not read, with the way into one that is."""
    for pattern, name, way in _OTHER_FORMATS:
        if next(folder.rglob(pattern), None) is not None:
            return f" It has {pattern}, as {name} has: {way}."
    return ""


_OTHER_FORMATS = (
    ("*.parquet", "a dataset of Hugging Face", "name the folder that has them"),
    ("*.arrow", "a dataset of Hugging Face on disk", "name the folder that has them"),
    ("*.jsonl*", "lhotse", "name the file of cuts, or a folder with one file of recordings and one "
     "of supervisions"),
    ("*.tsv", "Common Voice or fairseq", "name the table"),
    ("*.stm", "NIST's STM", "write .srt or .ctm files, or a table with `start` and `end`"),
    ("*.TextGrid", "Praat", "write .srt files, or a table with `start` and `end`"),
    ("*.tar", "a tarred set of NeMo or WebDataset", "name the folder that has them, or the "
     "manifest"),
)  # fmt: skip
