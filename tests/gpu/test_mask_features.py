"""The Triton backend of `mask_features` against the reference: the same bytes."""

import pytest
import torch

from effasr_kernels import PackedLayout, mask_features
from effasr_kernels.testing.tolerance import poison

TIME_WIDTH = 0.3


@pytest.mark.parametrize(("slot", "channels"), [(8, 80), (2, 5)])
@pytest.mark.parametrize(("bands", "stretches"), [(2, 3), (0, 1), (1, 0)])
@pytest.mark.representative(slot=8, bands=2)
def test_matches_the_reference(
    lengths: tuple[int, ...],
    slot: int,
    channels: int,
    bands: int,
    stretches: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + 9)
    x = poison(torch.randn(layout.rows, slot * channels), layout).view(-1, channels).to(dtype)
    count = layout.num_sequences
    real = torch.tensor([max(0, slot * n - i % 2) for i, n in enumerate(lengths)])
    shares = [torch.rand(2, count, m) if m else None for m in (bands, stretches)]

    def call(where: torch.device, backend: str) -> torch.Tensor:
        return mask_features(
            x.to(where),
            real.to(where),
            layout.to(where),
            rows_per_slot=slot,
            freq_shares=None if shares[0] is None else shares[0].to(where),
            freq_width=27,
            time_shares=None if shares[1] is None else shares[1].to(where),
            time_width=TIME_WIDTH,
            backend=backend,
        ).cpu()

    found = call(device, "triton")
    assert torch.equal(found, call(torch.device("cpu"), "reference"))
    if sum(lengths):
        assert found.count_nonzero() > 0
        # Of two frames, no stretch masks a whole one.
        if bands or TIME_WIDTH * real.max() >= 1:
            assert found.count_nonzero() < sum(lengths) * slot * channels
