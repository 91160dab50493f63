"""Tables on a terminal are continued below where they are too wide, and lose no cell."""

import pytest
from rich import box
from rich.table import Table
from rich.text import Text

from effasr.evaluation import tables
from effasr.evaluation.alignment import align


def make_table(columns: int) -> Table:
    table = Table(box=box.MARKDOWN)
    table.add_column("strategy")
    for number in range(columns):
        table.add_column(f"column {number}", justify="right")
    for row in ("random", "sync_bucketed_2d"):
        table.add_row(Text(row), *(f"{row[0]}{number}" for number in range(columns)))
    return table


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_wide_table_is_continued_below(monkeypatch, width):
    monkeypatch.setattr(tables, "display_width", lambda: width)
    text = tables.to_text(make_table(12))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = text.replace("|", " ").split()
    for number in range(12):
        assert words.count(f"r{number}") == words.count(f"s{number}") == 1
    parts = text.split("\n\n")
    assert len(parts) > 1
    assert all(part.splitlines()[-1].startswith("| sync_bucketed_2d |") for part in parts)


@pytest.mark.parametrize("limit", [30, 80])
def test_an_alignment_is_continued_below(limit):
    reference = " ".join(f"word{n}" for n in range(30))
    aligned = align(reference, reference.replace("word7", "other").replace("word20 ", ""))
    lines = aligned.lines("  ", limit)
    assert max(map(len, lines)) <= limit
    assert len(lines) % 3 == 0
    assert len(lines) > 3
    assert [line.split()[0] for line in lines[:3]] == ["REF:", "HYP:", "Eval:"]
    whole = aligned.lines()
    for n in range(3):
        words = [word for line in lines[n::3] for word in line.split()[1:]]
        assert words == whole[n].split()[1:]
    assert len(whole) == 3
