"""Manifests of every supported kind, read as lhotse cuts.

Kinds: NeMo's JSON lines, lhotse cuts (``.jsonl``, ``.jsonl.gz``) and Shar folders, folders that
`effasr prepare` wrote, Kaldi data folders, and folders of audio files with transcripts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from lhotse import CutSet
from lhotse.cut import Cut

from effasr.data.audio import AudioError, load_audio, read_audio
from effasr.data.prompt import Prompt
from effasr.data.sources import cuts, folder, kaldi, nemo, shar
from effasr.data.sources.lines import numbered_lines, parse_object
from effasr.data.sources.pairs import SOURCE_TEXT
from effasr.data.sources.utterance import Utterance

__all__ = ["AudioError", "iterate", "load_audio", "named", "read", "read_audio", "request"]


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


def iterate(path: str | Path, *, language: str = "en") -> Iterator[Cut]:
    """The cuts of a manifest, one at a time.

    Lines that are no lhotse cuts need the header of their audio file, which is read here:
    lengths are then exact. A prepared folder needs none and is the fast way into training.

    Raises:
        ValueError: As `read`, but for an empty manifest.
    """
    for name, utterance in named(path, language=language):
        try:
            yield utterance.cut(name)
        except AudioError as error:
            raise ValueError(
                f"{utterance.origin}: {error} `effasr prepare` leaves such lines out."
            ) from error


def request(cut: Cut) -> Prompt:
    """What is asked of the model for this cut.

    Raises:
        ValueError: The cut's fields contradict each other.
    """
    return cuts.cut_prompt(cut, cut.id, Prompt().source)


def named(path: str | Path, *, language: str = "en") -> Iterator[tuple[str, Utterance]]:
    """The utterances of a manifest, each with a unique name; no audio file is opened.

    A name that the source gives must be unique. A name made from a file's name gets ``-2``,
    ``-3`` ... in the order of the source where it is taken.

    Raises:
        ValueError: As `read`, but for audio and an empty manifest.
    """
    taken: set[str] = set()
    for utterance in _utterances(Path(path), language):
        name = utterance.id
        if name in taken:
            if utterance.named:
                raise ValueError(
                    f"{utterance.origin}: the id {name!r} is taken by an earlier line: "
                    "give every utterance its own id."
                )
            count = 2
            while (name := f"{utterance.id}-{count}") in taken:
                count += 1
        taken.add(name)
        yield name, utterance


def _utterances(path: Path, language: str) -> Iterator[Utterance]:
    if path.is_dir():
        if (path / cuts.CUTS_FILE).is_file():
            return _from_lines(path / cuts.CUTS_FILE, language)
        if shar.is_shar(path):
            return shar.utterances(path, language)
        if kaldi.is_kaldi(path):
            return kaldi.utterances(path, language)
        return folder.utterances(path, language)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder.")
    return _from_lines(path, language)


def _from_lines(path: Path, language: str) -> Iterator[Utterance]:
    """NeMo's or lhotse's JSON lines: the first line tells which."""
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is None:
        return iter(())
    number, line = first
    row = parse_object(line, f"{path}:{number}")
    every = chain([first], lines)
    if "audio_filepath" in row:
        return nemo.utterances(every, path, language)
    if row.keys() & {"supervisions", "recording", "tracks"}:
        return cuts.utterances(every, path, language)
    if SOURCE_TEXT in row:
        raise ValueError(
            f"{path}:{number}: a text-only line, with `{SOURCE_TEXT}` but without "
            "`audio_filepath`: only training reads such manifests."
        )
    raise ValueError(
        f"{path}:{number}: neither a NeMo line (no `audio_filepath`) nor a lhotse cut (no "
        f"`supervisions`): its fields are {', '.join(sorted(row)) or 'none'}."
    )
