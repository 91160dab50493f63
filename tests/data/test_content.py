"""Recordings without speech, which `effasr prepare` leaves out."""

import numpy as np
import pytest
import soundfile
from lhotse import Recording

from effasr.data.audio.audio_file import AudioError, AudioProblem
from effasr.data.audio.content import check_content

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
