"""Recordings of which only a part is transcribed: interrupted ones, and damaged ones."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from effasr.checkpoint import save_model
from effasr.data.audio.waveform import AudioError
from effasr.decoding.config import DecodingConfig
from effasr.transcription.decode_queue import ContinuousBatches
from effasr.transcription.inputs.arrival import Interruption
from effasr.transcription.inputs.audio_stream import AudioStream, open_stream
from effasr.transcription.inputs.sources import Source
from effasr.transcription.outputs.writers import ResultWriter
from effasr.transcription.results import INTERRUPTED, Segment, Transcription
from effasr.transcription.transcribe import Waveform, transcribe
from tests.support.real_ffmpeg import real_ffmpeg

RATE = 16_000
SHORT = DecodingConfig(chunk_seconds=2.0, search_seconds=0.5, frame_budget=60)


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_an_interruption_keeps_what_is_decoded(model, tokenizer, noise, method) -> None:
    config = replace(SHORT, method=method)
    sources = [Waveform(str(n), noise(seconds, n), RATE) for n, seconds in enumerate((2, 60, 3))]
    first, whole, _ = transcribe(model, tokenizer, sources, config=config)
    seconds = 0.0

    def interrupt(decoded: float) -> None:
        nonlocal seconds
        seconds += decoded
        if seconds >= 20 and not interruption.requested:
            os.kill(os.getpid(), signal.SIGINT)

    with Interruption() as interruption:
        results = list(
            transcribe(
                model,
                tokenizer,
                sources,
                config=config,
                on_audio=interrupt,
                interruption=interruption,
            )
        )
    assert results[0] == first
    (part,) = results[1:]
    assert part.partial == INTERRUPTED
    assert 5 <= part.duration < 50
    assert part.segments == whole.segments[: len(part.segments)]
    assert part.duration == part.segments[-1].end


MARKED = {
    "text": "a\tx y [partial: cut --> short]\n",
    "json": '"partial":"cut --> short"',
    "srt": "2\n00:00:02,000 --> 00:00:04,000\n[partial: cut -> short]\n",
    "vtt": "WEBVTT\n\nNOTE partial: cut -> short\n\n00:",
    "ctm": ";; a partial: cut --> short\na 1 ",
}


@pytest.mark.parametrize("style", MARKED)
def test_every_format_marks_a_part(style, tmp_path, capsys) -> None:
    segments = (Segment(0.0, 2.0, "x y"),)
    result = Transcription("a", 2.0, "x y", segments, partial="cut --> short")
    sources = [Source("a", "a", "a")]
    ResultWriter(style, None, sources).write(result)
    assert MARKED[style].replace('":"', '": "') in capsys.readouterr().out.replace('":"', '": "')
    writer = ResultWriter(style, tmp_path, sources)
    writer.write(Transcription("a", 2.0, "x y", segments, partial=INTERRUPTED))
    assert writer.missing(sources) == sources, "--continue transcribes it again"
    (file,) = tmp_path.iterdir()
    assert ".partial." in file.name
    assert "interrupted" in file.read_text()
    assert Path(file).suffix == {"text": ".txt"}.get(style, f".{style}")


def _speechlike(path: Path, seconds: float, form: str) -> np.ndarray:
    draw = np.random.default_rng(1)
    count = int(seconds * RATE)
    samples = 0.1 * draw.standard_normal(count) * np.repeat(draw.random(count // 800), 800)
    with soundfile.SoundFile(path, "w", RATE, 1, format=form) as file:
        for begin in range(0, count, RATE):
            file.write(samples[begin : begin + RATE])
    return samples


@pytest.mark.parametrize("form", ["WAV", "FLAC", "MP3", "OGG"])
def test_a_file_that_was_cut_short_is_partial(form, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / f"x.{form.lower()}"
    samples = _speechlike(path, 30.0, form)
    path.write_bytes(path.read_bytes()[: int(0.6 * path.stat().st_size)])
    stream = open_stream(path, RATE)
    received = np.concatenate(list(stream.blocks))
    assert stream.partial is not None
    assert not stream.partial.startswith(str(tmp_path))
    assert 16.5 * RATE < len(received) < 20 * RATE
    length = 16 * RATE
    lags = [np.vdot(received[RATE + lag : length + lag], samples[RATE:length]) for lag in (0, 576)]
    norm = np.linalg.norm(samples[RATE:length]) ** 2
    assert max(lags) > 0.8 * norm


def test_bad_bytes_in_the_middle(tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.flac"
    samples = _speechlike(path, 60.0, "FLAC")
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = np.random.default_rng(0).bytes(200)
    path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        stream = open_stream(path, RATE)
        received = np.concatenate(list(stream.blocks))
        assert stream.partial == "the audio is damaged: Error : flac decoder lost sync."
        assert 19 * RATE < len(received) < 31 * RATE
        assert np.abs(received - samples[: len(received)]).max() < 1e-3
    program = real_ffmpeg()
    if program is None:
        pytest.skip("neither ffmpeg nor imageio-ffmpeg is installed")
    (tmp_path / "ffmpeg").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    stream = open_stream(path, RATE)
    received = np.concatenate(list(stream.blocks))
    assert "ffmpeg reads" in (stream.partial or "")
    assert len(received) == pytest.approx(len(samples), abs=0.1 * RATE)
    at = 45 * RATE
    assert np.abs(received[at : at + RATE] - samples[at : at + RATE]).max() < 1e-3


@pytest.mark.slow
@pytest.mark.extended
def test_two_hours_grow_the_process_by_little(model, tokenizer, noise, tmp_path) -> None:
    """The whole at 16 kHz would be 460 MB, and 115 MB as it is in the file."""
    save_model(tmp_path / "model", model, tokenizer)
    block = (noise(60.0)[::2] * 2**15).astype(np.int16)
    soundfile.write(tmp_path / "warm-up.wav", block, 8_000)
    with soundfile.SoundFile(tmp_path / "long.wav", "w", 8_000, 1, "PCM_16") as file:
        for minute in range(120):
            file.write(np.roll(block, 997 * minute))
    script = Path(__file__).with_name("long_recording.py")
    arguments = ("model", "warm-up.wav", "long.wav")
    paths = [str(tmp_path / name) for name in arguments]
    subprocess.run(
        [sys.executable, str(script), *paths], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    row = json.loads((tmp_path / "model" / "grown.json").read_text())
    assert row["duration"] == row["end"] == 7200
    assert row["segments"] >= 240
    assert row["words"] > 1000
    assert row["grown"] < 150e6


def test_a_long_file_has_the_transcript_of_its_samples(model, tokenizer, noise, tmp_path) -> None:
    sounds = [noise(seconds, seed) for seed, seconds in enumerate((23.0, 1.0, 9.0))]
    paths = [tmp_path / f"{number}.wav" for number in range(3)]
    for path, sound in zip(paths, sounds, strict=True):
        soundfile.write(path, sound, RATE, subtype="FLOAT")
    waveforms = [Waveform(str(p), s, RATE) for p, s in zip(paths, sounds, strict=True)]
    at_once = list(transcribe(model, tokenizer, waveforms, config=SHORT))
    received = []
    streamed = list(transcribe(model, tokenizer, paths, config=SHORT, on_audio=received.append))
    assert streamed == at_once
    assert len(streamed[0].segments) >= 12
    spoken = sum(s.end - s.start for result in streamed for s in result.segments)
    assert sum(received) == pytest.approx(spoken)
    assert 25 < spoken <= 33.0
    assert len(received) > 5


def test_no_more_is_read_than_is_decoded_soon(model, tokenizer, noise, monkeypatch) -> None:
    block, read, behind = noise(2.0), [], []

    def blocks():
        for number in range(100):
            read.append(number)
            yield block

    stream = AudioStream(blocks(), 100 * len(block))
    monkeypatch.setattr("effasr.transcription.transcribe.open_stream", lambda *_, **__: stream)
    decoded: list[int] = []

    def watched(method):
        def watch(*arguments):
            matches = list(method(*arguments))
            behind.append(len(read) - sum(decoded))
            decoded.append(len(matches))
            return iter(matches)

        return watch

    for name in ("feed", "finish"):
        monkeypatch.setattr(ContinuousBatches, name, watched(getattr(ContinuousBatches, name)))
    (result,) = transcribe(model, tokenizer, ["long.wav"], config=SHORT)
    assert isinstance(result, Transcription)
    assert sum(decoded) == len(result.segments) >= 100
    assert max(behind) < 36


def test_files_are_closed_when_nobody_wants_the_rest(model, tokenizer, noise, tmp_path) -> None:
    for number in range(4):
        soundfile.write(tmp_path / f"{number}.wav", noise(20.0), RATE)
    paths = sorted(tmp_path.glob("*.wav"))

    def opened() -> int:
        links = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
        return sum(link.startswith(str(tmp_path)) for link in links)

    results = iter(transcribe(model, tokenizer, paths, config=SHORT))
    next(results)
    results.close()
    del results
    due = time.monotonic() + 20
    while opened() and time.monotonic() < due:  # Threads finish what they have begun.
        gc.collect()  # A recording and the generator of its pieces know each other.
        time.sleep(0.01)
    assert opened() == 0
    with pytest.raises(AudioError, match="a part from 99 s is wanted"):
        open_stream(paths[0], RATE, offset=99.0)
    assert opened() == 0
