"""Lists and checks the recordings to augment with, and reads them when they are needed."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lhotse import Recording
from lhotse.cut import Cut
from lhotse.cut.data import DataCut
from lhotse.cut.set import deserialize_cut

from effasr.data.audio.audio_file import AudioError, regular_file_size
from effasr.data.audio.cut_sources import check_sources
from effasr.data.audio.waveform import audio_path, load_audio, samples_in
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.index.columns import Ragged, RaggedBuilder, json_of
from effasr.data.manifest.audio_sources import refuse_programs
from effasr.data.manifest.cuts import CUTS_FILE, check_times
from effasr.data.manifest.fields import seconds_field, text_field
from effasr.data.manifest.folder import AUDIO_SUFFIXES, all_files
from effasr.data.manifest.kaldi import is_kaldi
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.data.manifest.reader import named
from effasr.data.manifest.shar import is_shar
from effasr.data.manifest.utterance import FileUtterance, absolute
from effasr.data.prompt import Prompt

_CACHE_BYTES = 64 * 2**20
"""Decoded audio that each process keeps of a list of clips."""

_WHOLE = 20 * SAMPLE_RATE
"""Samples up to which a clip is read, and kept, as a whole; of longer ones what is needed."""


@dataclass(frozen=True, slots=True, eq=False)
class Clips:
    """Recordings in flat arrays, which forked workers share."""

    samples: np.ndarray  # int64 (n,), lengths at `SAMPLE_RATE`
    fingerprint: str  # Changes if their number, order or a length does
    _lines: Ragged
    _cache: OrderedDict[int, np.ndarray] = field(default_factory=OrderedDict)

    @classmethod
    def load(cls, paths: Sequence[str | Path], what: str) -> Clips:
        """List recordings."""
        lines, samples = RaggedBuilder(), array("q")
        for path in paths:
            before = len(samples)
            try:
                for cut in _cuts(Path(path)):
                    lines.append(json_of(cut))
                    samples.append(samples_in(cut.duration))
            except ValueError as error:
                remedy = " Remove it, or mend it." if isinstance(error, AudioError) else ""
                raise ValueError(f"`{what}`: {error}{remedy}") from error
            if len(samples) == before:
                raise ValueError(f"`{what}`: {path} holds no audio: name another, or leave it out.")
        counts = np.array(samples, dtype=np.int64)
        digest = hashlib.sha256(counts.data).hexdigest()
        return cls(counts, digest, lines.build())

    def __len__(self) -> int:
        return len(self.samples)

    def cut(self, index: int) -> Cut:
        """Return a recording as a lhotse cut."""
        return deserialize_cut(json.loads(self._lines[index].tobytes()))

    def read(self, index: int, start: int = 0, samples: int | None = None) -> np.ndarray:
        """Return the samples of a recording from ``start`` on, up to the end by default.

        Returns:
            float32 (samples,), mono, at `SAMPLE_RATE`; not to be written to.
        """
        end = int(self.samples[index]) if samples is None else start + samples
        if self.samples[index] > _WHOLE:
            seconds = (end - start) / SAMPLE_RATE
            part = self.cut(index).truncate(offset=start / SAMPLE_RATE, duration=seconds)
            audio = load_audio(part)[: end - start]
            # lhotse ends it with the file, which may be half a sample before.
            return np.pad(audio, (0, end - start - len(audio)))
        audio = self._cache.pop(index, None)
        if audio is None:
            audio = load_audio(self.cut(index))
            audio.flags.writeable = False
            held = audio.nbytes + sum(one.nbytes for one in self._cache.values())
            while held > _CACHE_BYTES and self._cache:
                held -= self._cache.popitem(last=False)[1].nbytes
        self._cache[index] = audio
        return audio[start:end]


def _cuts(path: Path) -> Iterator[Cut]:
    if path.is_dir():
        if (path / CUTS_FILE).is_file():
            return _from_lines(path / CUTS_FILE)
        if is_shar(path) or is_kaldi(path):
            return (utterance.cut(name) for name, utterance in named(path))
        found = all_files(path)
        files = [file for file in found if file.suffix.lower() in AUDIO_SUFFIXES]
        return (_part(str(file.absolute()), str(file)) for file in files)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder.")
    if path.suffix.lower() in AUDIO_SUFFIXES:
        return iter([_part(str(path.absolute()), str(path))])
    return _from_lines(path)


def _from_lines(path: Path) -> Iterator[Cut]:
    for number, line in numbered_lines(path):
        origin = f"{path}:{number}"
        row = parse_object(line, origin)
        yield (
            _nemo(row, origin, path.parent)
            if "audio_filepath" in row
            else _lhotse(row, line, origin, path.parent)
        )


def _nemo(row: Mapping[str, Any], origin: str, folder: Path) -> Cut:
    return _part(
        absolute(text_field(row, "audio_filepath", origin), folder),
        origin,
        seconds_field(row, "offset", origin, zero=True),
        seconds_field(row, "duration", origin),
    )


def _lhotse(row: dict[str, Any], line: str, origin: str, folder: Path) -> Cut:
    refuse_programs(row, line, origin)
    try:
        if "sources" in row:
            cut = Recording.from_dict(row).to_cut()
        else:
            cut = deserialize_cut(row).drop_supervisions()
        check_times(cut)
    except Exception as error:  # lhotse checks little, and raises many kinds.
        raise ValueError(
            f"{origin}: neither a line with `audio_filepath` nor a cut or recording that lhotse "
            f"can read ({type(error).__name__}: {error})."
        ) from error
    if not cut.has_recording:
        raise ValueError(f"{origin}: cut {cut.id!r} has no recording: features are not read.")
    if isinstance(cut, DataCut) and cut.recording is not None:
        for source in cut.recording.sources:
            if source.type == "file":
                source.source = absolute(str(source.source), folder)
    if (audio := audio_path(cut)) is not None:
        regular_file_size(audio)
    else:
        check_sources(cut)
    return cut


def _part(
    audio: str, origin: str, offset: float | None = None, duration: float | None = None
) -> Cut:
    """Return a file or a part of it; its header is read."""
    name = Path(audio).stem
    prompt = Prompt()
    utterance = FileUtterance(name, False, origin, audio, "", prompt, offset, duration)
    return utterance.cut(name).drop_supervisions()
