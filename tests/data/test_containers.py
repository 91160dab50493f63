"""Files whose first header does not say how much audio they hold."""

import io
import os
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile

from effasr.data.audio.audio_file import (
    DURATION_TOLERANCE,
    LOSSY_TOLERANCE,
    AudioError,
    UnknownFormat,
)
from effasr.data.audio.embedded import TarMember
from effasr.data.audio.waveform import AudioProblem, read_audio, read_header

RATE = 16_000
LOSSLESS = {
    "wav": ("WAV", "PCM_16"), "rf64": ("RF64", "PCM_16"), "w64": ("W64", "PCM_24"),
    "aiff": ("AIFF", "PCM_16"), "au": ("AU", "PCM_16"), "sph": ("NIST", "PCM_16"),
    "caf": ("CAF", "PCM_16"), "flac": ("FLAC", "PCM_16"),
}  # fmt: skip
STATED = [
    *("AVR PCM_16", "MAT4 FLOAT", "MAT5 PCM_16", "MPC2K PCM_16", "SDS PCM_24", "SVX PCM_S8"),
    *("SVX PCM_16", "VOC PCM_16", "VOC ULAW", "WVE ALAW", "NIST ULAW", "NIST ALAW"),
]
LOSSY = {"mp3": ("MP3", None), "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS")}


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """A tone in noise: its frames in a variable bit rate differ in size."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * RATE)) / RATE
    level = np.where(np.sin(2 * np.pi * times) > 0, 0.2, 0.001)
    return (level * rng.normal(size=len(times)) + 0.2 * np.sin(2000 * times)).astype(np.float32)


def encoded(suffix: str, seconds: float, seed: int = 0, **options: object) -> bytes:
    container, subtype = (LOSSLESS | LOSSY)[suffix]
    file = io.BytesIO()
    soundfile.write(file, sound(seconds, seed), RATE, format=container, subtype=subtype, **options)
    return file.getvalue()


def mp3(seconds: float, seed: int = 0) -> bytes:
    return encoded("mp3", seconds, seed, bitrate_mode="VARIABLE", compression_level=0.5)


def without_xing(content: bytes) -> bytes:
    # Bytes of the first frame, of MPEG 2 at 16 kHz.
    rates = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
    return content[(72 * 1000 * rates[content[2] >> 4] // RATE + (content[2] >> 1 & 1)) :]


def with_xing_of(content: bytes, frames: int) -> bytes:
    at = max(content.find(b"Xing"), content.find(b"Info"))
    return content[: at + 8] + struct.pack(">I", frames) + content[at + 12 :]


ID3 = b"ID3\x04\0\0\0\0\0\x40" + bytes(64)
APE = struct.pack("<8sIIII8x", b"APETAGEX", 2000, 32, 0, 0)
ID3V1 = b"TAG" + bytes(125)


def patched(content: bytes, marker: bytes, offset: int, value: bytes) -> bytes:
    at = content.index(marker) + offset
    return content[:at] + value + content[at + len(value) :]


def without_last_flag(content: bytes) -> bytes:
    """Ogg whose last page does not say that it is the last."""
    page = bytearray(content[(at := content.rindex(b"OggS")) :])
    page[5] &= ~4
    page[22:26] = bytes(4)
    checksum = 0
    for byte in page:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1 ^ (0x04C11DB7 if checksum >> 31 else 0)) & 0xFFFF_FFFF
    page[22:26] = struct.pack("<I", checksum)
    return content[:at] + bytes(page)


A, B = 2.0, 3.0
WHOLE: dict[str, tuple[str, float, Callable[[], bytes]]] = {
    "plain mp3": ("mp3", A, lambda: mp3(A)),
    "mp3 without xing": ("mp3", A, lambda: without_xing(mp3(A))),
    "mp3 with tags": ("mp3", A, lambda: ID3 + without_xing(mp3(A)) + APE + ID3V1),
    "mp3, xing of a part": ("mp3", A, lambda: with_xing_of(mp3(A), 20)),
    "joined mp3": ("mp3", A + B, lambda: mp3(A) + ID3V1 + ID3 + mp3(B, 1)),
    "joined mp3 without xing": ("mp3", A + B, lambda: without_xing(mp3(A)) + without_xing(mp3(B))),
    "mp3, junk inside": ("mp3", A + B, lambda: mp3(A) + bytes(5000) + b"\xff\xfb" * 9 + mp3(B, 1)),
    "joined vorbis": ("ogg", A + B, lambda: encoded("ogg", A) + encoded("ogg", B, 1)),
    "joined opus": ("opus", A + B, lambda: encoded("opus", A) + encoded("opus", B, 1)),
    "three in a chain": ("ogg", 2 * A + B, lambda: b"".join(
        (encoded("ogg", A), encoded("ogg", B), encoded("ogg", A, 2)))),
    "vorbis without an end": ("ogg", A, lambda: without_last_flag(encoded("ogg", A))),
    "opus without an end": ("opus", A, lambda: without_last_flag(encoded("opus", A))),
    "joined flac": ("flac", A + B, lambda: encoded("flac", A) + encoded("flac", B)),
    "flac with a tag": ("flac", A, lambda: ID3 + encoded("flac", A)),
    "flac of a pipe": ("flac", A, lambda: patched(encoded("flac", A), b"fLaC", 22, bytes(4))),
    "joined wav": ("wav", A + B, lambda: encoded("wav", A) + encoded("wav", B)),
    "wav of a recorder that died": (
        "wav", A, lambda: patched(patched(encoded("wav", A), b"data", 4, bytes(4)), b"RIFF", 4,
                                  bytes(4))),
    "wav of a pipe": ("wav", A, lambda: patched(encoded("wav", A), b"data", 4, b"\xff" * 4)),
    "wav of a header of a part": (
        "wav", A, lambda: patched(encoded("wav", A), b"data", 4, struct.pack("<I", 32_000))),
    "rf64 of a recorder that died": (
        "rf64", A, lambda: patched(encoded("rf64", A), b"ds64", 16, bytes(8))),
    "wav with tags": ("wav", A, lambda: ID3 + encoded("wav", A) + ID3V1),
    "ogg with a tag": ("ogg", A, lambda: ID3 + encoded("ogg", A)),
    "wav with a list behind": ("wav", A, lambda: encoded("wav", A) + b"LIST\4\0\0\0abcd"),
    "aiff of a recorder that died": (
        "aiff", A, lambda: patched(patched(encoded("aiff", A), b"SSND", 4, bytes(4)), b"COMM", 10,
                                   bytes(4))),
    "au of a recorder that died": (
        "au", A, lambda: patched(encoded("au", A), b".snd", 8, bytes(4))),
    "au of a pipe": ("au", A, lambda: patched(encoded("au", A), b".snd", 8, b"\xff" * 4)),
    "w64 of a recorder that died": (
        "w64", A, lambda: patched(encoded("w64", A), b"data", 16, struct.pack("<Q", 24))),
    # libsndfile reads these to the end by itself.
    "w64 of a header of a part": (
        "w64", A, lambda: patched(encoded("w64", A), b"data", 16, struct.pack("<Q", 3000))),
    "sph of a header of a part": (
        "sph", A, lambda: patched(encoded("sph", A), b"sample_count -i ", 16, b"16000")),
    "caf of a recorder that died": (
        "caf", A, lambda: patched(encoded("caf", A), b"data", 4, bytes(8))),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_all_of_a_file_is_read(tmp_path: Path, name: str) -> None:
    suffix, seconds, make = WHOLE[name]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(make())
    header = read_header(path)
    assert header.tolerance == (LOSSY_TOLERANCE if suffix in LOSSY else DURATION_TOLERANCE)
    # An MP3 has the delay of its encoder at each end of each part.
    assert header.duration == pytest.approx(seconds, abs=0.3 if suffix == "mp3" else 1e-3)
    audio = read_audio(path)
    assert len(audio) == header.num_samples
    # The last half second is speech of the file, not silence.
    assert np.abs(audio[-RATE // 2 :]).max() > 0.1
    part = read_audio(path, offset=seconds - 1.0, duration=0.5)
    begin = round((seconds - 1.0) * RATE)
    tolerance = 1e-3 if suffix in LOSSY else 0.0
    np.testing.assert_allclose(part, audio[begin : begin + RATE // 2], atol=tolerance)


def test_a_joined_file_in_a_tar(tmp_path: Path) -> None:
    content = encoded("ogg", A) + encoded("ogg", B)
    (tmp_path / "a.tar").write_bytes(bytes(512) + content)
    audio = read_audio(TarMember(str(tmp_path / "a.tar"), 512, len(content)))
    assert len(audio) == round((A + B) * RATE)


def test_parts_of_different_rates_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    soundfile.write(file, sound(1.0), 8_000, format="OGG")
    path = tmp_path / "a.ogg"
    path.write_bytes(encoded("ogg", A) + file.getvalue())
    with pytest.raises(AudioError, match=r"differ in sample rate .*: 8000 Hz x 1, 16000 Hz x 1"):
        read_header(path)


def test_too_many_parts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    path.write_bytes(encoded("flac", 0.1) * 65)
    with pytest.raises(AudioError, match=r"joined of 65 files, over 64: make one file of them"):
        read_header(path)


@pytest.mark.parametrize("suffix", [*LOSSLESS, *LOSSY])
def test_a_file_that_was_cut_short_is_never_taken_for_whole(tmp_path: Path, suffix: str) -> None:
    content = encoded(suffix, B)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content[: len(content) * 6 // 10])
    with pytest.raises(AudioError) as caught:
        # The header of FLAC says how long it is, which decoding shows to be wrong.
        read_audio(path, duration=read_header(path).duration)
    assert caught.value.problem in (AudioProblem.DURATION, AudioProblem.UNREADABLE)


@pytest.mark.parametrize("kind", STATED)
def test_the_length_in_other_headers_is_read(tmp_path: Path, kind: str) -> None:
    container, subtype = kind.split()
    path = tmp_path / "a"
    soundfile.write(path, sound(2.0), RATE, format=container, subtype=subtype)
    assert abs(read_header(path).num_samples - 2 * RATE) <= 1
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 6 // 10])
    with pytest.raises(AudioError, match="the file was cut short: ") as caught:
        read_header(path)
    assert caught.value.problem is AudioProblem.DURATION


def test_packed_sphere_is_not_measured_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.sph"
    content = encoded("sph", 1.0).replace(b"-s3 pcm", b"-s26 pcm,embedded-shorten-v2.00", 1)
    path.write_bytes(content[:20_000])
    with pytest.raises(UnknownFormat):
        read_header(path)


@pytest.mark.parametrize(
    ("suffix", "marker", "offset", "value"),
    [
        ("aiff", b"SSND", 4, struct.pack(">I", 2 * RATE + 8)),
        ("au", b".snd", 8, struct.pack(">I", 2 * RATE)),
        ("caf", b"data", 4, struct.pack(">q", 2 * RATE + 4)),
    ],
)
def test_bytes_that_no_header_knows_are_named(
    tmp_path: Path, suffix: str, marker: bytes, offset: int, value: bytes
) -> None:
    """As a recorder leaves them that brings the header up to date now and then."""
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(patched(encoded(suffix, B), marker, offset, value))
    with pytest.raises(AudioError, match=r"the header says 1\.000 s, but \d+ bytes follow"):
        read_header(path)


@pytest.mark.parametrize("name", ["another file", "text", "half a sample", "adpcm", "tagged"])
def test_bytes_behind_wav_that_are_no_samples_are_not_read(tmp_path: Path, name: str) -> None:
    content = encoded("wav", A)
    match name:
        case "another file":
            content += mp3(B)[: len(mp3(B)) // 2 * 2]
        case "text":
            content += b"<p>error</p>" * 1000
        case "half a sample":
            content = patched(content, b"data", 4, struct.pack("<I", RATE)) + b"x"
        case "adpcm":
            file = io.BytesIO()
            soundfile.write(file, sound(A), RATE, format="WAV", subtype="IMA_ADPCM")
            content = patched(file.getvalue(), b"data", 4, struct.pack("<I", 2560))
        case "tagged":  # and cut short
            content = ID3 + content[: len(content) // 2]
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(AudioError, match=r"bytes follow, perhaps|cut short: 1\.\d+ s of 2\.000 s"):
        read_header(tmp_path / "a.wav")


@pytest.mark.parametrize("suffix", [*LOSSLESS, *LOSSY])
def test_random_damage_never_changes_a_length_in_silence(tmp_path: Path, suffix: str) -> None:
    """What passes has the length that it is said to have, when decoded."""
    rng = random.Random(suffix)
    whole = [encoded(suffix, seconds, seed) for seed, seconds in enumerate((0.7, 1.3))]
    path = tmp_path / f"a.{suffix}"
    passed = 0
    for _ in range(int(os.environ.get("EFFASR_DAMAGES", 25))):
        content = bytearray(rng.choice([whole[0], whole[1], whole[0] + whole[1]]))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            match rng.randrange(4):
                case 0:
                    del content[at:]
                case 1:
                    content[at : at + 4] = rng.randbytes(4)
                case 2:
                    content[at:at] = rng.randbytes(rng.choice([1, 100]))
                case 3:
                    del content[at : at + rng.choice([1, 100])]
            if not content:
                break
        path.write_bytes(content)
        try:
            header = read_header(path)
            audio = read_audio(path, header.sample_rate)
        except AudioError:
            continue
        passed += 1
        missing = header.num_samples - len(audio)
        assert abs(missing) <= header.tolerance * header.sample_rate
    assert passed or suffix in ("flac", "opus", "ogg")


def test_nothing_is_written_to_the_terminal(tmp_path: Path, capfd) -> None:
    """mpg123 writes of lengths that are off by a percent."""
    for name, content in {
        "a.mp3": mp3(B)[:-3000],
        "b.mp3": with_xing_of(mp3(A), 20) + mp3(B),
        "c.mp3": mp3(A) + bytes(30_000) + ID3V1,
        "d.mp3": b"<!DOCTYPE html>" * 200,
        "e.mp3": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with suppress(AudioError):
            read_header(tmp_path / name)
        for offset in (0.0, 0.6, 1.4):
            with suppress(AudioError):
                read_audio(tmp_path / name, offset=offset, duration=0.5)
    assert capfd.readouterr().err == ""
