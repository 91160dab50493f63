"""Writes lhotse's Shar folders: shards of cuts, and of their audio in tar files."""

import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import AudioSource, Recording
from lhotse.cut.data import DataCut
from lhotse.cut.set import deserialize_cut
from lhotse.utils import fastcopy

from effasr.data.atomic_files import atomic_file
from effasr.data.audio.audio_file import open_audio
from effasr.data.audio.embedded import Embedded
from effasr.data.audio.waveform import AudioSegment, load_audio, place
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.manifest.cuts import json_line, make_absolute
from effasr.data.manifest.times import shifted

_COPIED = {"FLAC": "flac", "OGG": "ogg", "MP3": "mp3", "MPEG": "mp3"}
"""Formats of whole files that are copied as they are, by their suffixes."""
_FLOATING = ("PCM_24", "PCM_32", "FLOAT", "DOUBLE")
_MOST_CHANNELS = 8  # of FLAC


@dataclass(frozen=True, slots=True)
class EncodedCut:
    """A cut whose recording is in a shard, and that recording."""

    name: str
    line: bytes
    suffix: str
    audio: bytes
    recording: bytes  # its manifest, JSON


def encode(line: bytes) -> EncodedCut:
    """Return a cut with its audio: the whole file where that is compressed, else its part as FLAC.

    Parts of files of up to 16 bits, or of a lossy format, get 16 bits; of others 24.
    """
    cut = deserialize_cut(json.loads(line))
    make_absolute(cut, Path())  # of a URL, its path in the cache
    assert isinstance(cut, DataCut)
    assert cut.recording is not None
    part = AudioSegment.of(cut)
    if part is None:  # lhotse alone can read it
        channel = cut.channel if isinstance(cut.channel, int) else cut.channel[0]
        cut = fastcopy(cut, channel=channel)
        samples, rate = _integers(load_audio(cut)[:, None], 24), SAMPLE_RATE
        return _encoded(cut, _flac(samples, rate, 24), "flac", len(samples), rate, [channel])
    with open_audio(part.path) as file:
        rate, suffix = file.samplerate, _COPIED.get(file.format)
        is_whole = cut.start == 0 and abs(cut.duration - file.frames / rate) < 0.5 / rate
        if suffix is not None and is_whole:
            content = part.path.read() if isinstance(part.path, Embedded) else _read(part.path)
            channels = cut.recording.sources[0].channels
            return _encoded(cut, content, suffix, file.frames, rate, channels)
        # The samples of a part, (samples, channels) of its channels alone.
        begin, length = place(file, part.path, part.start, part.duration)
        if len(part.channels) > _MOST_CHANNELS:
            raise ValueError(
                f"{part.path}: FLAC has at most {_MOST_CHANNELS} channels, but the cut has "
                f"{len(part.channels)}: choose one by `--channel`."
            )
        if begin:
            file.seek(begin)
        samples = file.read(min(length, file.frames - begin))[:, list(part.channels)]
        bits = 24 if file.subtype in _FLOATING else 16
    channels = [cut.channel] if isinstance(cut.channel, int) else list(cut.channel)
    content = _flac(_integers(samples, bits), rate, bits)
    return _encoded(cut, content, "flac", len(samples), rate, channels)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _integers(samples: np.ndarray, bits: int) -> np.ndarray:
    full = 2 ** (bits - 1)
    return np.clip(np.rint(samples.astype(np.float64) * full), -full, full - 1).astype(np.int32)


def _flac(samples: np.ndarray, rate: int, bits: int) -> bytes:
    file = io.BytesIO()
    # soundfile takes the highest bits of an int32.
    soundfile.write(file, samples << (32 - bits), rate, f"PCM_{bits}", format="FLAC")
    return file.getvalue()


def _encoded(
    cut: DataCut, audio: bytes, suffix: str, length: int, rate: int, channels: list[int]
) -> EncodedCut:
    recording = Recording(
        id=cut.id,
        sources=[AudioSource("shar", channels, "")],
        sampling_rate=rate,
        num_samples=length,
        duration=length / rate,
        channel_ids=channels,
    )
    supervisions = [fastcopy(each, recording_id=cut.id) for each in cut.supervisions]
    for each in supervisions:
        each.alignment = shifted(each.alignment, -cut.start)
    cut = fastcopy(cut, start=0.0, recording=recording, supervisions=supervisions)
    manifest = json.dumps(recording.to_dict()).encode()
    return EncodedCut(cut.id, json_line(cut), suffix, audio, manifest)


def write_shards(
    folder: Path,
    shards: int,
    total: int,
    cuts: Iterator[EncodedCut],
    progress: Callable[[int], None],
) -> None:
    """Write ``total`` cuts in order, as many to each shard; the folder appears when all is done."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    partial.mkdir()
    written = 0
    for number in range(shards):
        size = total * (number + 1) // shards - total * number // shards
        with (
            atomic_file(partial / f"recording.{number:06}.tar") as audio,
            atomic_file(partial / f"cuts.{number:06}.jsonl.gz") as lines,
            tarfile.open(fileobj=audio, mode="w", format=tarfile.GNU_FORMAT) as tar,
            gzip.GzipFile(filename="", mode="wb", fileobj=lines, mtime=0) as packed,
        ):
            for cut in islice(cuts, size):
                _add(tar, f"{cut.name}.{cut.suffix}", cut.audio)
                _add(tar, f"{cut.name}.json", cut.recording)
                packed.write(cut.line + b"\n")
                written += 1
                progress(written)
    partial.rename(folder)


def _add(tar: Any, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
