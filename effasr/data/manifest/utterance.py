"""An utterance of a manifest, and its conversion to a lhotse cut."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lhotse import AudioSource, MonoCut, MultiCut, Recording, SupervisionSegment
from lhotse.cut import Cut

from effasr.data.audio.waveform import (
    DURATION_TOLERANCE,
    AudioError,
    AudioHeader,
    AudioProblem,
    read_header,
)
from effasr.data.prompt import Prompt


class Utterance(Protocol):
    """The result of every reader."""

    @property
    def id(self) -> str:
        """The name of the utterance."""
        ...

    @property
    def named(self) -> bool:
        """Whether the source gave the name; otherwise it was derived from the file name."""
        ...

    @property
    def origin(self) -> str:
        """File and line, for messages."""
        ...

    @property
    def audio(self) -> str:
        """The audio file, or a description of where the audio is."""
        ...

    def cut(self, name: str) -> Cut:
        """Return the utterance as a lhotse cut; raises AudioError if it has no audio."""
        ...


@dataclass(frozen=True, slots=True)
class FileUtterance:
    """An utterance in an audio file.

    Attributes:
        id: Name of the utterance.
        named: Whether the source gave the name.
        origin: File and line, for messages.
        audio: Absolute path of the file.
        text: The transcript or translation.
        prompt: Languages and task.
        offset: Start in the file, in seconds; None if it is the whole file.
        duration: Duration in seconds; None if it ends with the file.
        speaker: Name of the speaker, if known.
    """

    id: str
    named: bool
    origin: str
    audio: str
    text: str
    prompt: Prompt
    offset: float | None = None
    duration: float | None = None
    speaker: str | None = None

    def cut(self, name: str) -> Cut:
        """Return the utterance as a lhotse cut; the file's header is read.

        Raises:
            AudioError: The file is missing or unreadable, or does not hold what is claimed.
        """
        header = read_header(self.audio)
        start, duration = self._place(header)
        channels = list(range(header.channels))
        channel = channels if header.channels > 1 else 0
        recording = Recording(
            id=name,
            sources=[AudioSource("file", channels, self.audio)],
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
            text=self.text,
            language=self.prompt.source,
            speaker=self.speaker,
        )
        # lhotse's type for one channel takes an int, the one for several takes a list.
        kind: Any = MultiCut if header.channels > 1 else MonoCut
        return kind(
            id=name,
            start=start,
            duration=duration,
            channel=channel,
            supervisions=[supervision],
            recording=recording,
            custom=custom_fields(self.prompt),
        )

    def _place(self, header: AudioHeader) -> tuple[float, float]:
        """Start and duration in seconds, made exact where the manifest's are rounded."""
        start = self.offset or 0.0
        rest = header.duration - start
        if rest <= 0:
            raise AudioError(
                AudioProblem.DURATION,
                f"{self.audio}: `offset` is {start:g} s, but the file ends at "
                f"{header.duration:g} s.",
            )
        if self.duration is None or abs(self.duration - rest) <= DURATION_TOLERANCE:
            return start, rest if start else header.duration
        if self.duration > rest or self.offset is None:
            raise AudioError(
                AudioProblem.DURATION,
                f"{self.audio}: `duration` is {self.duration:g} s, but the file holds {rest:g} s"
                + (" (a part of a file needs `offset`)." if self.offset is None else "."),
            )
        return start, self.duration


@dataclass(frozen=True, slots=True)
class CutUtterance:
    """An utterance that already is a lhotse cut.

    Attributes:
        origin: File and line, for messages.
        value: The cut.
        audio: Location of its audio, for messages.
    """

    origin: str
    value: Cut
    audio: str
    named: bool = True

    @property
    def id(self) -> str:
        """The cut's own name."""
        return self.value.id

    def cut(self, name: str) -> Cut:
        """Return the cut itself."""
        return self.value if self.value.id == name else self.value.with_id(name)


def custom_fields(prompt: Prompt) -> dict[str, str | bool]:
    """Return a prompt as ``custom`` fields of a cut, for `effasr.data.manifest.reader.request`."""
    return {"target_lang": prompt.target, "task": prompt.task, "pnc": prompt.punctuation}


_NOT_PLAIN = re.compile(r"//|/\.?(/|$)")
"""Path parts that a `Path` would normalise."""


def absolute(path: str, folder: Path) -> str:
    """Return a path of a manifest in ``folder`` as an absolute path, links left as they are."""
    # A Path costs as much as the rest of a line.
    if path.startswith("/") and not _NOT_PLAIN.search(path):
        return path
    return str((folder / path).absolute())
