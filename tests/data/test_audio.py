import struct

import numpy as np
import pytest
import soundfile
from lhotse import AudioSource, MonoCut, MultiCut, Recording

from effasr.data.audio.content import check_content
from effasr.data.audio.waveform import (
    AudioError,
    AudioProblem,
    AudioSegment,
    load_audio,
    read_audio,
    read_header,
)
from tests.support.corpora import write_tone


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_reads_every_format_as_mono_float32(tmp_path, suffix) -> None:
    audio = read_audio(write_tone(tmp_path / f"a.{suffix}", 0.5, channels=2))
    assert audio.dtype == np.float32
    assert audio.shape == (8000,)
    assert 0.3 < np.sqrt(np.mean(audio**2)) < 0.4  # 0.5 / sqrt(2)


def test_mono_is_the_mean_of_the_channels(tmp_path) -> None:
    left, right = np.full(16_000, 0.5, np.float32), np.full(16_000, -0.25, np.float32)
    soundfile.write(tmp_path / "a.wav", np.stack([left, right], 1), 16_000, subtype="FLOAT")
    np.testing.assert_array_equal(read_audio(tmp_path / "a.wav"), 0.125)
    np.testing.assert_array_equal(read_audio(tmp_path / "a.wav", channels=[1]), -0.25)
    assert len(read_audio(tmp_path / "a.wav", offset=0.25)) == 12_000


@pytest.mark.parametrize("rate", [8000, 22_050, 48_000])
def test_resampling_keeps_the_tone(tmp_path, rate) -> None:
    audio = read_audio(write_tone(tmp_path / "a.wav", 1.0, rate=rate), duration=1.0)
    assert audio.shape == (16_000,)
    assert np.abs(np.fft.rfft(audio * np.hanning(16_000))).argmax() == 440


NOT_A_NUMBER = np.where(np.arange(1600) == 7, np.nan, 0.0).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "content", "options", "problem", "message"),
    [
        ("gone.wav", None, {}, "missing_audio", "gone.wav: there is no such file"),
        ("empty.wav", b"", {}, "empty_audio", "empty.wav: the file is empty"),
        ("a.wav", np.zeros(0), {}, "empty_audio", "holds no samples"),
        ("noise.wav", b"no audio", {}, "unreadable_audio", "noise.wav: not a readable audio file"),
        ("a.wav", NOT_A_NUMBER, {}, "not_finite_audio", "NaN or infinite"),
        (
            "a.wav",
            np.zeros(16_000),
            {"offset": 0.5, "duration": 0.9},
            "duration_mismatch",
            r"0\.900 s are wanted, but only 0\.500 s can be read",
        ),
        ("a.wav", np.zeros(16_000), {"offset": 2.0}, "duration_mismatch", "file ends at 1 s"),
        ("a.wav", np.zeros(1600), {"channels": [3]}, "unreadable_audio", "3 is wanted, .* has 1"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path, name, content, options, problem, message) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        soundfile.write(tmp_path / name, content, 16_000, subtype="FLOAT")
    with pytest.raises(AudioError, match=message) as caught:
        read_audio(tmp_path / name, **options)
    assert caught.value.problem == AudioProblem(problem)


@pytest.mark.parametrize("name", ["a.au", "a.snd"])
def test_what_is_no_audio_is_not_taken_for_telephone_speech(tmp_path, name) -> None:
    soundfile.write(tmp_path / name, np.zeros(100), 16_000, format="AU")
    assert read_header(tmp_path / name).num_samples == 100
    (tmp_path / name).write_bytes(bytes(1000))
    with pytest.raises(AudioError, match="not a readable audio file"):
        read_header(tmp_path / name)


def test_what_only_lhotse_can_read_is_read_by_lhotse(tmp_path) -> None:
    path = write_tone(tmp_path / "a.wav", 0.5)

    def cut(name: str, content: bytes, start: float, duration: float) -> MonoCut:
        recording = Recording(name, [AudioSource("memory", [0], content)], 16_000, 8000, 0.5)
        return MonoCut(name, start, duration, 0, recording=recording)

    audio = load_audio(cut("a", path.read_bytes(), 0.1, 0.25))
    np.testing.assert_allclose(audio, read_audio(path)[1600:5600], atol=1e-4)
    with pytest.raises(AudioError, match="b: lhotse cannot read the audio"):
        load_audio(cut("b", b"x", 0.0, 0.5))


@pytest.mark.parametrize(("wanted", "column"), [(1, 0), (2, 1), ([2, 1], None)])
def test_channels_of_a_cut_are_names_of_the_channels_of_its_file(tmp_path, wanted, column) -> None:
    path, levels = tmp_path / "a.wav", np.float32([0.25, -0.5])
    soundfile.write(path, np.tile(levels, (8000, 1)), 16_000, subtype="FLOAT")
    recording = Recording("a", [AudioSource("file", [1, 2], str(path))], 16_000, 8000, 0.5)
    kind = MonoCut if isinstance(wanted, int) else MultiCut
    audio = load_audio(kind("a", 0.0, 0.5, wanted, recording=recording))
    np.testing.assert_array_equal(audio, levels.mean() if column is None else levels[column])


def test_a_channel_that_a_recording_lacks_is_refused_without_lhotse(tmp_path, monkeypatch) -> None:
    source = AudioSource("file", [0], str(write_tone(tmp_path / "a.wav", 0.5)))
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
    # Other chunks come before and behind.
    chunks = b"JUNK\x05\0\0\0abcde\0"
    whole = content[:12] + chunks + content[12:]
    # Of a length that was not known when the header was written, nothing is missing.
    unknown = [content[:40] + struct.pack("<I", 2**31 - k) + content[44:] for k in (1, 37)]
    for data in (*unknown, whole + chunks, content[:-400]):
        path.write_bytes(data)
        assert read_header(path).num_samples == (15_900 if len(data) < len(content) else 16_000)
    path.write_bytes(whole[:-16_000])
    with pytest.raises(AudioError, match="cut short"):
        read_header(path)


@pytest.mark.parametrize("read", [read_header, read_audio])
def test_a_header_that_claims_too_much_is_not_believed(tmp_path, read) -> None:
    path = tmp_path / "x.flac"
    soundfile.write(path, np.zeros(16_000), 16_000)
    content = bytearray(path.read_bytes())
    content[21:26] = ((content[21] & 0xF0) << 32 | 2**35).to_bytes(5, "big")
    path.write_bytes(content)
    with pytest.raises(AudioError, match=r"claims 34359738368 samples, which \d+ bytes cannot"):
        read(path)


RATE = 16_000
rng = np.random.default_rng(0)
VOICE = np.sin(np.cumsum(2 * np.pi * (120 + 40 * np.sin(np.arange(RATE) / 2000)) / RATE))
WORD = np.concatenate([np.zeros(9 * RATE), VOICE[: RATE // 3], np.zeros(9 * RATE)])


def clicks(count: int) -> np.ndarray:
    audio = np.zeros(3 * RATE)
    audio[rng.integers(0, len(audio), count)] = 0.9
    return audio


SILENT = {
    "zero": np.zeros(RATE),
    "offset": np.full(RATE, 0.1),
    "drifting offset": np.linspace(0, 0.2, RATE),
    "dither": rng.integers(-1, 2, RATE) / 32768,
    "a click": clicks(1),
    "clicks": clicks(40),
    "offset and dither": 0.05 + rng.integers(-1, 2, RATE) / 32768,
    "5 ms": np.full(RATE // 200, 0.3),
}
SPEECH = {
    "a voice": 0.3 * VOICE,
    "a quiet voice": 0.002 * VOICE,
    "one word in 18 s": 0.2 * WORD,
    "a voice and an offset": 0.05 * VOICE + 0.2,
    "a voice on one channel": np.stack([0.3 * VOICE, 0 * VOICE], 1),
    "two voices": np.stack([0.3 * VOICE, 0.3 * VOICE[::-1]], 1),
    "the same on both": np.stack([0.3 * VOICE] * 2, 1),
    "a weak channel in antiphase": np.stack([0.3 * VOICE, -0.05 * VOICE], 1),
}
ANTIPHASE = {
    "exact": np.stack([0.3 * VOICE, -0.3 * VOICE], 1),
    "with noise": np.stack([0.3 * VOICE, -0.28 * VOICE], 1) + 0.002 * rng.normal(size=(RATE, 1)),
}


def check(tmp_path, audio, suffix: str = "wav") -> AudioProblem | None:
    soundfile.write(tmp_path / f"a.{suffix}", audio, RATE)
    try:
        check_content(Recording.from_file(tmp_path / f"a.{suffix}").to_cut())
    except AudioError as error:
        return error.problem
    return None


@pytest.mark.parametrize("name", SILENT)
def test_what_has_no_speech_is_silent(tmp_path, name) -> None:
    assert check(tmp_path, SILENT[name]) is AudioProblem.SILENT


@pytest.mark.parametrize("name", SPEECH)
def test_speech_is_kept(tmp_path, name) -> None:
    assert check(tmp_path, SPEECH[name]) is None


@pytest.mark.parametrize("suffix", ["wav", "mp3", "ogg"])
@pytest.mark.parametrize("name", ANTIPHASE)
def test_antiphase_is_named(tmp_path, name, suffix) -> None:
    assert check(tmp_path, ANTIPHASE[name], suffix) is AudioProblem.ANTIPHASE
