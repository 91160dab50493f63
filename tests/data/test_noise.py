import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effasr.data.audio.augmentation.effects import (
    ImpulseResponse,
    add_noise,
    convolve,
    looped,
    mean_power,
    reverberate,
    simulated_room,
    telephone,
)
from effasr.data.audio.waveform import AudioError

RATE = 16_000


def white(samples: int, seed: int = 0, loudness: float = 0.1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (loudness * rng.standard_normal(samples)).astype(np.float32)


def tone(hertz: float, samples: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(samples) / RATE)).astype(np.float32)


def decibels(ratio: float) -> float:
    return 10 * math.log10(ratio)


@pytest.mark.parametrize("snr", [-10.0, 0.0, 7.5, 20.0])
def test_noise_has_the_ratio_asked_for(snr: float) -> None:
    speech = white(8000, 1, 0.2) * np.hanning(8000).astype(np.float32)
    noisy = add_noise(speech, white(8000, 2, 3.0), snr)
    assert noisy.dtype == np.float32
    assert decibels(mean_power(speech) / mean_power(noisy - speech)) == pytest.approx(snr, abs=0.1)


def test_silence_has_no_ratio() -> None:
    speech, silence = white(100), np.zeros(100, np.float32)
    assert (add_noise(speech, silence, 5.0) == speech).all()
    assert (add_noise(silence, speech, 5.0) == silence).all()
    assert len(add_noise(silence[:0], silence[:0], 5.0)) == 0
    assert mean_power(silence[:0]) == 0


@given(st.integers(1, 2000), st.integers(0, 5000), st.data())
@settings(deadline=None)
def test_a_short_clip_is_repeated(length: int, wanted: int, data: st.DataObject) -> None:
    clip, start = white(length), data.draw(st.integers(0, length - 1))
    result = looped(clip, wanted, start)
    assert (len(result), result.dtype) == (wanted, np.float32)
    if start + wanted <= length:
        assert (result == clip[start : start + wanted]).all()


def test_where_a_clip_begins_anew_nothing_clicks_and_nothing_fades() -> None:
    ramp = np.linspace(-1, 1, 4000, dtype=np.float32)
    # Repeated without a fade, it would jump by 2.
    assert np.abs(np.diff(looped(ramp, 20_000, 1234))).max() < 0.02
    noise = looped(white(4000), 200_000, 0)
    parts = noise[: 3680 * 54].reshape(54, 3680)
    assert mean_power(parts[1:, :320].ravel()) == pytest.approx(0.01, rel=0.25)


@given(st.integers(1, 5000), st.integers(1, 1500))
@settings(max_examples=30, deadline=None)
def test_the_convolution_is_that_of_its_definition(signal: int, kernel: int) -> None:
    item, other = white(signal, 1), white(kernel, 2)
    result = convolve(item, other)
    assert result.dtype == np.float32
    expected = np.convolve(item.astype(np.float64), other.astype(np.float64))
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_room_keeps_length_loudness_and_time(seed: int) -> None:
    speech = white(RATE, seed) * np.hanning(RATE).astype(np.float32)
    response, same, other = (
        simulated_room(np.random.default_rng(each)) for each in (seed, seed, seed + 1)
    )
    assert np.array_equal(response.values, same.values)
    assert not np.array_equal(response.values[:50], other.values[:50])
    assert (response.values.dtype, response.delay) == (np.float32, 0)
    # As far away as a hall is long: all arrives half a second later.
    late = ImpulseResponse(np.append(np.zeros(8000, np.float32), response.values), 8000)
    for room in (response, late, ImpulseResponse.of(_normalised(late.values))):
        received = reverberate(speech, room)
        assert (len(received), received.dtype) == (len(speech), np.float32)
        assert decibels(mean_power(received) / mean_power(speech)) == pytest.approx(0, abs=0.01)
        spectra = np.fft.rfft(received, 2 * RATE) * np.conj(np.fft.rfft(speech, 2 * RATE))
        assert np.abs(np.fft.irfft(spectra)).argmax() == 0


def _normalised(values: np.ndarray) -> np.ndarray:
    """A recording in which the direct sound is the loudest, upside down."""
    result = values.copy()
    result[8000] *= -5
    return result


def test_silence_stays_silent_in_a_room() -> None:
    silence = np.zeros(1000, np.float32)
    room = simulated_room(np.random.default_rng(0))
    assert (reverberate(silence, room) == silence).all()
    with pytest.raises(AudioError, match="the impulse response is silent"):
        ImpulseResponse.of(silence)


def test_the_end_of_a_response_is_cut_off_where_nobody_hears_it() -> None:
    recorded = np.zeros(9000, np.float32)
    recorded[[10, 500, 5000]] = 1.0, 0.1, 1e-5
    response = ImpulseResponse.of(recorded)
    assert (len(response.values), response.delay) == (501, 10)


def test_simulated_rooms_decay_as_they_are_asked_to() -> None:
    """The level falls from -5 to -25 dB in a third of the T60, by Schroeder's integral."""
    for t60 in (0.2, 0.5, 1.0):
        slopes = []
        for seed in range(40):
            response = simulated_room(np.random.default_rng(seed), (t60, t60)).values[1:]
            remaining = np.cumsum(np.square(response, dtype=np.float64)[::-1])[::-1]
            remaining /= remaining[0]
            slopes.append(
                3 * (np.argmax(remaining < 10**-2.5) - np.argmax(remaining < 10**-0.5)) / RATE
            )
        assert np.median(slopes) == pytest.approx(t60, rel=0.05)


def test_a_telephone_has_no_high_tones_and_coarse_steps() -> None:
    low, high = tone(1000), tone(6000)
    assert mean_power(telephone(high)) < 1e-4 * mean_power(high)
    for samples in (1, 2, 3, 101, 1600, 1601, len(low)):
        received = telephone(low[:samples])
        assert (len(received), received.dtype) == (samples, np.float32)
    # 8 bits of mu-law leave about 38 dB; and nothing is shifted in time.
    ratio = mean_power(low[500:-500]) / mean_power((received - low)[500:-500])
    assert 30 < decibels(ratio) < 45
    assert np.abs(telephone(8 * low)).max() < 1.5
