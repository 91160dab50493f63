import numpy as np
import pytest

from effasr.transcription.inputs.chunking import cut_at_pauses

RATE = 16_000


def split_at_pauses(audio, sample_rate, **limits):
    pairs = cut_at_pauses([audio], sample_rate, total=len(audio), **limits)
    return [chunk for chunk, _ in pairs]


def _noise(seconds: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * RATE))
    return (0.1 * samples).astype(np.float32)


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
    audio = _noise(55.0)
    pauses = [(8.7, 9.1), (17.0, 17.4), (26.3, 26.9), (36.0, 36.4), (45.8, 46.2)]
    for begin, end in pauses:
        audio[int(begin * RATE) : int(end * RATE)] *= 0.01
    chunks = split_at_pauses(audio, RATE, chunk_seconds=10.0, search_seconds=3.0)
    cuts = [chunk.end / RATE for chunk in chunks[:-1]]
    assert len(cuts) == len(pauses)
    for cut, (begin, end) in zip(cuts, pauses, strict=True):
        assert begin <= cut <= end


def test_a_loud_click_does_not_hide_the_quieter_of_two_pauses() -> None:
    audio = _noise(15.0)
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
    chunks = split_at_pauses(_noise(30.1), RATE, chunk_seconds=30.0, search_seconds=3.0)
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
        split_at_pauses(_noise(1.0), RATE, **arguments)
