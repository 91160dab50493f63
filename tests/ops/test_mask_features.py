from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, mask_features

LENGTHS = (7, 0, 16, 1)
"""Real rows of each sequence, in slots of 4."""


def _given(channels: int = 6) -> dict[str, Any]:
    """Rows of ones, and random numbers for 2 bands and 3 stretches of each sequence."""
    slots = [-(-length // 4) for length in LENGTHS]
    layout = PackedLayout.from_lengths(slots, rows=sum(slots) + 2)
    return {
        "x": torch.ones(4 * layout.rows, channels),
        "lengths": torch.tensor(LENGTHS),
        "layout": layout,
        "rows_per_slot": 4,
        "freq_shares": torch.rand(2, len(LENGTHS), 2),
        "freq_width": 3,
        "time_shares": torch.rand(2, len(LENGTHS), 3),
        "time_width": 0.5,
    }


def _expected(given: dict[str, Any]) -> Tensor:
    """Compute each mask by Python's numbers, one sequence at a time."""
    y, s = torch.zeros_like(given["x"]), given["rows_per_slot"]
    offsets, channels = given["layout"].cu_seqlens_host, y.shape[1]
    for n, length in enumerate(given["lengths"].tolist()):
        rows = slice(s * offsets[n], s * offsets[n + 1])
        y[rows] = given["x"][rows]
        for u, v in given["freq_shares"][:, n].T.tolist():
            width = int(u * (min(given["freq_width"], channels) + 1))
            begin = int(v * (channels - width + 1))
            y[rows, begin : begin + width] = 0
        for u, v in given["time_shares"][:, n].T.tolist():
            width = int(u * (int(length * given["time_width"]) + 1))
            begin = rows.start + int(v * (length - width + 1))
            y[begin : begin + width] = 0
    return y


@pytest.mark.parametrize("seed", range(5))
def test_masks_are_those_of_the_formula(seed: int) -> None:
    torch.manual_seed(seed)
    given = _given()
    found = mask_features(**given)
    assert torch.equal(found, _expected(given))
    assert 0 < found.sum() < 4 * sum(-(-length // 4) for length in LENGTHS) * 6


def test_shares_at_the_ends_reach_the_first_and_the_last_place() -> None:
    given = _given() | {"time_shares": None}
    nearly_one = torch.nextafter(torch.ones(()), torch.zeros(()))
    for share, columns in ((0.0, [0, 1, 2]), (nearly_one, [3, 4, 5])):
        shares = torch.empty(2, len(LENGTHS), 1)
        shares[0], shares[1] = nearly_one, share
        hidden = mask_features(**given | {"freq_shares": shares})[:4] == 0
        assert hidden.all(0).nonzero().flatten().tolist() == columns


def test_without_masks_the_rows_stay_and_the_tail_is_zero() -> None:
    given = _given() | {"freq_shares": None, "time_shares": None}
    given["x"][-8:] = torch.nan
    found = mask_features(**given)
    assert torch.equal(found[:-8], given["x"][:-8])
    assert not found[-8:].any()


def test_nan_in_a_sequence_reaches_no_other_row() -> None:
    given = _given()
    expected = mask_features(**given)
    given["x"][:8] = torch.nan
    assert torch.equal(mask_features(**given)[8:], expected[8:])
