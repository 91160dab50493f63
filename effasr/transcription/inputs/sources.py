"""Recordings to transcribe, from files, folders, patterns and manifests."""

import glob
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from effasr.data.audio.waveform import AudioError, AudioSegment
from effasr.data.manifest.lines import ARCHIVES, has_suffix
from effasr.data.manifest.walk import AUDIO_SUFFIXES, walk
from effasr.data.prompt import Prompt, warn_assumed

if TYPE_CHECKING:
    # Manifests need lhotse, whose import takes a third of a second; files do not need it.
    from lhotse.cut import Cut


@dataclass(frozen=True, slots=True)
class Source:
    """A recording, or a part of one."""

    id: str
    name: str  # name of the result's file, without suffix, relative to the output folder
    audio: str = ""  # the file; empty for a cut that only lhotse can read
    offset: float = 0.0  # start in the file, in seconds
    duration: float | None = None  # duration in seconds; None if it ends with the file
    channels: tuple[int, ...] | None = None  # channels of the file to average; None for all
    recorded: float = math.inf  # seconds that the file had, where that is known
    track: int = 0  # number of the audio track in a container, from 0
    channel: int | None = None  # channel to transcribe alone, with its number in the result
    per_channel: bool = False  # whether to transcribe each channel alone
    cut: "Cut | None" = None  # cut of a manifest of cuts, if it has one
    prompt: Prompt | None = None  # requested by its manifest
    problem: str | None = None  # why there is nothing to transcribe

    def fields(self) -> dict[str, int]:
        """Return what a line of a manifest needs in addition, to name the same audio."""
        if self.channels is None or len(self.channels) != 1:
            return {}
        return {"channel": self.channels[0]}


def find(arguments: Iterable[str]) -> list[Source]:
    """Return the recordings of files, folders and patterns, as given on a command line.

    A folder stands for all recordings below it, recognised by their suffixes. A pattern has ``*``,
    ``?`` or ``[...]``, and ``**`` for folders at any depth. Names that begin with a dot are found
    only if the argument asks for them, and no folder is entered twice through links. An argument
    without recordings is a source with a problem.
    """
    sources: dict[str, Source] = {}
    for argument in arguments:
        for source in _expand(argument):
            # Links are not followed: two names of a file are two recordings.
            sources.setdefault(os.path.abspath(source.id), source)
    return list(sources.values())


def of_manifest(path: Path, *, prompt: Prompt, warn: bool = False) -> list[Source]:
    """Return the recordings of a manifest; what a line does not say is as in ``prompt``."""
    from effasr.data.manifest.reader import named

    utterances = list(named(path, prompt=prompt, untranscribed=True))
    sources = [source_of(name, utterance) for name, utterance in utterances]
    if not sources:
        raise ValueError(f"{path}: holds no utterances.")
    if warn:
        assumed = sum("lang" not in utterance.stated for _, utterance in utterances)
        warn_assumed(assumed, len(sources), prompt.source, "give `--language`")
    return sources


def with_unique_names(sources: Sequence[Source]) -> list[Source]:
    """Return the sources; of those with one name, such as x.wav and x.mp3, the suffix is in it."""
    count = Counter(source.name for source in sources)
    unique = [
        replace(source, name=f"{source.name}{PurePath(source.audio).suffix}")
        if count[source.name] > 1
        else source
        for source in sources
    ]
    by_name: dict[str, str] = {}
    for source in unique:
        if source.name in by_name:
            raise ValueError(
                f"`--output` must have a file of its own for each recording, but that of "
                f"{by_name[source.name]} and of {source.id} would be {source.name!r}: name the "
                "folder that holds both, or transcribe them by separate commands."
            )
        by_name[source.name] = source.id
    return unique


def _expand(argument: str) -> Iterator[Source]:
    path = Path(argument)
    if os.path.isdir(argument):
        locked: list[OSError] = []
        suffixed = ((file, os.path.splitext(file)[1].lower()) for file in walk(argument, locked))
        files = sorted(file for file, suffix in suffixed if suffix in AUDIO_SUFFIXES)
        for error in locked:
            name = str(error.filename)
            yield Source(name, _stem(Path(name)), problem=f"{name}: {error.strerror}.")
        if not files and not locked:
            yield Source(argument, path.name, problem=f"{argument}: a folder without recordings.")
        for file in files:
            yield Source(file, _below(file, argument), file)
    elif has_suffix(path, ARCHIVES):
        problem = f"{argument}: a set of recordings, not a recording: name it by `--manifest`."
        yield Source(argument, path.name, problem=problem)
    elif glob.has_magic(argument) and not os.path.lexists(argument):
        # The folder before the first wildcard, and the rest.
        parts = PurePath(argument).parts
        first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
        root, pattern = os.path.join("", *parts[:first]), os.path.join(*parts[first:])
        files = sorted(_matches(root, pattern))
        if not files:
            yield Source(argument, path.name, problem=f"{argument}: no file matches.")
        for file in files:
            # The path before the first wildcard is the same for all, and not part of a name.
            yield Source(file, _below(file, root), file)
    else:
        yield Source(argument, _stem(path), argument)


def _matches(root: str, pattern: str) -> Iterator[str]:
    """Yield matching files; pathlib's ``**`` enters no links, while glob's would follow cycles."""
    hidden = any(part.startswith(".") for part in PurePath(pattern).parts)
    plain = root in ("", ".")
    for path in Path(root).glob(pattern):
        below = path.relative_to(root)
        if (hidden or not any(part.startswith(".") for part in below.parts)) and not path.is_dir():
            yield str(below if plain else os.path.join(root, below))


def source_of(name: str, utterance: object) -> Source:
    from effasr.data.manifest.cuts import prompt_of
    from effasr.data.manifest.utterance import FileUtterance, existing

    file = name.replace("/", "_").replace("\0", "_") or "recording"
    if isinstance(utterance, FileUtterance) and utterance.embedded is None:
        return Source(
            name,
            file,
            existing(utterance.audio),
            offset=utterance.offset or 0.0,
            # If there is no `offset`, `duration` is the rounded length of the file.
            duration=None if utterance.offset is None else utterance.duration,
            channels=None if utterance.channel is None else (utterance.channel,),
            prompt=utterance.prompt,
        )
    try:
        cut: Cut = utterance.cut(name)  # type: ignore[attr-defined]
    except AudioError as error:
        return Source(name, file, problem=str(error))
    prompt, part = prompt_of(cut), AudioSegment.of(cut)
    if part is None or not isinstance(part.path, str):
        return Source(name, file, cut=cut, prompt=prompt)
    where = part.path, part.start, part.duration, part.channels, part.recorded
    return Source(name, file, *where, prompt=prompt)


def _below(file: str, folder: str) -> str:
    below = PurePath(os.path.relpath(file, folder or ".")).with_suffix("")
    return str(PurePath(*(part for part in below.parts if part != "..")))


def _stem(path: Path) -> str:
    return path.stem or path.name or "recording"
