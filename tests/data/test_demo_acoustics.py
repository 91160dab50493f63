import numpy as np
import pytest

from effasr.data.demo.acoustics import REFERENCE_LEVEL_DB, record

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


@pytest.mark.parametrize("snr", [12.0, 40.0])
@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_signal_to_noise_ratio(snr: float, slope: float) -> None:
    setting = {**QUIET, "noise_slope": slope}
    noisy = record(tone(), 22_050, **{**setting, "snr_db": snr}, seed=5).astype(float)
    clean = record(tone(), 22_050, **setting, seed=5).astype(float)
    assert decibels(clean) - decibels(noisy - clean) == pytest.approx(snr, abs=0.2)
