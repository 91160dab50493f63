"""Calls of the operations on features, whose rows lie in slots of the sequences."""

from collections.abc import Sequence
from typing import Any

import torch

from effasr_kernels import PackedLayout

Arguments = dict[str, Any]


def to(arguments: Arguments, device: torch.device | str) -> Arguments:
    return {name: x.to(device) if hasattr(x, "to") else x for name, x in arguments.items()}


def _slots(lengths: Sequence[int], slot: int) -> tuple[PackedLayout, torch.Tensor]:
    """The layout of the slots of so many real rows, with a tail, and these lengths."""
    slots = [-(-length // slot) for length in lengths]
    return PackedLayout.from_lengths(slots, rows=sum(slots) + 2), torch.tensor(lengths)


def mask_arguments(
    lengths, slot=4, channels=6, *, bands=2, stretches=3, freq_width=3, time_width=0.5
):
    layout, real = _slots(lengths, slot)
    shares = [torch.rand(2, len(lengths), n) if n else None for n in (bands, stretches)]
    x = torch.randn(slot * layout.rows, channels) + 5
    x[slot * layout.total :] = torch.nan
    return {
        **{"x": x, "lengths": real, "layout": layout, "rows_per_slot": slot},
        **{"freq_shares": shares[0], "freq_width": freq_width},
        **{"time_shares": shares[1], "time_width": time_width},
    }


def normalize_arguments(lengths, slot=4, channels=3, **options):
    """NaN in the rows that are not real."""
    layout, real = _slots(lengths, slot)
    x = torch.full((slot * layout.rows, channels), torch.nan, dtype=torch.float64)
    for begin, length in zip(layout.cu_seqlens_host, lengths, strict=False):
        x[slot * begin : slot * begin + length] = torch.randn(length, channels).double() + 5
    return {"x": x, "lengths": real, "layout": layout, "rows_per_slot": slot, **options}


def window_arguments(samples, slot=4, hop=5, width=12, n_fft=17):
    audio = PackedLayout.from_lengths(samples, rows=sum(samples) + 9)
    slots, _ = _slots(samples, hop * slot)
    values = torch.randn(audio.rows, dtype=torch.float64)
    values[audio.total :] = torch.nan
    return {
        **{"audio": values, "window": torch.rand(width, dtype=torch.float64) + 0.5},
        **{"layout_audio": audio, "layout_slots": slots, "rows_per_slot": slot},
        **{"hop": hop, "n_fft": n_fft, "preemphasis": 0.9},
    }
