"""`effasr transcribe --stream`: raw samples on standard input, text while they arrive."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from effasr.inference.recognizer import Recognizer
from effasr.inference.results import Segment, Transcription

RATE = 16_000


def said() -> np.ndarray:
    """Two words of the corpus, with background around them."""
    draw = np.random.default_rng(0)
    seconds = np.arange(RATE) / RATE
    swell = 0.3 * np.sin(np.pi * seconds) ** 2
    words = [swell * np.sin(2 * np.pi * pitch * seconds) for pitch in (300.0, 1500.0)]
    quiet = np.zeros(3 * RATE)
    audio = np.concatenate([quiet, words[0], quiet, words[1], quiet])
    return (audio + 1e-3 * draw.standard_normal(len(audio))).astype(np.float32)


def pcm(audio: np.ndarray) -> bytes:
    return (audio * 32767).astype("<i2").tobytes()


def heard(monkeypatch) -> None:
    """Let every chunk be recognised as two words: the model here has learnt too little."""

    def results(self, requests, on_audio=None):
        for request in requests:
            audio = request.load()
            audio = audio if isinstance(audio, np.ndarray) else np.concatenate(list(audio.blocks))
            seconds = len(audio) / RATE
            yield Transcription(request.id, seconds, "a b", (Segment(0.0, seconds, "a b"),))

    monkeypatch.setattr(Recognizer, "results", results)


@pytest.fixture
def piped(monkeypatch):
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))

    return give


def test_a_line_for_each_stretch_of_speech(effasr, workplace, piped, monkeypatch) -> None:
    heard(monkeypatch)
    command = ("transcribe", "--run", workplace.run, "--stream")
    piped(pcm(said()))
    done = effasr(*command, "--json", "-")
    assert (done.code, done.err) == (0, "")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["text"] for row in rows] == ["a b", "a b"]
    times = np.array([(row["start"], row["end"]) for row in rows])
    assert times == pytest.approx(np.array([(3.0, 4.0), (7.0, 8.0)]), abs=0.4)
    piped(pcm(said()))
    assert effasr(*command).out == "a b\na b\n"
    piped(np.repeat(said()[:, None], 2, axis=1).astype("<f4").tobytes())
    other = effasr(*command, "--encoding", "f32le", "--channels", "2", "--latency", "20")
    assert other.out == "a b\na b\n"


def test_the_model_itself_is_asked(effasr, workplace, piped) -> None:
    piped(pcm(said()))
    done = effasr("transcribe", "--run", workplace.run, "--stream", "--words", "--method", "ctc")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stream", "x.wav"), "`--stream` must have no other input than standard input"),
        (("--stream", "--output", "out"), "`--stream` must write to standard output"),
        (("--stream", "--format", "srt"), "must be text or json with `--stream`, but is srt"),
        (("x.wav", "--latency", "3"), "`--latency` must be left out without `--stream`"),
        (("--stream", "--latency", "0.1"), "`latency_seconds` must be at least 1, but is 0.1"),
        (("--stream", "--sample-rate", "10"), "`sample_rate` must be from 1000"),
        (("x.wav", "--gap", "0.01"), "`gap_seconds` must be at least 0.1, but is 0.01"),
    ],
)
def test_refusals(effasr, workplace, piped, arguments, message) -> None:
    piped(pcm(said()))
    failed = effasr("transcribe", "--run", workplace.run, *arguments)
    assert failed.code == 2
    assert message in failed.error


def test_a_file_in_place_of_raw_samples(effasr, workplace, piped) -> None:
    wav = io.BytesIO()
    soundfile.write(wav, said(), RATE, format="WAV")
    piped(wav.getvalue())
    failed = effasr("transcribe", "--run", workplace.run, "--stream")
    assert failed.code in (1, 2)
    assert "must be raw samples, but begins with the header of a file" in failed.error


def test_what_has_no_times_is_counted(effasr, workplace) -> None:
    command = ("transcribe", "--run", workplace.run, workplace.wav)
    for arguments in (("--words",), ("--words", "--method", "ctc"), ()):
        done = effasr(*command, "--json", *arguments)
        segments = json.loads(done.out)["segments"]
        missing = sum(segment.get("words", ()) is None for segment in segments)
        assert (f"{missing} of 1 segments have no times of words" in done.err) == (missing > 0)


def test_ctm_without_times_says_so(effasr, workplace, monkeypatch) -> None:
    heard(monkeypatch)
    done = effasr("transcribe", "--run", workplace.run, workplace.wav, "--format", "ctm")
    assert len(done.out.splitlines()) == 2
    note = "1 of 1 segments have no times of words, and their words share their time evenly"
    assert note in done.err
