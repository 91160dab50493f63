"""Reads manifests of every supported kind as lhotse cuts.

Kinds: NeMo's JSON lines, lhotse cuts (``.jsonl``, ``.jsonl.gz``) and Shar folders, folders that
`effasr prepare` wrote, Kaldi data folders, and folders of audio files with transcripts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from lhotse import CutSet
from lhotse.cut import Cut

from effasr.data.audio.audio_file import AudioError
from effasr.data.manifest import cuts, folder, kaldi, nemo, shar
from effasr.data.manifest.lines import check_file, numbered_lines, parse_object
from effasr.data.manifest.pairs import SOURCE_TEXT
from effasr.data.manifest.utterance import Utterance
from effasr.data.prompt import Prompt


class _Read(Protocol):
    """Makes utterances from numbered lines of a manifest and a default language."""

    def __call__(
        self,
        lines: Iterable[tuple[int, str]],
        path: Path,
        language: str,
        *,
        untranscribed: bool = False,
    ) -> Iterator[Utterance]: ...


def read(path: str | Path, *, language: str = "en") -> CutSet:
    """Read a manifest; see `iterate`.

    Each cut has one supervision with ``text`` and ``language`` (the one spoken), and the custom
    fields ``target_lang``, ``task`` and ``pnc``, which `request` puts together.

    Args:
        path: A file or folder of any supported kind. Relative audio paths in it are relative
            to its folder.
        language: The language of utterances that name none.

    Returns:
        The cuts, in the order of the source, with absolute audio paths and unique ids.

    Raises:
        ValueError: The path is of no known kind or holds no utterance, a line is malformed,
            two lines have the same id, or the header of an audio file cannot be read.
    """
    found = CutSet.from_cuts(list(iterate(path, language=language)))
    if not len(found):
        raise ValueError(f"{path}: holds no utterances.")
    return found


def iterate(
    path: str | Path, *, language: str = "en", untranscribed: bool = False
) -> Iterator[Cut]:
    """Yield the cuts of a manifest, one at a time.

    Lines that are no lhotse cuts need the header of their audio file, which is read here:
    lengths are then exact. A prepared folder needs none and is the fast way into training.
    With ``untranscribed`` an utterance may lack a text, and its cut has an empty one.

    Raises:
        ValueError: As `read`, but for an empty manifest.
    """
    for name, utterance in named(path, language=language, untranscribed=untranscribed):
        try:
            yield utterance.cut(name)
        except AudioError as error:
            raise ValueError(
                f"{utterance.origin}: {error} `effasr prepare` leaves such lines out."
            ) from error


def request(cut: Cut) -> Prompt:
    """Return the prompt of a cut.

    Raises:
        ValueError: The cut's fields contradict each other.
    """
    return cuts.cut_prompt(cut, cut.id, Prompt().source)


def named(
    path: str | Path, *, language: str = "en", untranscribed: bool = False
) -> Iterator[tuple[str, Utterance]]:
    """Yield the utterances of a manifest, each with a unique name; no audio file is opened.

    A name that the source gives must be unique. A name made from a file's name gets ``-2``,
    ``-3`` ... in the order of the source where it is taken. With ``untranscribed`` an utterance may
    lack a text.

    Raises:
        ValueError: As `read`, but for audio and an empty manifest.
    """
    names = Names()
    for utterance in _utterances(Path(path), language, untranscribed):
        yield names.take(utterance), utterance


class Names:
    """The names of a manifest's utterances: see `named`."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}
        """Up to which number the names made of a file's name are taken."""

    def take(self, utterance: Utterance) -> str:
        """Return the name of the next utterance.

        Raises:
            ValueError: It has one that is taken.
        """
        name = utterance.id
        if name in self._taken:
            if utterance.named:
                raise ValueError(
                    f"{utterance.origin}: the id {name!r} is taken by an earlier line: "
                    "give every utterance its own id."
                )
            count = self._counts.get(utterance.id, 1) + 1
            while (name := f"{utterance.id}-{count}") in self._taken:
                count += 1
            self._counts[utterance.id] = count
        self._taken.add(name)
        return name

    def take_all(self, utterances: Iterable[Utterance]) -> list[str]:
        """Return the names of the next utterances.

        Raises:
            ValueError: One has one that is taken.
        """
        return [self.take(utterance) for utterance in utterances]

    def take_as_they_are(self, names: Sequence[str]) -> bool:
        """Take these, if none is taken and none is there twice; whether that was so."""
        if len(set(names)) < len(names) or not self._taken.isdisjoint(names):
            return False
        self._taken.update(names)
        return True


@dataclass(frozen=True, slots=True)
class Part:
    """Some utterances of a manifest, in a form that can be sent to other processes.

    Attributes:
        path: Path of the manifest.
        lines: Its lines with their numbers.
        read: Function that reads the lines.
        others: The utterances themselves, if they do not come from lines.
    """

    path: Path
    lines: list[tuple[int, str]] = field(default_factory=list)
    read: _Read | None = None
    others: list[Utterance] = field(default_factory=list)

    def utterances(self, language: str, *, untranscribed: bool = False) -> Iterator[Utterance]:
        """Return the utterances; see `named`, but for their names."""
        if self.read is None:
            return iter(self.others)
        return self.read(self.lines, self.path, language, untranscribed=untranscribed)


def parts(
    path: str | Path, language: str, size: int, *, untranscribed: bool = False
) -> Iterator[Part]:
    """Yield the parts of a manifest, each of ``size`` utterances at most; see `named`.

    Raises:
        ValueError: As `named`.
    """
    path = Path(path)
    file = _file_of_lines(path)
    if file is None:
        utterances = _utterances(path, language, untranscribed)
        while others := list(islice(utterances, size)):
            yield Part(path, others=others)
        return
    lines, read = _reader(file)
    while some := list(islice(lines, size)):
        yield Part(file, some, read)


def deciding_files(path: str | Path) -> tuple[list[Path], list[Path]] | None:
    """Return the files that decide what is read from a manifest.

    Returns:
        Those whose content does, and archives of audio; None for a folder of audio files, whose
        very listing does.

    Raises:
        ValueError: There is no such manifest.
    """
    path = Path(path)
    if (file := _file_of_lines(path)) is not None:
        return [file], []
    if shar.is_shar(path):
        return shar.files(path)
    if kaldi.is_kaldi(path):
        return [file for name in kaldi.FILES if (file := path / name).is_file()], []
    return None


def _utterances(path: Path, language: str, untranscribed: bool) -> Iterator[Utterance]:
    file = _file_of_lines(path)
    if file is not None:
        lines, read = _reader(file)
        return read(lines, file, language, untranscribed=untranscribed)
    if shar.is_shar(path):
        return shar.utterances(path, language, untranscribed=untranscribed)
    if kaldi.is_kaldi(path):
        return kaldi.utterances(path, language, untranscribed=untranscribed)
    return folder.utterances(path, language, untranscribed=untranscribed)


def _file_of_lines(path: Path) -> Path | None:
    """Return the file, if the manifest is one or a prepared folder."""
    if path.is_dir():
        file = path / cuts.CUTS_FILE
        return file if file.is_file() else None
    check_file(path)
    return path


def _reader(path: Path) -> tuple[Iterator[tuple[int, str]], _Read]:
    """Return the lines and their reader (NeMo's or lhotse's JSON), chosen by the first line."""
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        return iter(()), cuts.utterances
    number, line = first
    row = parse_object(line, f"{path}:{number}")
    every = chain([first], lines)
    if "audio_filepath" in row:
        return every, nemo.utterances
    if row.keys() & {"supervisions", "recording", "tracks"}:
        return every, cuts.utterances
    if SOURCE_TEXT in row:
        raise ValueError(
            f"{path}:{number}: a text-only line, with `{SOURCE_TEXT}` but without "
            "`audio_filepath`: only training reads such manifests."
        )
    if row.keys() & {"messages", "conversations"}:
        raise ValueError(
            f"{path}:{number}: a conversation, with `messages`: only training of a language model "
            "and `effasr chat` read such manifests; dropped.jsonl of the run lists what is wrong."
        )
    raise ValueError(
        f"{path}:{number}: neither a NeMo line (no `audio_filepath`) nor a lhotse cut (no "
        f"`supervisions`): its fields are {', '.join(sorted(row)) or 'none'}."
    )
