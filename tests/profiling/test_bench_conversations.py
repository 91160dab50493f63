"""The benchmark of answers: its systems write the same tokens, and its rows are complete."""

import csv
from pathlib import Path

import bench_conversations
import pytest

pytest.importorskip("transformers")
TINY = ["--size", "tiny", "--conversations", "7", "--slots", "3", "--repeats", "1"]


@pytest.mark.parametrize("answers", ["transcripts", "replies"])
@pytest.mark.representative(answers="replies")
def test_rows_of_both_caches_and_of_transformers(answers: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    options = [*TINY, "--caches", "contiguous", "paged", "--peer", "--output", str(out)]
    assert bench_conversations.main([*options, "--answers", answers]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["system"], row["cache"]) for row in rows] == [
        ("effasr", "contiguous"),
        ("effasr", "paged"),
        ("transformers", "contiguous"),
    ]
    for row in rows:
        assert row["answers"] == answers
        assert float(row["agreement"]) > 0.95
        assert float(row["tokens_per_s"]) == pytest.approx(
            int(row["tokens"]) / float(row["p50_s"]), rel=0.01
        )
        assert (row["slots"], row["conversations"], row["dtype"]) == ("3", "7", "float32")


def test_systems_that_disagree_are_not_timed(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "rows.csv"
    answer = bench_conversations.Peer.answer

    def wrong(peer):
        return [[token ^ 1 for token in tokens] for tokens in answer(peer)]

    monkeypatch.setattr(bench_conversations.Peer, "answer", wrong)
    assert bench_conversations.main([*TINY, "--peer", "--output", str(out)]) == 1
    assert "only 0.0000 of the tokens of transformers (contiguous" in capsys.readouterr().err
    assert not out.exists()
