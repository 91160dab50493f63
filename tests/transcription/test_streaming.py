"""Raw samples are read as they arrive, cut at pauses, and transcribed chunk by chunk."""

import io
from collections.abc import Iterator

import numpy as np
import pytest

from effasr.data.audio.waveform import AudioError
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.transcription.inputs.chunking import Chunk
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.streaming import RawFormat, cut_stream, raw_blocks, transcribe_stream
from effasr.transcription.transcribe import Waveform, transcribe

RATE = 16_000


def speech(*parts: float, level: float = 1e-3) -> np.ndarray:
    """Seconds of speech-like noise, and, negative, of background."""
    draw = np.random.default_rng(0)
    made = []
    for seconds in parts:
        time = np.arange(round(abs(seconds) * RATE)) / RATE
        loud = 0.1 * np.sin(4 * np.pi * time + 0.5) ** 2 if seconds > 0 else 0.0
        made.append((loud + level) * draw.standard_normal(len(time)))
    return np.concatenate(made).astype(np.float32)


def blocks_of(audio: np.ndarray, size: int) -> list[np.ndarray]:
    return [audio[start : start + size] for start in range(0, len(audio), size)]


def seconds(chunks: list[tuple[Chunk, np.ndarray]]) -> np.ndarray:
    return np.array([(chunk.start / RATE, chunk.end / RATE) for chunk, _ in chunks])


@pytest.mark.parametrize("size", [400, 1600, 8000])
@pytest.mark.parametrize("level", [0.0, 1e-3])
def test_chunks_are_what_is_said_between_pauses(size, level) -> None:
    audio = speech(-3, 2, -1, 3, -6, 4, -2, level=level)
    chunks = list(cut_stream(blocks_of(audio, size), RATE))
    for chunk, samples in chunks:
        assert np.array_equal(samples, audio[chunk.start : chunk.end])
    assert seconds(chunks) == pytest.approx(np.array([(3, 5), (6, 9), (15, 19)]), abs=0.45)


def test_a_chunk_comes_as_soon_as_the_pause_is_long_enough() -> None:
    audio = speech(-1, 2, -1, 2, -1)
    read = 0

    def arriving() -> Iterator[np.ndarray]:
        nonlocal read
        for block in blocks_of(audio, 800):
            read += len(block)
            yield block

    chunks = cut_stream(arriving(), RATE)
    next(chunks)
    assert read / RATE == pytest.approx(3.5, abs=0.15)
    next(chunks)
    assert read / RATE == pytest.approx(6.5, abs=0.15)


def test_nobody_waits_longer_than_the_latency() -> None:
    bounds = seconds(list(cut_stream(blocks_of(speech(-0.5, 25), 800), RATE, latency_seconds=4.0)))
    assert (bounds[:, 1] - bounds[:, 0] <= 4.0).all()
    # Nothing is lost between them.
    assert (bounds[1:, 0] - bounds[:-1, 1] <= 0.3).all()
    assert bounds[-1, 1] == pytest.approx(25.5, abs=0.4)


def test_neither_silence_nor_even_noise_nor_a_click_is_speech() -> None:
    for audio in (np.zeros(20 * RATE, np.float32), speech(-20, level=0.05), speech(-0.005)):
        assert list(cut_stream(blocks_of(audio, 3200), RATE)) == []
    clicks = speech(-20)
    clicks[[RATE * 5, RATE * 9]] = 0.9
    assert list(cut_stream(blocks_of(clicks, 3200), RATE)) == []
    assert list(cut_stream([], RATE)) == []


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("encoding", "kind"), [("s16le", "<i2"), ("f32le", "<f4")])
def test_raw_samples(channels, encoding, kind) -> None:
    draw = np.random.default_rng(0).uniform(-1, 1, (1000, channels))
    data = (draw * 32767 if kind == "<i2" else draw).astype(kind)
    form = RawFormat(RATE, channels, encoding)
    # The last frame is cut off in the middle.
    got = np.concatenate(list(raw_blocks(io.BytesIO(data.tobytes()[:-1]), form, RATE)))
    assert got.dtype == np.float32
    assert got == pytest.approx(draw.mean(1)[:-1], abs=1e-4)
    half = np.concatenate(list(raw_blocks(io.BytesIO(data.tobytes()), form, RATE // 2)))
    assert len(half) == pytest.approx(500, abs=2)


@pytest.mark.parametrize(
    ("data", "form", "message"),
    [
        (b"RIFF\0\0\0\0WAVE", RawFormat(), "must be raw samples, but begins with the header"),
        (np.float32([0, np.nan]).tobytes(), RawFormat(encoding="f32le"), "must be finite"),
        (np.float32([0, -1e30]).tobytes(), RawFormat(encoding="f32le"), "must be finite"),
    ],
)
def test_damaged_streams(data, form, message) -> None:
    with pytest.raises(AudioError, match=message):
        list(raw_blocks(io.BytesIO(data), form, RATE))


def test_refusals() -> None:
    for options, message in (
        ({"sample_rate": 0}, "`sample_rate` must be from 1000"),
        ({"channels": 0}, "`channels` must be at least 1, but is 0"),
        ({"encoding": "mp3"}, "`encoding` must be one of s16le, f32le, but is 'mp3'"),
    ):
        with pytest.raises(ValueError, match=message):
            RawFormat(**options)
    with pytest.raises(ValueError, match="`latency_seconds` must be at least 1"):
        list(cut_stream([], RATE, latency_seconds=0.5))


def test_segments_are_those_of_the_chunks_alone(model, tokenizer) -> None:
    blocks = blocks_of(speech(-2, 2, -1, 3, -5), 1600)
    config = DecodingConfig(method="ctc", words=True)
    recognizer = Recognizer(model, tokenizer, config)
    result = list(transcribe_stream(recognizer, blocks, Prompt()))
    expected = [
        Waveform(str(chunk.start), samples, RATE) for chunk, samples in cut_stream(blocks, RATE)
    ]
    texts = [item.text for item in transcribe(model, tokenizer, expected, config=config)]
    assert [segment.text for segment in result] == [text for text in texts if text]
    assert len(result) == 2
    for segment in result:
        assert segment.start < segment.end
        assert segment.words
        assert segment.start <= segment.words[0].start <= segment.words[-1].end <= segment.end
    infinite = io.BytesIO(np.float32([np.inf]).tobytes())
    broken = raw_blocks(infinite, RawFormat(encoding="f32le"), RATE)
    with pytest.raises(ValueError, match="finite"):
        list(transcribe_stream(recognizer, broken, Prompt()))
