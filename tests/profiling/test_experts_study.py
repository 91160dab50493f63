"""The study of experts, at a toy size."""

import csv
from pathlib import Path

import pytest
from experts import compare


def test_a_row_for_each_system_at_equal_flops(tmp_path: Path) -> None:
    output = tmp_path / "experts.csv"
    assert compare.main(["--steps", "2", "--seeds", "3", "--output", str(output)]) == 0
    with output.open(encoding="utf-8") as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["dense", "named", "learned"]
    assert len({row["updates"] for row in rows.values()}) == 1
    dense, named, learned = (int(row["flops_per_frame"]) for row in rows.values())
    # Experts cost nothing but the routers: 4 networks of 2 logits of 48 channels.
    assert (named, learned) == (dense, dense + 4 * 2 * 2 * 48)
    assert int(rows["named"]["parameters"]) > int(rows["dense"]["parameters"])
    shares = [float(x) for x in rows["named"]["expert_shares"].split()]
    assert sum(shares) == pytest.approx(1.0, abs=1e-2)
    assert min(shares) > 0.3
