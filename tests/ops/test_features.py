"""The definitions of `audio_windows`, `mask_features` and `normalize_features`, row by row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels import audio_windows, mask_features, normalize_features
from tests.support.feature_calls import (
    Arguments,
    mask_arguments,
    normalize_arguments,
    window_arguments,
)

LENGTHS, SAMPLES = (7, 0, 16, 1), (53, 0, 19, 40)
"""Real rows in slots of 4; samples in slots of 4 windows, 5 samples apart."""


def _expected_windows(arguments: Arguments) -> Tensor:
    """Look up every sample of every window by itself."""
    slots, offsets = arguments["layout_slots"], arguments["layout_audio"].cu_seqlens_host
    window, points, p = (arguments[x] for x in ("window", "n_fft", "preemphasis"))
    y = torch.zeros(4 * slots.rows, points, dtype=torch.float64)
    for n, samples in enumerate(SAMPLES):
        a = arguments["audio"][offsets[n] : offsets[n + 1]].tolist()
        first, end = (4 * slots.cu_seqlens_host[i] for i in (n, n + 1))
        for r in range(end - first):
            for j, weight in enumerate(window.tolist()):
                i = r * 5 + j - points // 2 + (points - len(window)) // 2
                if 0 <= i < samples:
                    y[first + r, j] = weight * (a[i] - (p * a[i - 1] if i else 0.0))
    return y


@pytest.mark.parametrize(("width", "n_fft"), [(12, 17), (12, 12), (3, 8)])
@pytest.mark.parametrize("preemphasis", [0.9, 0.0])
def test_windows_are_those_of_the_formula(width: int, n_fft: int, preemphasis: float) -> None:
    arguments = window_arguments(SAMPLES, width=width, n_fft=n_fft) | {"preemphasis": preemphasis}
    whole = audio_windows(**arguments)
    torch.testing.assert_close(whole, _expected_windows(arguments))
    assert torch.equal(audio_windows(**arguments, slots=(2, 5)), whole[8:20])
    assert audio_windows(**arguments, slots=(3, 3)).shape == (0, n_fft)


def _expected_masks(arguments: Arguments) -> Tensor:
    """Compute each mask by Python's numbers, one sequence at a time."""
    y, s = torch.zeros_like(arguments["x"]), arguments["rows_per_slot"]
    offsets, channels = arguments["layout"].cu_seqlens_host, y.shape[1]
    for n, length in enumerate(arguments["lengths"].tolist()):
        rows = slice(s * offsets[n], s * offsets[n + 1])
        y[rows] = arguments["x"][rows]
        for u, v in arguments["freq_shares"][:, n].T.tolist():
            width = int(u * (min(arguments["freq_width"], channels) + 1))
            begin = int(v * (channels - width + 1))
            y[rows, begin : begin + width] = 0
        for u, v in arguments["time_shares"][:, n].T.tolist():
            width = int(u * (int(length * arguments["time_width"]) + 1))
            begin = rows.start + int(v * (length - width + 1))
            y[begin : begin + width] = 0
    return y


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_those_of_the_formula(seed: int) -> None:
    torch.manual_seed(seed)
    arguments = mask_arguments(LENGTHS)
    y = mask_features(**arguments)
    assert torch.equal(y, _expected_masks(arguments))
    assert 0 < y.count_nonzero() < arguments["x"].isfinite().sum()


def test_shares_at_the_ends_reach_the_first_and_the_last_place() -> None:
    arguments = mask_arguments(LENGTHS, stretches=0)
    nearly_one = torch.nextafter(torch.ones(()), torch.zeros(()))
    for share, columns in ((0.0, [0, 1, 2]), (nearly_one, [3, 4, 5])):
        shares = torch.empty(2, len(LENGTHS), 1)
        shares[0], shares[1] = nearly_one, share
        hidden = mask_features(**arguments | {"freq_shares": shares})[:4] == 0
        assert hidden.all(0).nonzero().flatten().tolist() == columns


@pytest.mark.parametrize("log_guard", [0.0, 0.5])
def test_each_sequence_has_zero_mean_and_unit_variance(log_guard: float) -> None:
    arguments = normalize_arguments(LENGTHS, eps=1e-3, log_guard=log_guard)
    arguments["x"].abs_()
    y = normalize_features(**arguments)
    expected = torch.zeros_like(y)
    for length, begin in zip(LENGTHS, arguments["layout"].cu_seqlens_host, strict=False):
        rows = slice(4 * begin, 4 * begin + length)
        if length:
            x = arguments["x"][rows]
            x = (x + log_guard).log() if log_guard else x
            deviation = x.std(0) if length > 1 else torch.zeros(3)
            expected[rows] = (x - x.mean(0)) / (deviation + 1e-3)
    torch.testing.assert_close(y, expected)
    assert y[:7].std(0).sub(1).abs().max() < 1e-2


def test_a_large_mean_costs_no_accuracy() -> None:
    """The difference of the mean square and the squared mean would be wrong by far."""
    arguments = normalize_arguments(LENGTHS, eps=1e-3)
    x = arguments["x"].float()
    exact = normalize_features(**arguments | {"x": x.double()})
    shifted = normalize_features(**arguments | {"x": x + 4096})
    torch.testing.assert_close(shifted.double(), exact, atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    ("call", "arguments", "name", "rows"),
    [
        (audio_windows, lambda: window_arguments(SAMPLES), "audio", 53),
        (mask_features, lambda: mask_arguments(LENGTHS), "x", 8),
        (normalize_features, lambda: normalize_arguments(LENGTHS), "x", 7),
    ],
)
def test_nan_in_a_sequence_reaches_no_other_row(
    call: Callable[..., Tensor], arguments: Callable[[], Arguments], name: str, rows: int
) -> None:
    """The first sequence has three slots of windows, and two of features."""
    made = arguments()
    first = 12 if name == "audio" else 8
    expected = call(**made)
    made[name][:rows] = torch.nan
    assert torch.equal(call(**made)[first:], expected[first:])
