"""Hours of audio, of which only minutes are in memory."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from effasr.checkpoint import save_model
from effasr.data.audio.waveform import AudioError
from effasr.decoding.config import DecodingConfig
from effasr.transcription.decode_queue import ContinuousBatches
from effasr.transcription.inputs.audio_stream import AudioStream, open_stream
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import Waveform, transcribe

RATE = 16_000
SHORT = DecodingConfig(chunk_seconds=2.0, search_seconds=0.5, frame_budget=60)


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
    first = streamed[0]
    assert isinstance(first, Transcription)
    assert len(first.segments) >= 12
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


def test_what_is_damaged_at_its_end_is_partial(model, tokenizer, noise, tmp_path) -> None:
    good, bad = tmp_path / "good.flac", tmp_path / "bad.flac"
    soundfile.write(good, noise(40.0), RATE)
    bad.write_bytes(good.read_bytes()[:-60_000])
    results = list(transcribe(model, tokenizer, [good, bad, good], config=SHORT))
    whole, part, again = results
    assert whole == again
    assert isinstance(whole, Transcription)
    assert isinstance(part, Transcription)
    assert "damaged" in (part.partial or "")
    assert part.text
    assert part.duration < whole.duration - 1


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
