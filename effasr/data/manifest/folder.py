"""Folders of audio files with transcripts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from effasr.data.manifest import nemo, subtitles
from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.row import ManifestRow, absolute
from effasr.data.manifest.utterance import (
    FileUtterance,
    FolderFormat,
    ReadOptions,
    RejectedRow,
    Utterance,
)
from effasr.data.manifest.walk import AUDIO_SUFFIXES, walk
from effasr.data.prompt import Prompt

log = logging.getLogger(__name__)

SUBTITLES = (".srt", ".vtt", ".ctm")


def _read(folder: Path, options: ReadOptions) -> Iterator[Utterance]:
    """Read a folder in one of four arrangements, in a fixed order.

    - ``metadata.jsonl`` with ``file_name`` and ``text``, ``transcription`` or ``sentence``, as
      Hugging Face's audiofolder has it; tables are read by `table`;
    - LibriSpeech's ``*.trans.txt``, lines of ``name TEXT`` beside the audio files;
    - ``NAME.txt`` beside each ``NAME.wav`` (or another suffix), at any depth;
    - ``NAME.srt``, ``NAME.vtt`` or ``NAME.ctm`` beside it, with the times of parts of it.

    Links to folders are followed; names that begin with a dot are left out.
    """
    if (folder / "metadata.jsonl").is_file():
        return _from_lines(folder / "metadata.jsonl", options)
    files = all_files(folder)
    transcripts = [path for path in files if path.name.endswith(".trans.txt")]
    if transcripts:
        return _from_librispeech(transcripts, files, options.language)
    return _from_neighbours(folder, files, options)


FORMAT = FolderFormat(detect=lambda folder: True, read=_read, files=lambda folder: None)


def all_files(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted; warn of each folder that cannot be read."""
    unreadable: list[OSError] = []
    files = sorted(map(Path, walk(folder, unreadable)))
    for error in unreadable:
        log.warning("%s is left out: it cannot be read: %s", error.filename, error.strerror)
    return files


def _from_lines(path: Path, options: ReadOptions) -> Iterator[Utterance]:
    for number, line in numbered_lines(path):
        try:
            yield nemo.parse(ManifestRow.parse(line, path, number), options)
        except ValueError as error:
            yield RejectedRow(f"{path.name}:{number}", f"{path}:{number}", str(error))


def _from_librispeech(
    transcripts: list[Path], files: list[Path], language: str
) -> Iterator[Utterance]:
    recordings = {path.with_suffix(""): path for path in files if _is_audio(path)}
    used = set()
    for path in transcripts:
        for number, line in numbered_lines(path):
            name, text = (*line.strip().split(maxsplit=1), "")[:2]
            audio = recordings.get(path.parent / name)
            used.add(path.parent / name)
            yield FileUtterance(
                id=name,
                named=True,
                origin=f"{path}:{number}",
                audio=str(audio.absolute()) if audio else absolute(f"{name}.flac", path.parent),
                text=text.strip(),
                prompt=Prompt(language, language),
            )
    for stem in sorted(recordings.keys() - used):
        yield _without_text(recordings[stem], "is in no *.trans.txt")


def _is_audio(path: Path) -> bool:
    return path.suffix.lower() in AUDIO_SUFFIXES


def _without_text(path: Path, problem: str) -> RejectedRow:
    return RejectedRow(path.stem, str(path), f"{path}: {problem}.", str(path.absolute()))


def _from_neighbours(folder: Path, files: list[Path], options: ReadOptions) -> Iterator[Utterance]:
    present = set(files)
    files = [path for path in files if _is_audio(path)]
    if not files:
        raise ValueError(
            f"{folder}: not a folder of utterances: it needs cuts.jsonl.gz (from `effasr "
            f"prepare`), wav.scp (Kaldi), metadata.csv, metadata.jsonl, or audio files "
            f"({', '.join(AUDIO_SUFFIXES[:6])} ...) with a .txt, .srt, .vtt or .ctm beside "
            f"each.{_other_format(folder)}"
        )
    texts = {
        path: next(
            (
                text
                for suffix in (".txt", *SUBTITLES)
                if (text := path.with_suffix(suffix)) in present
            ),
            None,
        )
        for path in files
    }
    if not any(texts.values()) and not options.untranscribed:
        raise ValueError(
            f"{files[0]}: there is no {files[0].with_suffix('.txt').name} beside it (and so for "
            f"{len(files)} of {len(files)} audio files): write the transcripts, or move the "
            "files away."
        )
    prompt = Prompt(options.language, options.language)
    for path, text in texts.items():
        audio = str(path.absolute())
        if text is None and not options.untranscribed:
            yield _without_text(path, f"there is no {path.with_suffix('.txt').name} beside it")
        elif text is not None and text.suffix in SUBTITLES:
            for part in subtitles.read(text):
                if isinstance(part, str):
                    yield RejectedRow(path.stem, str(text), part, audio)
                    continue
                yield FileUtterance(
                    *(path.stem, False, str(text), audio, part.text, prompt),
                    offset=part.start,
                    duration=part.end - part.start,
                )
        else:
            lines = () if text is None else numbered_lines(text)
            words = " ".join(word for _, line in lines for word in line.split())
            origin = str(text or path.with_suffix(".txt"))
            yield FileUtterance(path.stem, False, origin, audio, words, prompt)


def _other_format(folder: Path) -> str:
    """Name a format that is not read, with the way into one that is."""
    for pattern, name, way in _OTHER_FORMATS:
        if next(folder.rglob(pattern), None) is not None:
            return f" It has {pattern}, as {name} has: {way}."
    return ""


_OTHER_FORMATS = (
    ("*.parquet", "a dataset of Hugging Face", "load it with datasets.load_dataset, and write "
     "its audio as files with metadata.csv"),
    ("*.arrow", "a dataset of Hugging Face on disk", "load it with datasets.load_from_disk, and "
     "write its audio as files with metadata.csv"),
    ("*.tar", "a tarred set of NeMo or WebDataset", "unpack the tar files, and name the audio in "
     "the manifest"),
)  # fmt: skip
