"""Reads manifests of every format as lhotse cuts.

A format of lines is added to `LINES`, a format of folders to `FOLDERS`; nothing else knows formats.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from lhotse import CutSet
from lhotse.cut import Cut

from effasr.data.audio.audio_file import AudioError
from effasr.data.manifest import (
    cuts,
    datasets,
    folder,
    kaldi,
    nemo,
    recordings,
    shar,
    table,
    tarred,
)
from effasr.data.manifest.lines import check_file, has_suffix, numbered_lines
from effasr.data.manifest.pairs import SOURCE_TEXT
from effasr.data.manifest.row import ManifestRow
from effasr.data.manifest.utterance import (
    FolderFormat,
    LineFormat,
    ReadOptions,
    RejectedRow,
    Utterance,
)
from effasr.data.prompt import Prompt

LINES = (nemo.FORMAT, cuts.FORMAT)
FOLDERS = (
    *(table.FORMAT, tarred.NEMO, shar.FORMAT, kaldi.FORMAT, recordings.FORMAT, tarred.WEB),
    *(datasets.FORMAT, folder.FORMAT),
)
"""Formats of lines, and of folders and other files; the first that accepts a manifest reads it."""

_DAMAGED_LINES = 100
"""Lines at the beginning that may be damaged: the first that is not decides the format."""


def read(path: str | Path, *, language: str = "en") -> CutSet:
    """Read a manifest: a file or folder of any format.

    Each cut has one supervision with ``text`` and ``language`` (the one spoken), and the custom
    fields ``target_lang``, ``task`` and ``pnc`` where the source says so or they are not as usual,
    which `cuts.prompt_of` puts together. The cuts are in the order of the source, with absolute
    audio paths and unique ids.
    """
    utterances = list(iterate(path, language=language))
    if not utterances:
        raise ValueError(f"{path}: holds no utterances.")
    return CutSet.from_cuts(utterances)


def iterate(
    path: str | Path,
    *,
    language: str = "en",
    untranscribed: bool = False,
    prompt: Prompt | None = None,
    text_column: str | None = None,
) -> Iterator[Cut]:
    """Yield the cuts of a manifest; see `named`.

    Lines that are no lhotse cuts need the header of their audio file, which is read here: lengths
    are then exact. A prepared folder needs none and is the fast way into training.
    """
    utterances = named(
        path,
        language=language,
        untranscribed=untranscribed,
        prompt=prompt,
        text_column=text_column,
    )
    for name, utterance in utterances:
        yield cut_of(name, utterance)


def cut_of(name: str, utterance: Utterance) -> Cut:
    """Return the cut of an utterance; an error has the way to go on without it."""
    try:
        return utterance.cut(name)
    except AudioError as error:
        origin = "" if isinstance(utterance, RejectedRow) else f"{utterance.origin}: "
        raise ValueError(f"{origin}{error} `effasr prepare` leaves such lines out.") from error


def named(
    path: str | Path,
    *,
    language: str = "en",
    untranscribed: bool = False,
    unread: Counter[str] | None = None,
    prompt: Prompt | None = None,
    text_column: str | None = None,
) -> Iterator[tuple[str, Utterance]]:
    """Yield the utterances of a manifest, each with a unique name; no audio file is opened.

    What a line does not say is as in ``prompt``, that of a trained model. Training has none yet: a
    transcript in ``language``, with punctuation.
    A name that the source gives must be unique. A name made from a file's name gets ``-2``,
    ``-3`` ... in the order of the source where it is taken.
    """
    names = UniqueNames()
    default = Prompt(language, language) if prompt is None else prompt
    options = ReadOptions(default, untranscribed, unread, text_column)
    for utterance in _utterances(Path(path), options):
        name = names.claim(utterance)
        yield name, checked(name, utterance)


class TakenName(str):
    """A name in place of one that an earlier line has."""

    __slots__ = ()


def checked(name: str, utterance: Utterance) -> Utterance:
    """Return the utterance, or its rejection where the source gives its name twice."""
    if not isinstance(name, TakenName):
        return utterance
    reason = (
        f"{utterance.origin}: the id {utterance.id!r} is taken by an earlier line: give every "
        "utterance its own id."
    )
    return RejectedRow(utterance.id, utterance.origin, reason, utterance.audio)


class UniqueNames:
    """The names of a manifest's utterances: see `named`."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._counts: dict[str, int] = {}  # last number appended to a file's name

    def claim(self, utterance: Utterance) -> str:
        name = utterance.id
        if name in self._used:
            count = self._counts.get(utterance.id, 1) + 1
            while (name := f"{utterance.id}-{count}") in self._used:
                count += 1
            self._counts[utterance.id] = count
        self._used.add(name)
        is_taken = utterance.named and name != utterance.id
        return TakenName(name) if is_taken else name

    def claim_all(self, utterances: Iterable[Utterance]) -> list[str]:
        return [self.claim(utterance) for utterance in utterances]

    def claim_unchanged(self, names: Sequence[str]) -> bool:
        """Claim these names if all are unused and different; return whether they are."""
        if len(set(names)) < len(names) or not self._used.isdisjoint(names):
            return False
        self._used.update(names)
        return True


@dataclass(frozen=True, slots=True)
class ManifestPart:
    """Some utterances of a manifest, in a form that can be sent to other processes."""

    path: Path
    lines: list[tuple[int, str]] = field(default_factory=list)
    format: LineFormat | None = None  # of the lines
    parsed: list[Utterance] = field(default_factory=list)  # of a manifest that is not of lines

    def utterances(self, options: ReadOptions) -> Iterator[Utterance]:
        """Yield the utterances; their names need not be unique."""
        if self.format is None:
            return iter(self.parsed)
        return self.format.read(self.lines, self.path, options)


def parts(path: Path, size: int, options: ReadOptions) -> Iterator[ManifestPart]:
    """Yield the parts of a manifest, each of ``size`` utterances at most."""
    if (file := file_of_lines(path)) is None:
        utterances = folder_format(path).read(path, options)
        while parsed := list(islice(utterances, size)):
            yield ManifestPart(path, parsed=parsed)
        return
    lines, line_format = _lines_and_format(file)
    while block := list(islice(lines, size)):
        yield ManifestPart(file, block, line_format)


def deciding_files(path: str | Path) -> tuple[list[Path], list[Path]] | None:
    """Return the files that decide what is read from a manifest; see `FolderFormat`."""
    path = Path(path)
    if (file := file_of_lines(path)) is not None:
        return [file], []
    return folder_format(path).files(path)


def file_of_lines(path: Path) -> Path | None:
    """Return the file, if the manifest is one of JSON lines or a prepared folder."""
    if path.is_dir():
        file = path / cuts.CUTS_FILE
        return file if file.is_file() else None
    if any(kind.detect(path) for kind in FOLDERS):
        return None
    check_file(path)
    return path


def folder_format(path: Path) -> FolderFormat:
    return next(kind for kind in FOLDERS if kind.detect(path))


def _utterances(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    if (file := file_of_lines(path)) is None:
        return folder_format(path).read(path, options)
    lines, line_format = _lines_and_format(file)
    return line_format.read(lines, file, options)


def _lines_and_format(path: Path) -> tuple[Iterator[tuple[int, str]], LineFormat]:
    """Return the lines and their format, chosen by the first line."""
    lines = numbered_lines(path, "surrogateescape")
    first: list[tuple[int, str]] = []
    row, problem = None, None
    for number, line in islice(lines, _DAMAGED_LINES):
        first.append((number, line))
        try:
            row = ManifestRow.parse(line, path, number)
            break
        except ValueError as error:
            problem = problem or error
    if row is None:
        if problem is not None:
            if has_suffix(path, table.SUFFIXES):
                table.header_of(first[0][1], path)
            raise problem
        return iter(()), cuts.FORMAT
    for line_format in LINES:
        if line_format.detect(row.values):
            return chain(first, lines), line_format
    if SOURCE_TEXT in row.values:
        raise row.error(
            f"a text-only line, with `{SOURCE_TEXT}` but without `audio_filepath`: only training "
            "reads such manifests."
        )
    if row.values.keys() & {"messages", "conversations"}:
        raise row.error(
            "a conversation, with `messages`: only training of a language model and `effasr chat` "
            "read such manifests; dropped.jsonl of the run lists what is wrong."
        )
    raise row.error(
        "neither a NeMo line (no `audio_filepath`) nor a lhotse cut (no `supervisions`): its "
        f"fields are {', '.join(sorted(row.values)) or 'none'}."
    )
