from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, audio_windows

HOP, SLOT, SAMPLES = 5, 4, (53, 0, 19, 40)
"""Slots have 4 windows, 5 samples apart; the last slot of an utterance may be longer than it."""


def _given(width: int = 12, n_fft: int = 17) -> dict[str, Any]:
    audio = PackedLayout.from_lengths(SAMPLES, rows=sum(SAMPLES) + 9)
    slots = [-(-count // (HOP * SLOT)) for count in SAMPLES]
    return {
        "audio": torch.randn(audio.rows, dtype=torch.float64),
        "window": torch.rand(width, dtype=torch.float64) + 0.5,
        "layout_audio": audio,
        "layout_slots": PackedLayout.from_lengths(slots, rows=sum(slots) + 2),
        "rows_per_slot": SLOT,
        "hop": HOP,
        "n_fft": n_fft,
        "preemphasis": 0.9,
    }


def _expected(given: dict[str, Any]) -> Tensor:
    """Look up every sample of every window by itself."""
    slots, offsets = given["layout_slots"], given["layout_audio"].cu_seqlens_host
    window, points, p = given["window"].tolist(), given["n_fft"], given["preemphasis"]
    y = torch.zeros(SLOT * slots.rows, points, dtype=torch.float64)
    for n, samples in enumerate(SAMPLES):
        a = given["audio"][offsets[n] : offsets[n + 1]].tolist()
        first, end = (SLOT * slots.cu_seqlens_host[i] for i in (n, n + 1))
        for r in range(end - first):
            for j, weight in enumerate(window):
                i = r * HOP + j - points // 2 + (points - len(window)) // 2
                if 0 <= i < samples:
                    y[first + r, j] = weight * (a[i] - (p * a[i - 1] if i else 0.0))
    return y


@pytest.mark.parametrize(("width", "n_fft"), [(12, 17), (12, 12), (3, 8)])
@pytest.mark.parametrize("preemphasis", [0.9, 0.0])
def test_windows_are_those_of_the_formula(width: int, n_fft: int, preemphasis: float) -> None:
    given = _given(width, n_fft) | {"preemphasis": preemphasis}
    torch.testing.assert_close(audio_windows(**given), _expected(given))


def test_a_range_of_slots_has_the_same_rows() -> None:
    given = _given()
    whole = audio_windows(**given)
    assert torch.equal(audio_windows(**given, slots=(2, 5)), whole[2 * SLOT : 5 * SLOT])
    assert audio_windows(**given, slots=(3, 3)).shape == (0, 17)


def test_nan_in_the_tail_or_in_a_neighbour_reaches_nothing() -> None:
    given = _given()
    expected = audio_windows(**given)
    given["audio"][-9:] = torch.nan
    given["audio"][: SAMPLES[0]] = torch.nan
    rows = SLOT * given["layout_slots"].cu_seqlens_host[1]
    assert torch.equal(audio_windows(**given)[rows:], expected[rows:])
