from typing import Any

import torch

from effasr_kernels import PackedLayout, normalize_features

LENGTHS = (7, 0, 16, 1)
"""Real rows of each sequence, in slots of 4."""


def _given(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    slots = [-(-length // 4) for length in LENGTHS]
    layout = PackedLayout.from_lengths(slots, rows=sum(slots) + 2)
    return {
        "x": torch.randn(4 * layout.rows, 3, dtype=dtype) + 5,
        "lengths": torch.tensor(LENGTHS),
        "layout": layout,
        "rows_per_slot": 4,
        "eps": 1e-3,
    }


def test_each_sequence_has_zero_mean_and_unit_variance() -> None:
    given = _given()
    found = normalize_features(**given)
    expected = torch.zeros_like(found)
    for length, begin in zip(LENGTHS, given["layout"].cu_seqlens_host, strict=False):
        rows = slice(4 * begin, 4 * begin + length)
        if length:
            x = given["x"][rows]
            deviation = x.std(0) if length > 1 else torch.zeros(3)
            expected[rows] = (x - x.mean(0)) / (deviation + 1e-3)
    torch.testing.assert_close(found, expected)
    assert found[:7].std(0).sub(1).abs().max() < 2e-3


def test_nan_in_rows_that_are_not_real_or_in_a_neighbour_reaches_nothing() -> None:
    given = _given()
    expected = normalize_features(**given)
    given["x"][7], given["x"][-8:] = torch.nan, torch.nan
    assert torch.equal(normalize_features(**given), expected)
    given["x"][:7] = torch.nan
    assert torch.equal(normalize_features(**given)[8:], expected[8:])


def test_a_large_mean_costs_no_accuracy() -> None:
    """The difference of the mean square and the squared mean would be wrong by far."""
    given = _given(torch.float32)
    exact = normalize_features(**given | {"x": given["x"].double()})
    given["x"] += 4096
    torch.testing.assert_close(normalize_features(**given).double(), exact, atol=5e-3, rtol=0)
