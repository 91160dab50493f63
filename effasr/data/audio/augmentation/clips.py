"""Lists and checks the recordings to augment with, and reads them when they are needed."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from lhotse.cut import Cut
from lhotse.cut.set import deserialize_cut

from effasr.data.audio.audio_file import AudioError, regular_file_size
from effasr.data.audio.cut_sources import check_sources
from effasr.data.audio.waveform import audio_path, load_audio, samples_in
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.index.columns import Ragged, RaggedBuilder, json_of
from effasr.data.manifest import folder, nemo
from effasr.data.manifest.cuts import make_absolute, read_cut
from effasr.data.manifest.lines import numbered_lines
from effasr.data.manifest.reader import file_of_lines, folder_format, named
from effasr.data.manifest.row import ManifestRow
from effasr.data.manifest.utterance import FileUtterance
from effasr.data.manifest.walk import AUDIO_SUFFIXES
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
            held = audio.nbytes + sum(item.nbytes for item in self._cache.values())
            while held > _CACHE_BYTES and self._cache:
                held -= self._cache.popitem(last=False)[1].nbytes
        self._cache[index] = audio
        return audio[start:end]


def _cuts(path: Path) -> Iterator[Cut]:
    if not path.is_dir() and path.suffix.lower() in AUDIO_SUFFIXES and path.is_file():
        return iter([_part(str(path.absolute()), str(path))])
    if (file := file_of_lines(path)) is not None:
        rows = (ManifestRow.parse(line, file, number) for number, line in numbered_lines(file))
        return map(_of_row, rows)
    if folder_format(path) is not folder.FORMAT:
        return (utterance.cut(name) for name, utterance in named(path))
    files = [file for file in folder.all_files(path) if file.suffix.lower() in AUDIO_SUFFIXES]
    return (_part(str(file.absolute()), str(file)) for file in files)


def _of_row(row: ManifestRow) -> Cut:
    """Return the audio of a line, which needs neither text nor supervision."""
    if nemo.FORMAT.detect(row.values):
        offset, duration = row.seconds("offset", zero=True), row.seconds("duration")
        return _part(row.audio("audio_filepath"), row.origin, offset, duration)
    refusal = "neither a line with `audio_filepath` nor a cut or recording that lhotse can read"
    cut = read_cut(row, refusal, allow_recording=True).drop_supervisions()
    if not cut.has_recording:
        raise row.error(f"cut {cut.id!r} has no recording: features are not read.", "recording")
    make_absolute(cut, row.path.parent)
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
