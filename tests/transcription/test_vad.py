"""Gaps in which nobody speaks are found, and nothing is decoded of them."""

import numpy as np
import pytest

from effasr.decoding.config import DecodingConfig
from effasr.transcription.inputs.chunking import Chunk, cut_at_pauses
from effasr.transcription.inputs.vad import HOP_SECONDS, is_speech, loudness, without_gaps
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import Waveform, transcribe

RATE = 16_000


def voice(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise whose loudness goes up and down four times a second, as that of syllables does."""
    time = np.arange(int(seconds * RATE)) / RATE
    draw = np.random.default_rng(seed).standard_normal(len(time))
    return (0.1 * draw * np.sin(4 * np.pi * time) ** 2).astype(np.float32)


def background(seconds: float, db: float, seed: int = 1) -> np.ndarray:
    draw = np.random.default_rng(seed).standard_normal(int(seconds * RATE))
    return (10 ** (db / 20) * draw).astype(np.float32)


def kept(audio: np.ndarray, gap: float = 2.0, chunk: float = 30.0) -> list[tuple[float, float]]:
    """Seconds of what is left of a recording."""
    chunks = cut_at_pauses([audio], RATE, total=len(audio), chunk_seconds=chunk)
    result = []
    for position, samples in without_gaps(chunks, RATE, gap):
        assert np.array_equal(samples, audio[position.start : position.end])
        result.append((position.start / RATE, position.end / RATE))
    return result


def test_loudness_is_in_decibels_of_full_scale() -> None:
    steady = loudness(np.full(1605, 0.1, np.float32), RATE)
    assert len(steady) == 11
    assert steady == pytest.approx(np.full(11, -20.0))
    assert (loudness(np.zeros(800, np.float32), RATE) <= -99).all()
    assert not len(loudness(np.zeros(0, np.float32), RATE))


@pytest.mark.parametrize("db", [-200.0, -60.0, -45.0])
def test_gaps_of_silence_and_of_noise(db) -> None:
    audio = np.concatenate([
        background(40, db), voice(5), background(1.5, db, 2), voice(4, 1),
        background(50, db, 3), voice(3, 2), background(7, db, 4),
    ])  # fmt: skip
    audio += background(len(audio) / RATE, db, 5)
    spoken = [(40.0, 50.5), (100.5, 103.5)]
    result = kept(audio)
    if db > -200:
        # Noise at the beginning is not known to be background before somebody speaks.
        result = [(start, end) for start, end in result if end > 39]
    # A gap of which a chunk has less than two seconds is not seen as one in this chunk.
    assert min(start for start, _ in result) == pytest.approx(40.0, abs=0.4)
    for start, end in result:
        assert any(a - 2.0 <= start and end <= b + 2.0 for a, b in spoken), result
    for time in (40.5, 44.0, 46.6, 50.0, 101.0, 103.0):
        assert any(start <= time <= end for start, end in result), time


def test_short_pauses_are_no_gaps() -> None:
    audio = np.concatenate([voice(5), background(1.5, -60), voice(5, 1)])
    assert kept(audio) == [(0.0, 11.5)]
    (_, end), (start, _) = kept(audio, gap=1.0)
    # A quarter of a second around speech stays.
    assert (end, start) == pytest.approx((5.25, 6.25), abs=0.1)


def test_what_is_of_even_loudness_is_decoded() -> None:
    """Nothing tells that it is background, unless it is silent or far below the speech before."""
    even = background(10, -20)
    assert kept(even) == [(0.0, 10.0)]
    assert kept(np.zeros(10 * RATE, np.float32)) == []
    after = np.concatenate([voice(30), background(60, -50)])
    assert kept(after)[-1][1] == pytest.approx(30.0, abs=0.5)
    # The loudest speech is not forgotten at once.
    softer = np.concatenate([voice(10), 0.2 * voice(10, 1), background(10, -45)])
    assert kept(softer, chunk=10.0)[-1][1] == pytest.approx(20.0, abs=0.5)
    # Somebody farther away is not lost.
    farther = np.concatenate([voice(30), 0.1 * voice(30, 1)])
    assert kept(farther)[-1][1] == 60.0


def test_speech_is_found_by_its_own_dynamics() -> None:
    levels = np.concatenate([np.full(300, -60.0), np.full(100, -30.0)])
    assert is_speech(levels).tolist() == [False] * 300 + [True] * 100
    assert is_speech(np.full(50, -40.0)).all()
    assert not is_speech(np.full(50, -40.0), loudest=-20.0).any()
    assert not is_speech(np.full(50, -90.0)).any()


@pytest.mark.parametrize("seed", range(10))
def test_no_stretch_overlaps_and_no_speech_is_lost(seed) -> None:
    draw = np.random.default_rng(seed)
    hops = int(draw.integers(1, 900))
    hop = round(HOP_SECONDS * RATE)
    loud = np.repeat(draw.random(hops // 50 + 1) < 0.3, 50)[:hops]
    audio = np.repeat(np.where(loud, 0.1, 1e-5), hop).astype(np.float32)
    speech = is_speech(loudness(audio, RATE))
    covered = np.zeros(len(audio), dtype=bool)
    for position, samples in without_gaps([(Chunk(0, len(audio)), audio)], RATE, 1.0):
        assert not covered[position.start : position.end].any()
        assert len(samples) == position.end - position.start > 0
        covered[position.start : position.end] = True
    assert covered.reshape(-1, hop).all(1)[speech].all()


def test_silence_gives_no_segment_and_no_text(model, tokenizer, noise) -> None:
    """This model says something about everything that it hears."""
    quiet = np.zeros(20 * RATE, np.float32)
    audio = np.concatenate([quiet, noise(2.0), quiet, noise(2.0, 1), quiet])
    sources = [Waveform("gaps", audio, RATE), Waveform("silent", quiet, RATE)]
    gaps, silent = transcribe(model, tokenizer, sources)
    assert isinstance(gaps, Transcription)
    assert isinstance(silent, Transcription)
    assert (silent.text, silent.segments, silent.duration) == ("", (), 20.0)
    assert gaps.duration == 64.0
    times = [(segment.start, segment.end) for segment in gaps.segments]
    assert len(times) == 2
    assert np.array(times) == pytest.approx(np.array([(20, 22), (42, 44)]), abs=0.3)
    everything = DecodingConfig(gap_seconds=None)
    _, received = transcribe(model, tokenizer, sources, config=everything)
    assert isinstance(received, Transcription)
    assert received.segments[0].end == 20.0
    assert received.text
