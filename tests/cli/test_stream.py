"""`effasr transcribe --stream`: raw samples on standard input, text while they arrive."""

import io
import json
import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from effasr.checkpoint import load_model, resolve
from effasr.transcription.inputs import arrival
from effasr.transcription.online import OnlineRecognizer
from effasr.transcription.online import recognizer as online_module
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.results import Segment, Transcription
from effasr_kernels import Context

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


@pytest.fixture
def two_words(monkeypatch):
    """Let every chunk be recognised as two words: the model here has learnt too little."""

    def results(self, requests, on_audio=None):
        for request in requests:
            audio = request.load()
            audio = audio if isinstance(audio, np.ndarray) else np.concatenate(list(audio.blocks))
            seconds = len(audio) / RATE
            yield Transcription(request.id, seconds, "a b", (Segment(0.0, seconds, "a b"),))

    monkeypatch.setattr(Recognizer, "results", results)


def test_a_line_for_each_stretch_of_speech(effasr, workplace, piped, two_words):
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


class Flushed(io.StringIO):
    """A standard output that knows what a reader of it has by now."""

    seen = ""

    def flush(self):
        self.seen = self.getvalue()


class Listening:
    """A recorder that goes on only when what was said before can be read."""

    def __init__(self, output):
        self._output = output
        data, middle = pcm(said()), 2 * 6 * RATE
        self._parts = [data[: 2 * RATE], data[2 * RATE : middle], data[middle:]]
        # What could be read before the first word was said, and after each.
        self.seen = []

    def read1(self, size):
        if not self._parts:
            return b""
        deadline = time.monotonic() + 20
        while self._output.seen.count("a b") < len(self.seen) - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        self.seen.append(self._output.seen)
        return self._parts.pop(0)


@pytest.mark.parametrize(
    ("style", "before", "cue"),
    [
        ("text", "", "a b\n"),
        ("srt", "", "{number}\n{time},{ms} --> {time},{ms}\na b\n\n"),
        ("vtt", "WEBVTT\n\n", "{time}.{ms} --> {time}.{ms}\na b\n\n"),
    ],
)
def test_who_reads_along_has_each_cue_before_the_next_is_said(
    effasr, workplace, two_words, monkeypatch, style, before, cue
):
    output = Flushed()
    recorder = Listening(output)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=recorder))
    done = effasr("transcribe", "--run", workplace.run, "--stream", "--format", style)
    assert (done.code, done.err) == (0, "")
    visible = [
        cue.format(number=number, time=rf"00:00:0{second}", ms=r"\d{3}").replace(
            f"--> 00:00:0{second}", r"--> 00:00:0\d"
        )
        for number, second in ((1, 2), (2, 6))
    ]
    texts = [*recorder.seen, output.seen]
    assert texts[0] == texts[1] == before
    assert re.fullmatch(re.escape(before) + visible[0], texts[2]), texts[2]
    assert re.fullmatch(re.escape(before) + "".join(visible), texts[3]), texts[3]


def test_ctm_of_a_stream(effasr, workplace, piped, two_words):
    piped(pcm(said()))
    done = effasr("transcribe", "--run", workplace.run, "--stream", "--format", "ctm")
    rows = [line.split() for line in done.out.splitlines()]
    assert [(row[:2], row[4]) for row in rows] == [(["stream", "1"], word) for word in "abab"]
    starts = [float(row[2]) for row in rows]
    assert starts == sorted(starts)
    note = "2 of 2 segments have no word timestamps; their words divide the time evenly"
    assert note in done.err


@pytest.mark.parametrize("style", ["text", "json", "srt", "vtt", "ctm"])
def test_where_nobody_speaks_there_is_an_empty_file(effasr, workplace, piped, style):
    piped(bytes(2 * RATE))
    done = effasr("transcribe", "--run", workplace.run, "--stream", "--format", style)
    assert (done.code, done.out) == (0, "WEBVTT\n\n" if style == "vtt" else "")


def test_what_has_no_times_is_counted(effasr, workplace):
    command = ("transcribe", "--run", workplace.run, workplace.wav)
    for arguments in (("--words",), ("--words", "--method", "ctc"), ()):
        done = effasr(*command, "--json", *arguments)
        segments = json.loads(done.out)["segments"]
        missing = sum(segment.get("words", ()) is None for segment in segments)
        assert (f"{missing} of 1 segments have no word timestamps" in done.err) == (missing > 0)


class Stalled:
    """A recorder that sends a word without a pause behind it, and then nothing until it is let."""

    def __init__(self, action):
        self._parts = [pcm(said()[: 4 * RATE])]
        self._action = action

    def read1(self, size):
        return self._parts.pop(0) if self._parts else self._action() or b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_stream_with_the_last_sentence(
    effasr, workplace, two_words, monkeypatch, number
):
    ended = threading.Event()

    def action():
        os.kill(os.getpid(), number)
        ended.wait(60)

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Stalled(action)))
    monkeypatch.setattr(arrival, "_STALL_S", 60.0)
    before = signal.getsignal(number)
    try:
        done = effasr("transcribe", "--run", workplace.run, "--stream")
    finally:
        ended.set()
    assert (done.code, done.out) == (130, "a b\n")
    assert signal.getsignal(number) == before


CONTEXTS = "[{left: 8, chunk: 4}, {left: 8, chunk: 2}, {left: 4, chunk: 1}]"


@pytest.fixture(scope="module")
def run(workplace, tmp_path_factory):
    """A run of three steps, each with one of three contexts."""
    from effasr.cli.main import main

    folder = tmp_path_factory.mktemp("online")
    overrides = (
        f"model.encoder.context={CONTEXTS}",
        "model.encoder.causal_convolution=true",
        "model.features.normalize=false",
        "training.max_steps=3",
        "training.validate_every=3",
        f"output={folder}",
    )
    assert main(["train", workplace.recipe, *overrides]) == 0
    return folder / "first"


@pytest.fixture
def sharp(monkeypatch):
    """Let the model, which has learnt too little, hear a token wherever two frames differ."""
    load = load_model

    def loaded(*given):
        result = load(*given)
        result.model.ctc_head.bias.data.zero_()
        result.model.ctc_head.weight.data.mul_(30)
        return result

    monkeypatch.setattr("effasr.checkpoint.load_model", loaded)
    return loaded


@pytest.fixture
def noise_piped(piped):
    audio = (0.1 * np.random.default_rng(0).standard_normal(3 * RATE)).astype(np.float32)
    piped(audio.astype("<f4").tobytes())
    return audio


@pytest.mark.parametrize(
    ("latency", "context"),
    [
        ((), Context(8, 0, 4)),
        (("--latency", "160ms"), Context(8, 0, 2)),
        (("--latency", "0.1s", "--words"), Context(4, 0, 1)),
    ],
)
def test_the_latency_is_kept(effasr, run, noise_piped, sharp, monkeypatch, latency, context):
    used = []

    class Recorded(OnlineRecognizer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            used.append(self)

    monkeypatch.setattr(online_module, "OnlineRecognizer", Recorded)
    done = effasr("transcribe", "--run", run, "--stream", "--encoding", "f32le", "--json", *latency)
    assert (done.code, done.err) == (0, "")
    (recognizer,) = used
    assert recognizer.context == context
    stream = recognizer.open()
    stream.feed(noise_piped)
    stream.finish()
    recognizer.decode()
    expected = [segment.as_row() for segment in stream.take()]
    assert [json.loads(line) for line in done.out.splitlines()] == expected
    assert expected
    assert all(("words" in row) == ("--words" in latency) for row in expected)


@pytest.mark.slow
@pytest.mark.extended
def test_the_export_is_of_the_context_of_a_latency(effasr, run, tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    done = effasr("export", run, tmp_path / "out", "--format", "onnx", "--latency", "160ms")
    assert (done.code, done.err) == (0, "")
    assert "encoder_step.onnx, the same as the model in onnxruntime" in done.out
    says = json.loads((tmp_path / "out/onnx.json").read_text())
    assert says["encoder_step"]["context"] == {"left": 8, "right": 0, "chunk": 2}
    assert "encoder" not in says
    failed = effasr("export", run, tmp_path / "other", "--latency", "160ms")
    assert "`--latency` must be left out for `--format huggingface`" in failed.err


def test_evaluation_takes_the_first_context(run):
    assert load_model(resolve(run)).model.encoder.context == Context(8, 0, 4)
