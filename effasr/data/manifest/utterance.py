"""An utterance of a manifest, its conversion to a lhotse cut, and what a manifest format is."""

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lhotse import AudioSource, MonoCut, MultiCut, Recording, SupervisionSegment
from lhotse.cut import Cut

from effasr.data.audio.audio_file import DURATION_TOLERANCE, LOSSY_TOLERANCE
from effasr.data.audio.embedded import Embedded
from effasr.data.audio.waveform import (
    AudioError,
    AudioHeader,
    AudioProblem,
    read_header,
)
from effasr.data.manifest.row import ManifestRow, spaced
from effasr.data.manifest.times import Alignment, shifted
from effasr.data.prompt import Prompt

HeaderOf = Callable[[str | Embedded], AudioHeader]


@dataclass(frozen=True, slots=True)
class FileUtterance:
    """An utterance in an audio file."""

    id: str
    named: bool  # whether the source gave the name
    origin: str  # file and line
    audio: str  # absolute path
    text: str
    prompt: Prompt
    offset: float | None = None  # seconds; None for a whole file
    duration: float | None = None  # seconds; None up to the end of the file
    channel: int | None = None  # from 0; None for the mean of all
    speaker: str | None = None
    is_lossy: bool = False  # whether the file is a copy of one in a lossy format
    stated: frozenset[str] = frozenset()  # `custom_fields`, and ``lang``, that the source says
    embedded: Embedded | None = None  # where in the file ``audio`` the recording is
    alignment: Alignment | None = None  # from ``offset`` on

    def cut(self, name: str, header_of: HeaderOf = read_header) -> Cut:
        """Return the utterance as a lhotse cut; the file's header is read."""
        audio = self.embedded or existing(self.audio)
        header = header_of(audio)
        start, duration = self._start_and_duration(header)
        channels = list(range(header.channels))
        channel: int | list[int] = channels if header.channels > 1 else 0
        if self.channel is not None:
            channel = self.channel
            if channel >= header.channels:
                raise AudioError(
                    AudioProblem.UNREADABLE,
                    f"{self.audio}: `channel` is {channel}, but the file has {header.channels}, "
                    "counted from 0: name another one, or none.",
                )
        recording = Recording(
            id=name,
            sources=[AudioSource("shar" if self.embedded else "file", channels, str(audio))],
            sampling_rate=header.sample_rate,
            num_samples=header.num_samples,
            duration=header.duration,
            channel_ids=channels,
        )
        supervision = SupervisionSegment(
            id=name,
            recording_id=name,
            start=0.0,
            duration=duration,
            channel=channel,
            text=spaced(self.text),
            language=self.prompt.source,
            speaker=self.speaker,
            alignment=shifted(self.alignment, start),
        )
        # lhotse's type for one channel takes an int, the one for several takes a list.
        kind: Any = MultiCut if isinstance(channel, list) else MonoCut
        return kind(
            id=name,
            start=start,
            duration=duration,
            channel=channel,
            supervisions=[supervision],
            recording=recording,
            custom=custom_fields(self.prompt, self.stated),
        )

    def _start_and_duration(self, header: AudioHeader) -> tuple[float, float]:
        """Return both in seconds, exact where the manifest's are rounded."""
        start = self.offset or 0.0
        remaining = header.duration - start
        if remaining <= 0:
            raise AudioError(
                AudioProblem.DURATION,
                f"{self.audio}: `offset` is {start:g} s, but the file ends at "
                f"{header.duration:g} s.",
            )
        # Segments of aligners end a little behind the file; a whole file may differ either way.
        least = most = LOSSY_TOLERANCE if self.is_lossy else header.tolerance
        if self.offset is not None:
            least, most = DURATION_TOLERANCE, LOSSY_TOLERANCE
        if self.duration is None or -least <= self.duration - remaining <= most:
            return start, remaining if start else header.duration
        if self.duration > remaining or self.offset is None:
            raise AudioError(
                AudioProblem.DURATION,
                f"{self.audio}: `duration` is {self.duration:g} s, but the file holds "
                f"{remaining:g} s"
                + (" (a part of a file needs `offset`)." if self.offset is None else "."),
            )
        return start, self.duration


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row of a manifest, or a file of a folder, that cannot be used; it has no cut."""

    id: str
    origin: str
    reason: str
    audio: str = ""
    named: bool = False
    stated: frozenset[str] = frozenset({"lang"})  # not counted among those without

    def cut(self, name: str, header_of: HeaderOf = read_header) -> Cut:
        raise AudioError(AudioProblem.ROW, self.reason)


@dataclass(frozen=True, slots=True)
class CutUtterance:
    """An utterance that already is a lhotse cut."""

    origin: str
    value: Cut
    audio: str
    named: bool = True
    stated: frozenset[str] = frozenset()  # as of `FileUtterance`

    @property
    def id(self) -> str:
        return self.value.id

    def cut(self, name: str, header_of: HeaderOf = read_header) -> Cut:
        return self.value if self.value.id == name else self.value.with_id(name)


Utterance = FileUtterance | CutUtterance | RejectedRow
"""What every format yields; ``cut`` raises AudioError if there is no audio."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a manifest is read."""

    default: Prompt = field(default_factory=Prompt)  # of utterances that do not say otherwise
    untranscribed: bool = False  # whether an utterance may lack a text; it gets an empty one
    unread: Counter[str] | None = None  # counts the fields that are not read
    text_column: str | None = None  # field of the text; None for the usual names


@dataclass(frozen=True, slots=True)
class LineFormat:
    """A format of JSON lines; a file has the format that accepts its first line."""

    detect: Callable[[Mapping[str, Any]], bool]
    parse: Callable[[ManifestRow, ReadOptions], Utterance]

    def read(
        self, lines: Iterable[tuple[int, str]], path: Path, options: ReadOptions
    ) -> Iterator[Utterance]:
        for number, line in lines:
            try:
                yield self.parse(ManifestRow.parse(line, path, number), options)
            except ValueError as error:
                yield RejectedRow(f"{path.name}:{number}", f"{path}:{number}", str(error))


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """A format of folders, and of files that are not JSON lines.

    ``files`` returns the files whose content decides what is read, and archives of audio; None for
    a folder whose very listing decides.
    """

    detect: Callable[[Path], bool]
    read: Callable[[Path, ReadOptions], Iterator[Utterance]]
    files: Callable[[Path], tuple[list[Path], list[Path]] | None]


def existing(path: str) -> str:
    """Return a path as the file system has it, where only its spelling differs.

    macOS writes letters with accents as two characters, Windows separates folders by back slashes,
    and spreadsheets leave spaces.
    """
    if os.path.lexists(path):
        return path
    forms = [path.strip(), path.replace("\\", "/"), path.strip().replace("\\", "/")]
    spellings = [*forms, *(unicodedata.normalize(f, x) for x in forms for f in ("NFC", "NFD"))]
    return next((spelling for spelling in spellings if os.path.lexists(spelling)), path)


def custom_fields(prompt: Prompt, stated: Collection[str]) -> dict[str, str | bool]:
    """Return a prompt as ``custom`` fields of a cut, which `cuts.prompt_of` reads.

    Those that are neither ``stated`` nor needed stay open, for the prompt that a model was trained
    with: a prepared folder says no more than what it was prepared from.
    """
    usual = Prompt(prompt.source, prompt.source)
    values: dict[str, tuple[str | bool, str | bool]] = {
        "target_lang": (prompt.target, usual.target),
        "task": (prompt.task, usual.task),
        "pnc": (prompt.punctuation, usual.punctuation),
    }
    return {
        name: value
        for name, (value, implied) in values.items()
        if name in stated or value != implied
    }
