from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import AudioSource, MonoCut, MultiCut, Recording

from effasr.data.audio.waveform import (
    AudioError,
    AudioProblem,
    AudioSegment,
    load_audio,
    read_audio,
    read_header,
    samples_in,
)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_reads_every_format_as_mono_float32(
    tmp_path: Path, suffix: str, write_tone: Callable[..., Path]
) -> None:
    path = write_tone(tmp_path / f"a.{suffix}", 0.5, channels=2)
    audio = read_audio(path)
    assert audio.dtype == np.float32
    assert audio.shape == (8000,)
    assert 0.3 < np.sqrt(np.mean(audio**2)) < 0.4  # 0.5 / sqrt(2)


def test_mono_is_the_mean_of_the_channels(tmp_path: Path) -> None:
    left, right = np.full(1600, 0.5, np.float32), np.full(1600, -0.25, np.float32)
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], 1), 16_000, subtype="FLOAT")
    np.testing.assert_array_equal(read_audio(tmp_path / "a.wav"), 0.125)
    np.testing.assert_array_equal(read_audio(tmp_path / "a.wav", channels=[1]), -0.25)


def test_a_part_equals_the_same_part_of_the_whole(
    tmp_path: Path, write_tone: Callable[..., Path]
) -> None:
    path = write_tone(tmp_path / "a.flac", 1.0)
    part = read_audio(path, offset=0.25, duration=0.5)
    np.testing.assert_array_equal(part, read_audio(path)[4000:12_000])


@pytest.mark.parametrize("rate", [8000, 22_050, 48_000])
def test_resampling_keeps_the_tone(
    tmp_path: Path, rate: int, write_tone: Callable[..., Path]
) -> None:
    audio = read_audio(write_tone(tmp_path / "a.wav", 1.0, rate=rate), duration=1.0)
    assert audio.shape == (16_000,)
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(16_000)))
    assert spectrum.argmax() == 440


def test_a_cut_has_exactly_the_samples_that_its_duration_promises(
    tmp_path: Path, write_tone: Callable[..., Path]
) -> None:
    path = write_tone(tmp_path / "a.wav", 0.3217, rate=44_100)
    cut = Recording.from_file(path).to_cut()
    assert load_audio(cut).shape == (samples_in(cut.duration),)


@pytest.mark.parametrize(
    ("name", "content", "problem", "message"),
    [
        ("gone.wav", None, AudioProblem.MISSING, "there is no such file"),
        ("empty.wav", b"", AudioProblem.EMPTY, "the file is empty"),
        ("noise.wav", b"no audio at all", AudioProblem.UNREADABLE, "not a readable audio file"),
    ],
)
def test_bad_files_say_what_is_wrong(
    tmp_path: Path, name: str, content: bytes | None, problem: AudioProblem, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AudioError, match=f"{name}: {message}") as caught:
        read_audio(tmp_path / name)
    assert caught.value.problem == problem


@pytest.mark.parametrize("name", ["a.au", "a.snd"])
def test_what_is_no_audio_is_not_taken_for_telephone_speech(tmp_path: Path, name: str) -> None:
    soundfile.write(tmp_path / name, np.zeros(100), 16_000, format="AU")
    assert read_header(tmp_path / name).num_samples == 100
    (tmp_path / name).write_bytes(bytes(1000))
    with pytest.raises(AudioError, match="not a readable audio file: it has no header"):
        read_header(tmp_path / name)


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros((0, 1), np.float32), 16_000)
    with pytest.raises(AudioError, match="holds no samples"):
        read_header(tmp_path / "a.wav")


def test_a_truncated_file_is_refused(tmp_path: Path, write_tone: Callable[..., Path]) -> None:
    path = write_tone(tmp_path / "a.flac", 2.0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert read_header(path).num_samples == 32_000
    with pytest.raises(AudioError) as caught:
        read_audio(path)
    assert caught.value.problem in (AudioProblem.DURATION, AudioProblem.UNREADABLE)


def test_not_finite_samples_are_refused(tmp_path: Path) -> None:
    samples = np.zeros(1600, np.float32)
    samples[7] = np.nan
    soundfile.write(tmp_path / "a.wav", samples, 16_000, subtype="FLOAT")
    with pytest.raises(AudioError, match="NaN or infinite"):
        read_audio(tmp_path / "a.wav")


def test_a_part_beyond_the_end_is_refused(tmp_path: Path, write_tone: Callable[..., Path]) -> None:
    path = write_tone(tmp_path / "a.wav", 1.0)
    with pytest.raises(AudioError, match=r"0\.900 s are wanted, but only 0\.500 s can be read"):
        read_audio(path, offset=0.5, duration=0.9)
    with pytest.raises(AudioError, match="the file ends at 1 s"):
        read_audio(path, offset=2.0)


def test_a_missing_channel_is_refused(tmp_path: Path, write_tone: Callable[..., Path]) -> None:
    path = write_tone(tmp_path / "a.wav", 0.5)
    with pytest.raises(AudioError, match="channel 3 is wanted, but the file has 1"):
        read_audio(path, channels=[3])


def test_what_only_lhotse_can_read_is_read_by_lhotse(
    tmp_path: Path, write_tone: Callable[..., Path]
) -> None:
    path = write_tone(tmp_path / "a.wav", 0.5)
    recording = Recording("a", [AudioSource("memory", [0], path.read_bytes())], 16_000, 8000, 0.5)
    cut = MonoCut("a", 0.1, 0.25, 0, recording=recording)
    np.testing.assert_allclose(load_audio(cut), read_audio(path)[1600:5600], atol=1e-4)
    broken = MonoCut(
        "b",
        0.0,
        0.5,
        0,
        recording=Recording("b", [AudioSource("memory", [0], b"x")], 16_000, 8000, 0.5),
    )
    with pytest.raises(AudioError, match="b: lhotse cannot read the audio"):
        load_audio(broken)


@pytest.mark.parametrize(("wanted", "column"), [(1, 0), (2, 1), ([2, 1], None)])
def test_channels_of_a_cut_are_names_of_the_channels_of_its_file(
    tmp_path: Path, wanted, column
) -> None:
    path, levels = tmp_path / "a.wav", np.float32([0.25, -0.5])
    soundfile.write(path, np.tile(levels, (8000, 1)), 16_000, subtype="FLOAT")
    recording = Recording("a", [AudioSource("file", [1, 2], str(path))], 16_000, 8000, 0.5)
    kind = MonoCut if isinstance(wanted, int) else MultiCut
    audio = load_audio(kind("a", 0.0, 0.5, wanted, recording=recording))
    np.testing.assert_array_equal(audio, levels.mean() if column is None else levels[column])


def test_a_channel_that_a_recording_lacks_is_refused_without_lhotse(
    tmp_path: Path, write_tone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tone(tmp_path / "a.wav", 0.5)
    source = AudioSource("file", [0], str(path))
    recording = Recording("a", [source], 16_000, 8000, 0.5, channel_ids=[0, 3])
    cut = MultiCut("a", 0.0, 0.5, [0, 3], recording=recording)
    monkeypatch.setattr(MultiCut, "load_audio", lambda _: pytest.fail("lhotse reads"))
    assert AudioSegment.of(cut) is None
    with pytest.raises(AudioError, match=r"a: channel 3 is wanted, but `recording.sources` has 0"):
        load_audio(cut)


def test_a_wav_file_that_was_cut_short(tmp_path) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, np.zeros((16_000, 2)), 16_000)
    content = path.read_bytes()
    path.write_bytes(content[:-16_000])
    with pytest.raises(AudioError, match=r"cut short: 0\.250 s of 1\.000 s are missing"):
        read_header(path)
    path.write_bytes(content[:-400])
    assert read_header(path).num_samples == 15_900
    # Of a length that was not known when the header was written, nothing is missing.
    for size in (2**31 - 1, 2**32 - 1, 2**31 - 37):
        path.write_bytes(content[:40] + size.to_bytes(4, "little") + content[44:])
        assert read_header(path).num_samples == 16_000
    # Other chunks come before and behind.
    chunks = b"JUNK\x05\0\0\0abcde\0"
    path.write_bytes(content[:12] + chunks + content[12:] + chunks)
    assert read_header(path).num_samples == 16_000
    path.write_bytes((content[:12] + chunks + content[12:])[:-16_000])
    with pytest.raises(AudioError, match="cut short"):
        read_header(path)


@pytest.mark.parametrize("kind", ["header", "audio"])
def test_a_header_that_claims_too_much_is_not_believed(tmp_path, kind) -> None:
    path = tmp_path / "x.flac"
    soundfile.write(path, np.zeros(16_000), 16_000)
    content = bytearray(path.read_bytes())
    content[21:26] = ((content[21] & 0xF0) << 32 | 2**35).to_bytes(5, "big")
    path.write_bytes(content)
    read = {"header": read_header, "audio": read_audio}[kind]
    with pytest.raises(AudioError, match=r"claims 34359738368 samples, which \d+ bytes cannot"):
        read(path)
