"""The kernels of the features, compiled without a GPU."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from effasr_kernels import PackedLayout, audio_windows, mask_features, normalize_features
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]
NAMES = {"cut_windows", "normalize_rows", "mask_rows"}
HOP = 160


def _launches(
    architecture: int,
    *,
    mels: int = 80,
    slot: int = 8,
    n_fft: int = 512,
    lengths: tuple[int, ...] = (150, 300),
    rows: int = 512,
    slots: tuple[int, int] | None = None,
) -> list[launch.Launch]:
    layout = PackedLayout.from_lengths(lengths, rows=rows)
    samples = PackedLayout.from_lengths([slot * HOP * n for n in lengths])
    x, real = torch.empty(slot * rows, mels), torch.tensor(lengths) * slot
    options: dict[str, Any] = {"rows_per_slot": slot, "backend": "triton"}
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        audio_windows(
            *(torch.empty(samples.rows), torch.empty(400), samples, layout),
            **options,
            hop=HOP,
            n_fft=n_fft,
            preemphasis=0.97,
            slots=slots,
        )
        normalize_features(x, real, layout, **options)
        shares = {
            name: torch.rand(2, len(lengths), count)
            for name, count in (("freq_shares", 2), ("time_shares", 10))
        }
        mask_features(x, real, layout, **options, **shares, freq_width=27, time_width=0.05)
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(("mels", "slot", "n_fft"), [(80, 8, 512), (128, 8, 512), (128, 4, 1024)])
@pytest.mark.representative(mels=128, slot=8)
def test_compiles_for_every_architecture(
    architecture: int, mels: int, slot: int, n_fft: int, compiled_ok: Check
) -> None:
    found = compiled_ok(_launches(architecture, mels=mels, slot=slot, n_fft=n_fft), architecture)
    assert set(found) == NAMES
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # Rows are read and written in pieces of 16 bytes, and windows written so.
    for name in ("normalize_rows", "mask_rows"):
        assert re.search(r"ld\.global\S*\.v4\.b32", found[name].ptx), name
    for name in NAMES:
        assert re.search(r"st\.global\S*\.v4\.b32", found[name].ptx), name


def test_no_batch_compiles_anything() -> None:
    keys, draw = set(), random.Random(0)
    for _ in range(100):
        lengths = tuple(draw.randrange(40) for _ in range(1 + draw.randrange(20)))
        rows = sum(lengths) + 1 + draw.randrange(20)
        slots = draw.randrange(rows), rows
        found = _launches(90, mels=16, lengths=lengths, rows=rows, slots=slots)
        keys |= {aot.key(one) for one in found}
    assert len(keys) == len(NAMES)
