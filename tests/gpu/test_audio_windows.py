from typing import Any

import pytest
import torch

from effasr_kernels import PackedLayout, audio_windows
from effasr_kernels.testing.tolerance import assert_no_worse, poison

HOP = 10


@pytest.mark.parametrize(("slot", "width", "n_fft"), [(8, 24, 32), (2, 5, 7)])
@pytest.mark.parametrize("preemphasis", [0.97, 0.0])
@pytest.mark.representative(width=24, n_fft=32, preemphasis=0.97)
def test_is_as_accurate_as_the_reference(
    lengths: tuple[int, ...],
    slot: int,
    width: int,
    n_fft: int,
    preemphasis: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    samples = [max(0, slot * HOP * n - 3 * (i % 2)) for i, n in enumerate(lengths)]
    audio = PackedLayout.from_lengths(samples, rows=sum(samples) + 11)
    slots = PackedLayout.from_lengths(lengths, rows=sum(lengths) + 2)
    values = poison(torch.randn(audio.rows), audio).to(dtype)
    window = torch.rand(width).to(dtype)

    def call(x: torch.Tensor, where: torch.device, backend: str) -> torch.Tensor:
        return audio_windows(
            x.to(where),
            window.to(where, x.dtype),
            audio.to(where),
            slots.to(where),
            rows_per_slot=slot,
            hop=HOP,
            n_fft=n_fft,
            preemphasis=preemphasis,
            backend=backend,
        ).cpu()

    here = torch.device("cpu")
    found = call(values, device, "triton")
    gold = call(values.double(), here, "reference")
    assert_no_worse(found, gold, call(values, here, "reference"))
    assert not found[slot * slots.total :].any()


def test_a_range_of_slots_has_the_same_rows(device: torch.device) -> None:
    """Of more sequences than a program looks up at once, and long windows."""
    lengths = [1, 0] * 140
    audio = PackedLayout.from_lengths([HOP * 8 * n for n in lengths], device)
    slots = PackedLayout.from_lengths(lengths, device, rows=sum(lengths) + 1)
    given = torch.randn(audio.rows, device=device), torch.rand(24, device=device), audio, slots
    options: dict[str, Any] = {"rows_per_slot": 8, "hop": HOP, "n_fft": 1024, "preemphasis": 0.97}
    whole = audio_windows(*given, **options, backend="reference")
    found = audio_windows(*given, **options, slots=(135, 141), backend="triton")
    torch.testing.assert_close(found, whole[8 * 135 :], atol=1e-6, rtol=1e-6)
