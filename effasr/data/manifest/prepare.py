"""`effasr prepare`: checks every utterance before training, and lists those that fail."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
import unicodedata
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO, Any, Literal, Self, TypeAlias, TypeVar

import numpy as np
from lhotse import MonoCut, MultiCut
from lhotse.cut import Cut
from lhotse.cut.data import DataCut
from lhotse.utils import fastcopy

from effasr.data.atomic_files import atomic_file, naming_errors, write_atomically
from effasr.data.audio.audio_file import UnknownFormat, open_audio
from effasr.data.audio.content import channel_powers, check_content
from effasr.data.audio.embedded import Embedded
from effasr.data.audio.ffmpeg import write_flac
from effasr.data.audio.waveform import (
    STATED_SHARE,
    AudioError,
    AudioHeader,
    AudioProblem,
    AudioSegment,
    audio_path,
)
from effasr.data.filters.rules import (
    Dropped,
    Limits,
    Reason,
    RejectedUtterance,
    check,
    rate_outliers,
    text_of,
)
from effasr.data.languages import code_or_name
from effasr.data.locks import writing_alone
from effasr.data.manifest.cuts import CUTS_FILE, json_line, prompt_of, with_prompt
from effasr.data.manifest.reader import named
from effasr.data.manifest.shar import SHARDS_FOLDER
from effasr.data.manifest.shar_writer import encode, write_shards
from effasr.data.manifest.utterance import (
    CutUtterance,
    FileUtterance,
    Utterance,
    existing,
)
from effasr.data.tokenizer import Tokenizer, WhisperTokenizer
from effasr.data.tokenizer.fidelity import TextFidelity
from effasr.untrusted.display import utf8
from effasr.untrusted.remote import shown

# What `effasr prepare --clean` does to texts, in the order in which it is named.


Clean = Callable[[str], str]

# Within words they are letters: don't, well-known.
_WITHIN_WORDS = re.compile(r"(?<=\w)['\u2019\-](?=\w)")
_PLACEHOLDER = "\ue000"
_TAGS = re.compile(r"tags=(\S+?)\.\.\.(\S+)")

TRANSFORMS = "lower, no-punctuation, tags=<...> (or another pair of brackets)"


def parse_clean(text: str) -> Clean:
    """Return the transforms of a list such as ``tags=<...>,no-punctuation,lower`` as one."""
    transforms: list[Clean] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        tags = _TAGS.fullmatch(name)
        if name == "lower":
            transforms.append(str.lower)
        elif name == "no-punctuation":
            transforms.append(_without_punctuation)
        elif tags is not None:
            pattern = re.compile(f"{re.escape(tags[1])}.*?{re.escape(tags[2])}")
            transforms.append(lambda text, pattern=pattern: pattern.sub(" ", text))
        else:
            raise ValueError(f"must be some of {TRANSFORMS}, but one is {name!r}")

    def clean(text: str) -> str:
        for transform in transforms:
            text = transform(text)
        return " ".join(text.split())

    return clean


def _without_punctuation(text: str) -> str:
    kept = _WITHIN_WORDS.findall(text)
    marked = _WITHIN_WORDS.sub(_PLACEHOLDER, text)
    plain = "".join(" " if unicodedata.category(c).startswith("P") else c for c in marked)
    for character in kept:
        plain = plain.replace(_PLACEHOLDER, character, 1)
    return plain


DROPPED_FILE = "dropped.jsonl"
REPORT_FILE = "report.json"

Channel: TypeAlias = "int | Literal['loudest']"

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class Share:
    """A number of utterances and their hours."""

    utterances: int = 0
    hours: float = 0.0

    def add(self, seconds: float | None) -> None:
        self.utterances += 1
        self.hours += (seconds or 0.0) / 3600


@dataclass(slots=True)
class PrepareReport:
    """Numbers of kept and dropped utterances; the same as OUT/report.json."""

    source: str
    kept: Share = field(default_factory=Share)
    dropped: Share = field(default_factory=Share)  # hours where their length is known
    # kept utterances: en, or de>en for a translation
    by_language: dict[str, Share] = field(default_factory=dict)
    by_reason: dict[str, Share] = field(default_factory=dict)  # dropped utterances
    tokens: int = 0  # of the kept texts; 0 without a tokenizer
    unknown_tokens: int = 0  # that the vocabulary cannot represent
    unknown_characters: dict[str, int] = field(default_factory=dict)  # the commonest
    conflicting_texts: int = 0  # lines with another text than an earlier one of the same span
    changed_texts: int = 0  # that come back otherwise from the tokenizer
    # kept utterances with at least 0.3 s of silence at an end; null where nothing was decoded
    silent_ends: int | None = None
    unread_fields: dict[str, int] = field(default_factory=dict)  # lines by field, the commonest
    examples: dict[str, str] = field(default_factory=dict)  # details of the first, by reason
    mapped_languages: dict[str, int] = field(default_factory=dict)  # lines by language of source
    assumed_language: int = 0  # utterances whose lines name no language


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    limits: Limits | None = None,
    language: str = "en",
    jobs: int | None = None,
    progress: Callable[..., None] | None = None,
    note: Callable[[Cut, list[int] | None], None] | None = None,
    fidelity: TextFidelity | None = None,
    clean: Clean | None = None,
    channel: Channel | None = None,
    convert: bool = False,
    language_map: Mapping[str, str] | None = None,
    text_column: str | None = None,
    shards: int | None = None,
) -> PrepareReport:
    """Check a manifest and write what can be trained on.

    OUT/cuts.jsonl.gz holds the kept utterances as lhotse cuts, in the order of the source, with
    absolute audio paths and exact durations: `effasr.data.manifest.reader.read` takes OUT, from
    anywhere, and opens no audio file. OUT/dropped.jsonl holds one object for each utterance left
    out: id, reason, details, audio, duration. OUT/report.json holds the counts. The same source
    gives the same files.

    Left out is audio that is missing, unreadable, damaged, empty, silent or not as long as the
    manifest says; what exceeds ``limits``; empty texts; texts with far more characters (or
    tokens) per second than others of their language and length; and, with a tokenizer, unknown
    languages, texts that it cannot spell at all, and texts too long for CTC.

    ``limits`` are by default without CTC's for the tokenizer of a Whisper, which has no CTC head,
    and may have many tokens for a word. ``note`` is called in the order of the source with each
    utterance that passes the checks, and the tokens of its text; outliers, which are known at the
    end, are among them. So are they among the texts that ``fidelity`` counts.

    ``language_map`` names another language for some: for one that a tokenizer has not, a near one.
    ``channel`` is that of utterances of which the source names none, in place of the mean. With
    ``convert``, ffmpeg reads what soundfile cannot, into FLAC files below OUT/audio. A call that
    was interrupted is continued by the same call: what it measured is in OUT until the end.

    With ``shards``, OUT/shards is a Shar folder of so many shards (at most one for each utterance)
    in place of OUT/cuts.jsonl.gz: audio and cuts together, which need the source no more.
    """
    folder = Path(out)
    for name in (SHARDS_FOLDER,) if shards is None else (SHARDS_FOLDER, CUTS_FILE):
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name} is there already, from another `effasr prepare`: remove it, or "
                "choose another folder."
            )
    if folder.exists() and (not folder.is_dir() or folder.resolve() == Path(source).resolve()):
        raise ValueError(f"{folder}: `out` must be a folder of its own: choose another name.")
    if limits is None:
        limits = Limits(ctc=not isinstance(tokenizer, WhisperTokenizer))
    unread: Counter[str] = Counter()
    utterances = named(source, language=language, unread=unread, text_column=text_column)
    report = PrepareReport(str(source))
    with (
        _made(folder),
        TemporaryFile(dir=folder) as file,
        _Audio(folder, channel, convert) as audio,
    ):
        selected = _Kept(file)
        dropped: list[tuple[int, Dropped]] = []
        wanted = {code_or_name(name): near for name, near in (language_map or {}).items()}
        checked = partial(_check, tokenizer, limits, clean, wanted, audio)
        mapped: Counter[str] = Counter()
        texts: dict[int, int] = {}  # hashes of texts by those of spans
        outcomes = _in_order(checked, utterances, jobs or os.cpu_count() or 1)
        for position, outcome in enumerate(outcomes):
            if isinstance(outcome, Dropped):
                dropped.append((position, outcome))
            else:
                selected.add(position, outcome)
                mapped.update(outcome.mapped)
                report.assumed_language += outcome.assumed
                text = hash(text_of(outcome.cut))
                report.conflicting_texts += texts.setdefault(outcome.span, text) != text
                if fidelity is not None:
                    fidelity.add(text_of(outcome.cut), outcome.target, outcome.tokens)
                if note is not None:
                    note(outcome.cut, outcome.tokens)
            if progress is not None:
                progress(position + 1)
        if not len(selected) and not dropped:
            raise ValueError(f"{source}: holds no utterances.")
        if fidelity is not None:
            report.unknown_characters = dict(fidelity.characters.most_common(100))
            report.changed_texts = fidelity.changed
        report.unread_fields = dict(unread.most_common(100))
        report.mapped_languages = {name: mapped[name] for name in wanted}
        report = _write(
            *(folder, report, selected, dropped, shards, jobs or os.cpu_count() or 1, progress),
            has_tokens=tokenizer is not None,
        )
    return report


def _span(cut: Cut, part: AudioSegment | None) -> int:
    """Return a number for the part of a recording that a cut is."""
    if part is None:
        return hash(cut.id)
    return hash((str(part.path), round(part.start, 3), round(part.duration, 3), part.channels))


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder; an empty one does not stay behind after an error."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with naming_errors(folder), writing_alone(folder):
            yield
    except BaseException:
        if is_new:
            with suppress(OSError):  # Something has been written.
                folder.rmdir()
        raise


@dataclass(frozen=True, slots=True)
class _Usable:
    """A kept utterance: its cut, also as JSON, and what the counts and the outliers need."""

    cut: Cut
    tokens: list[int] | None
    line: bytes
    language: str
    target: str
    duration: float
    silence: float | None  # seconds of the longer end; None without decoding
    size: int
    unknown: int
    span: int  # number of the part of the recording
    mapped: tuple[str, ...]  # languages in whose place others are named
    assumed: bool  # whether its line names no language


def _check(
    tokenizer: Tokenizer | None,
    limits: Limits,
    clean: Clean | None,
    language_map: Mapping[str, str],
    audio: _Audio,
    named_utterance: tuple[str, Utterance],
) -> _Usable | Dropped:
    """Check an utterance; run in a thread, as decoding leaves the interpreter free."""
    name, utterance = named_utterance
    mapped, duration = (), None
    try:
        cut = audio.cut(name, utterance)
        if language_map:
            cut, mapped = _with_languages(cut, language_map)
        part = AudioSegment.of(cut)
        duration = cut.duration
        if clean is not None:
            supervision = cut.supervisions[0]
            supervision.text = clean(text_of(cut))
            for items in (supervision.alignment or {}).values():
                items[:] = [item._replace(symbol=clean(item.symbol)) for item in items]
        tokens = check(cut, limits, tokenizer)
        silence = audio.check(cut, part)
    except (AudioError, RejectedUtterance) as error:
        reason = error.problem if isinstance(error, AudioError) else error.reason
        details = f"{error} {_CONVERT}" if isinstance(error, UnknownFormat) else str(error)
        return Dropped(name, reason, details, utterance.audio, duration)
    finally:
        audio.release()
    try:
        line = shown(json_line(cut).decode()).encode()
    except UnicodeEncodeError:
        problem = f"{utterance.audio}: the path must be UTF-8, as manifests are: rename the file."
        return Dropped(name, AudioProblem.UNREADABLE, problem, utterance.audio, duration)
    prompt = prompt_of(cut)
    return _Usable(
        cut,
        None if tokens is None else tokens.text,
        line,
        prompt.source if prompt.monotonic else f"{prompt.source}>{prompt.target}",
        prompt.target,
        duration,
        silence,
        len(text_of(cut)) if tokens is None else len(tokens.text),
        0 if tokens is None else tokens.unknown,
        _span(cut, part),
        mapped,
        "lang" not in utterance.stated,
    )


def _with_languages(cut: Cut, language_map: Mapping[str, str]) -> tuple[Cut, tuple[str, ...]]:
    """Return the cut with the languages of a map, and those that they are in place of."""
    prompt = prompt_of(cut)
    codes = code_or_name(prompt.source), code_or_name(prompt.target)
    mapped = tuple(sorted(language_map.keys() & codes))
    if not mapped:
        return cut, mapped
    source, target = language_map.get(codes[0], codes[0]), language_map.get(codes[1], codes[1])
    if source == target and prompt.task == "translate":
        problem = f"the language map makes {target!r} of both languages of a translation"
        raise RejectedUtterance(Reason.LANGUAGE, problem)
    return with_prompt(cut, replace(prompt, source=source, target=target)), mapped


LEAST_SILENCE = 0.3  # seconds at an end

_MEASURES = 1  # changes when other values are measured
_CONVERT = "`effasr prepare --convert` writes a copy of what ffmpeg reads."


class _Audio:
    """Measures audio files, and keeps what it measured until all of a source is done.

    OUT/.measured.jsonl has a line for each header and each part that was decoded, by the file's
    path, size and time: an interrupted `prepare` goes on where it was.
    """

    def __init__(self, folder: Path, channel: Channel | None, convert: bool) -> None:
        self._copies, self._channel, self._converts = folder / "audio", channel, convert
        self._locks: dict[str, threading.Lock] = {}
        self._path = folder / ".measured.jsonl"
        self._known: dict[tuple[Any, ...], list[Any]] = {}
        self._records: deque[tuple[tuple[Any, ...], list[Any]]] = deque()
        self._flushed = 0.0
        self._thread = threading.local()
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                with suppress(ValueError):  # the last line may be half written
                    key, value = json.loads(line)
                    self._known[tuple(key)] = value
            log.warning(
                "%s: goes on after an interruption; %d measurements are used.",
                *(folder, len(self._known)),
            )
        self._file = self._path.open("ab")
        self._file.write(b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._write_records()
        is_empty = self._file.tell() <= 1
        self._file.close()
        if kind is None or is_empty:
            self._path.unlink()

    def cut(self, name: str, utterance: Utterance) -> Cut:
        """Return the cut of an utterance, of the channel that is wanted."""
        is_open = isinstance(utterance, FileUtterance) and utterance.channel is None
        if is_open and isinstance(self._channel, int):
            utterance = replace(utterance, channel=self._channel)
        if self._converts:
            utterance = self._converted(utterance)
        cut = utterance.cut(name, self._header)
        if isinstance(utterance, CutUtterance):
            self._check_recording(cut)
        return cut if self._channel is None else self._with_channel(cut)

    def _check_recording(self, cut: Cut) -> None:
        """Check that a file is as long as its cut says: else the times may be those of another."""
        part = AudioSegment.of(cut)
        if part is None:
            return
        header, stated = self._header(part.path), cut.recording.duration  # type: ignore[union-attr]
        if abs(header.duration - stated) > header.tolerance + STATED_SHARE * stated:
            raise AudioError(
                AudioProblem.DURATION,
                f"{part.path}: `recording.duration` is {stated:g} s, but the file holds "
                f"{header.duration:g} s: read it again by `lhotse.Recording.from_file`.",
            )

    def check(self, cut: Cut, part: AudioSegment | None) -> float:
        """Decode a cut, check its content, and return the seconds of its longer silent end."""
        if part is None:
            return check_content(cut)
        path, file = getattr(self._thread, "opened", (None, None))
        if path != part.path:
            file = None
        kind = ("ends", cut.id, part.start, part.duration, *part.channels)
        return self._measured(part.path, kind, lambda: check_content(cut, part, file))

    def release(self) -> None:
        """Close the file that this thread has opened for its header."""
        _, file = self._thread.__dict__.pop("opened", (None, None))
        if file is not None:
            file.close()

    def _header(self, path: str | Embedded) -> AudioHeader:
        def read() -> list[float]:
            self.release()
            file = open_audio(path)
            self._thread.opened = path, file
            header = AudioHeader.of(file)
            return [header.sample_rate, header.num_samples, header.channels, header.tolerance]

        rate, samples, channels, tolerance = self._measured(path, ("header",), read)
        return AudioHeader(rate, samples, channels, tolerance)

    def _with_channel(self, cut: Cut) -> Cut:
        """Return a cut of several channels as one of them; else its source names the channel."""
        part = AudioSegment.of(cut)
        if not isinstance(cut, MultiCut) or part is None or len(part.channels) < 2:
            return cut
        channels = list(cut.channel)
        if self._channel == "loudest":
            kind = ("powers", part.start, part.duration, *part.channels)
            powers = self._measured(part.path, kind, lambda: channel_powers(part))
            channel = channels[int(np.argmax(powers))]
        elif self._channel in channels:
            channel = self._channel
        else:
            raise AudioError(
                AudioProblem.UNREADABLE,
                f"{part.path}: channel {self._channel} is wanted, but the cut has {channels}: "
                "name another one by `--channel`.",
            )
        return MonoCut(
            *(cut.id, cut.start, cut.duration, channel),
            supervisions=[fastcopy(each, channel=channel) for each in cut.supervisions],
            recording=cut.recording,
            custom=cut.custom,
        )

    def _converted(self, utterance: Utterance) -> Utterance:
        """Return an utterance of a copy, where only ffmpeg might read its file."""
        cut = utterance.value if isinstance(utterance, CutUtterance) else None
        if isinstance(utterance, FileUtterance):
            path = utterance.embedded or existing(utterance.audio)
        else:
            path = None if cut is None else audio_path(cut)
        if path is None:
            return utterance
        try:
            self._header(path)
        except UnknownFormat as error:
            copy = self._copy(path, str(error))
        except AudioError:  # the cut says so
            return utterance
        else:
            return utterance
        if isinstance(utterance, FileUtterance):
            return replace(utterance, audio=copy, is_lossy=True, embedded=None)
        header = self._header(copy)
        assert isinstance(cut, DataCut)
        assert cut.recording is not None
        recording = fastcopy(
            cut.recording,
            sources=[fastcopy(cut.recording.sources[0], source=copy)],
            sampling_rate=header.sample_rate,
            num_samples=header.num_samples,
            duration=header.duration,
        )
        return replace(utterance, value=fastcopy(cut, recording=recording), audio=copy)

    def _copy(self, path: str | Embedded, reason: str) -> str:
        """Return a copy that ffmpeg makes of a file."""
        file = path.path if isinstance(path, Embedded) else path
        status = os.stat(file)
        key = _hash(str(path), status.st_size, status.st_mtime_ns)
        target = self._copies / f"{Path(file).stem[:60]}-{key[:8]}.flac"
        # Several utterances may be parts of a recording.
        with self._locks.setdefault(str(path), threading.Lock()):
            if not target.exists():
                self._copies.mkdir(exist_ok=True)
                if isinstance(path, Embedded):
                    with NamedTemporaryFile(dir=self._copies) as unpacked:
                        unpacked.write(path.read())
                        unpacked.flush()
                        write_flac(unpacked.name, target, reason)
                else:
                    write_flac(path, target, reason)
        return str(target.absolute())

    def _measured(
        self, path: str | Embedded, kind: tuple[Any, ...], measure: Callable[[], Any]
    ) -> Any:
        """Return what is known of a file, or measure it; errors are kept as well."""
        try:
            status = os.stat(path.path if isinstance(path, Embedded) else path)
        except (OSError, ValueError):  # missing
            return measure()
        key = (_MEASURES, str(path), status.st_size, status.st_mtime_ns, *kind)
        if (known := self._known.get(key)) is not None:
            if known[0] is not None:
                raise AudioError(AudioProblem(known[0]), known[1])
            return known[1]
        value, problem = None, None
        try:
            value = measure()
            record = [None, value]
        except UnknownFormat:
            raise
        except AudioError as error:
            problem, record = error, [error.problem, str(error)]
        self._records.append((key, record))
        if (now := time.monotonic()) > self._flushed + 1.0:
            self._flushed = now
            self._write_records()
        if problem is not None:
            raise problem
        return value

    def _write_records(self) -> None:
        """Write what was measured since the last time: a kill loses a second of work."""
        records = []
        with suppress(IndexError):  # none is left
            while True:
                records.append(self._records.popleft())
        self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
        self._file.flush()


def _hash(*values: object) -> str:
    return hashlib.blake2b(repr((_MEASURES, *values)).encode(), digest_size=12).hexdigest()


class _Kept:
    """Kept utterances: lines in a file, numbers in memory, so that millions fit."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.positions = array("q")
        self.durations = array("d")
        self.silences = array("d")  # NaN without decoding
        self.sizes = array("q")
        self.unknown = array("q")
        self.languages: list[str] = []
        self.targets = array("q")
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, position: int, utterance: _Usable) -> None:
        self._file.write(utterance.line + b"\n")
        self.positions.append(position)
        self.durations.append(utterance.duration)
        self.silences.append(math.nan if utterance.silence is None else utterance.silence)
        self.sizes.append(utterance.size)
        self.unknown.append(utterance.unknown)
        self.languages.append(sys.intern(utterance.language))
        self.targets.append(self._numbers.setdefault(utterance.target, len(self._numbers)))

    def lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        yield from self._file

    def outliers(self) -> np.ndarray:
        durations = np.array(self.durations)
        rates = np.array(self.sizes) / durations
        return rate_outliers(rates, durations, languages=np.array(self.targets), both=True)


def _in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Apply a function in threads; results in order, a bounded number of items ahead."""
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as executor:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) >= 16 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _write(
    folder: Path,
    report: PrepareReport,
    kept: _Kept,
    dropped: list[tuple[int, Dropped]],
    shards: int | None,
    threads: int,
    progress: Callable[..., None] | None,
    *,
    has_tokens: bool,
) -> PrepareReport:
    outliers = kept.outliers()
    silences = np.array(kept.silences)[~outliers]
    if not np.isnan(silences).all():
        report.silent_ends = int((silences >= LEAST_SILENCE).sum())
    usual = sum(kept.sizes) / max(sum(kept.durations), 1e-9)  # text per second

    def lines() -> Iterator[bytes]:
        for index, line in enumerate(kept.lines()):
            duration, size = kept.durations[index], kept.sizes[index]
            if outliers[index]:
                drop = _outlier(line, size / duration, usual, duration, has_tokens=has_tokens)
                dropped.append((kept.positions[index], drop))
                continue
            report.kept.add(duration)
            report.by_language.setdefault(kept.languages[index], Share()).add(duration)
            report.tokens += size if has_tokens else 0
            report.unknown_tokens += kept.unknown[index]
            yield line

    if shards is None:
        with (
            atomic_file(folder / CUTS_FILE) as file,
            # Neither name nor time go into the header: the same cuts give the same bytes.
            gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed,
        ):
            packed.writelines(lines())
    else:
        total = int((~outliers).sum())

        def show(count: int) -> None:
            if progress is not None:
                progress(count, total)

        encoded = _in_order(encode, lines(), threads)
        write_shards(folder / SHARDS_FOLDER, max(1, min(shards, total)), total, encoded, show)
    with atomic_file(folder / DROPPED_FILE) as file:
        for _, drop in sorted(dropped, key=itemgetter(0)):
            file.write(drop.json_line())
            report.dropped.add(drop.duration)
            report.examples.setdefault(drop.reason, f"{drop.id}: {drop.details}")
            report.by_reason.setdefault(drop.reason, Share()).add(drop.duration)
    for share in (
        report.kept,
        report.dropped,
        *report.by_language.values(),
        *report.by_reason.values(),
    ):
        share.hours = round(share.hours, 6)
    text = json.dumps(asdict(report), indent=2, ensure_ascii=False)
    write_atomically(folder / REPORT_FILE, utf8(text + "\n"))
    return report


def _outlier(
    line: bytes, rate: float, usual: float, duration: float, *, has_tokens: bool
) -> Dropped:
    cut = json.loads(line)
    reason = Reason.TOKEN_RATE if has_tokens else Reason.CHARACTER_RATE
    amount = "more" if rate > usual else "less"
    details = f"{rate:.1f} per second, far {amount} than others of {duration:.1f} s"
    return Dropped(
        cut["id"], reason, details, str(cut["recording"]["sources"][0]["source"]), duration
    )
