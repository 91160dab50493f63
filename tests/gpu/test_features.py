"""The Triton backends of `audio_windows`, `mask_features` and `normalize_features`."""

from typing import Any

import pytest
import torch

from effasr_kernels import PackedLayout, audio_windows, mask_features, normalize_features
from effasr_kernels.normalize_features import _triton
from tests.support.feature_calls import (
    mask_arguments,
    normalize_arguments,
    to,
    window_arguments,
)
from tests.support.tolerance import assert_no_worse


def _real_rows(lengths: tuple[int, ...], slot: int, missing: int = 1) -> list[int]:
    """The last slot of every other sequence is not full."""
    return [max(0, slot * n - missing * (i % 2)) for i, n in enumerate(lengths)]


def _check(call: Any, arguments: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    floating = {
        name: x.to(dtype)
        for name, x in arguments.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    narrow = arguments | floating
    wide = narrow | {name: x.double() for name, x in floating.items()}
    y = call(**to(narrow, device), backend="triton").cpu()
    assert_no_worse(y, call(**wide, backend="reference"), call(**narrow, backend="reference"))
    layout = arguments.get("layout_slots", arguments.get("layout"))
    assert not y[arguments["rows_per_slot"] * layout.total :].any()
    assert torch.equal(y, call(**to(narrow, device), backend="triton").cpu())


@pytest.mark.parametrize(("slot", "width", "n_fft"), [(8, 24, 32), (2, 5, 7)])
@pytest.mark.parametrize("preemphasis", [0.97, 0.0])
@pytest.mark.representative(width=24, n_fft=32, preemphasis=0.97)
def test_audio_windows(
    lengths: tuple[int, ...],
    slot: int,
    width: int,
    n_fft: int,
    preemphasis: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    samples = _real_rows(lengths, slot * 10, missing=3)
    arguments = window_arguments(samples, slot, 10, width, n_fft) | {"preemphasis": preemphasis}
    _check(audio_windows, arguments, dtype, device)


def test_audio_windows_of_a_range_of_slots(device: torch.device) -> None:
    """Of more sequences than a program looks up at once, and long windows."""
    arguments = window_arguments([80, 0] * 140, 8, 10, 24, 1024)
    arguments = to(arguments | {x: arguments[x].float() for x in ("audio", "window")}, device)
    whole = audio_windows(**arguments, backend="reference")
    y = audio_windows(**arguments, slots=(135, 141), backend="triton")
    torch.testing.assert_close(y, whole[8 * 135 : 8 * 141], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("slot", "channels"), [(8, 80), (2, 5)])
@pytest.mark.parametrize(("bands", "stretches"), [(2, 3), (0, 1), (1, 0)])
@pytest.mark.representative(slot=8, bands=2)
def test_mask_features(
    lengths: tuple[int, ...],
    slot: int,
    channels: int,
    bands: int,
    stretches: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The same bytes as of the reference."""
    masks = {"bands": bands, "stretches": stretches, "freq_width": 27, "time_width": 0.3}
    arguments = mask_arguments(_real_rows(lengths, slot), slot, channels, **masks)
    arguments["x"] = arguments["x"].to(dtype)
    y = mask_features(**to(arguments, device), backend="triton").cpu()
    assert torch.equal(y, mask_features(**arguments, backend="reference"))
    if sum(lengths):
        assert y.count_nonzero() > 0
        # Of two frames, no stretch masks a whole one.
        if bands or 0.3 * arguments["lengths"].max() >= 1:
            assert y.count_nonzero() < arguments["layout"].total * slot * channels


@pytest.mark.parametrize(("slot", "channels"), [(8, 20), (2, 5)])
@pytest.mark.parametrize("log_guard", [0.0, 2.0**-24])
@pytest.mark.representative(slot=8)
def test_normalize_features(
    lengths: tuple[int, ...],
    slot: int,
    channels: int,
    log_guard: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    arguments = normalize_arguments(_real_rows(lengths, slot), slot, channels)
    if log_guard:
        arguments |= {"x": arguments["x"].square(), "log_guard": log_guard}
    _check(normalize_features, arguments, dtype, device)


def test_normalize_features_with_a_tail_longer_than_all_its_programs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_TAIL_PROGRAMS", 2)
    layout = PackedLayout.from_lengths((1,), device, rows=1 + 2 * 128 // 8 + 3)
    x = torch.full((8 * layout.rows, 1), torch.nan, device=device)
    x[:8, 0] = torch.arange(8.0)
    real = torch.tensor([8], device=device)
    y = normalize_features(x, real, layout, rows_per_slot=8, backend="triton").cpu()
    torch.testing.assert_close(y[:8].mean(), torch.zeros(()), atol=1e-6, rtol=0)
    torch.testing.assert_close(y[:8].std(), torch.ones(()), atol=1e-4, rtol=0)
    assert not y[8:].any()
