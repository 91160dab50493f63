import numpy as np
import pytest

from effasr.data.demo.acoustics import REFERENCE_LEVEL_DB, SAMPLE_RATE, coloured_noise, record

QUIET = {"gain_db": 0.0, "snr_db": 100.0, "noise_slope": 0.0, "lead_s": 0.0, "tail_s": 0.0}


def tone(seconds: float = 1.0, rate: int = 22_050) -> np.ndarray:
    return (0.1 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype("f4")


def decibels(audio: np.ndarray) -> float:
    return 10 * np.log10(np.mean((audio / 32767.0) ** 2))


@pytest.mark.parametrize("gain", [-12.0, 0.0, 3.0])
def test_level_does_not_depend_on_the_synthesiser(gain: float) -> None:
    loud = record(5 * tone(), 22_050, **{**QUIET, "gain_db": gain}, seed=0)
    soft = record(tone(), 22_050, **{**QUIET, "gain_db": gain}, seed=0)
    np.testing.assert_allclose(loud, soft, atol=1)
    assert decibels(loud) == pytest.approx(REFERENCE_LEVEL_DB + gain, abs=0.05)


def test_resampling_keeps_the_pitch() -> None:
    audio = record(tone(), 22_050, **QUIET, seed=0)
    assert audio.dtype == np.int16
    assert len(audio) == SAMPLE_RATE
    spectrum = np.abs(np.fft.rfft(audio.astype(float)))
    assert np.argmax(spectrum) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("snr", [12.0, 40.0])
@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_signal_to_noise_ratio(snr: float, slope: float) -> None:
    setting = {**QUIET, "noise_slope": slope}
    noisy = record(tone(), 22_050, **{**setting, "snr_db": snr}, seed=5).astype(float)
    clean = record(tone(), 22_050, **setting, seed=5).astype(float)
    assert decibels(clean) - decibels(noisy - clean) == pytest.approx(snr, abs=0.2)


def test_margins_hold_noise_alone() -> None:
    audio = record(tone(), 22_050, **{**QUIET, "lead_s": 0.1, "tail_s": 0.05}, seed=0)
    assert len(audio) == SAMPLE_RATE + 1600 + 800
    assert np.abs(audio[:1500]).max() <= 1
    assert np.abs(audio[-700:]).max() <= 1


def test_peaks_are_scaled_not_clipped() -> None:
    click = np.zeros(22_050, np.float32)
    click[1000:1200:20] = 0.5
    audio = record(click, 22_050, **{**QUIET, "gain_db": 3.0}, seed=0)
    top = np.abs(audio).max()
    assert top == pytest.approx(0.95 * 32767, abs=1)
    assert np.count_nonzero(np.abs(audio) >= top) == 1


@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_noise_falls_at_its_slope(slope: float) -> None:
    noise = coloured_noise(SAMPLE_RATE * 4, slope, seed=1)
    power = np.abs(np.fft.rfft(noise)) ** 2
    frequency = np.fft.rfftfreq(len(noise), 1 / SAMPLE_RATE)
    low = power[(frequency > 200) & (frequency < 400)].mean()
    high = power[(frequency > 2000) & (frequency < 4000)].mean()
    assert 10 * np.log10(low / high) == pytest.approx(10 * slope, abs=1.0)
    assert np.mean(noise**2) == pytest.approx(1.0, rel=1e-4)


def test_noise_is_seeded() -> None:
    first, same, other = (coloured_noise(999, 1.0, seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
