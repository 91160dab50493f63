"""Memory of the transducer's loss as the batch grows, at tiny sizes on a CPU."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import transducer_memory
from bench.memory import Alive, peak_bytes
from bench.transducer import loss as transducer

TINY = ["--device", "cpu", "--joint", "4", "--classes", "12", "--repeats", "1", "--seconds", "3"]


def test_only_what_is_made_and_alive_counts() -> None:
    given = torch.zeros(1000)

    def call() -> None:
        x = given + 1  # 4,000 bytes
        x += given
        y = x[:500] * 2  # 2,000 more
        del x
        z = y.view(5, 100).clone()  # in the place of 4,000
        torch.add(z, 1, out=z)

    assert peak_bytes(call, torch.device("cpu")) == 6_000


def test_what_operations_make_is_seen_past_the_dispatcher() -> None:
    batch = transducer_memory.drawn(2, transducer_memory.parse(TINY))
    contender = transducer_memory.ours(batch, "reference")
    with Alive() as alive:
        contender.gradients()
    logits = 4 * batch.nodes.count * 12 // 2
    assert alive.peak > logits


def test_memory_is_flat_in_the_batch_but_for_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.csv"
    run = [*TINY, "--batch", "8", "2", "--output", str(output)]
    assert transducer_memory.main(run) == 0
    with output.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    built = {"cpp"} & {row["backend"] for row in rows}
    installed = {"peer: torchaudio float32"} & {row["backend"] for row in rows}
    names = {"reference", "peer: torch dense"} | built | installed
    assert [(row["backend"], row["batch"]) for row in rows if row["backend"] == "reference"] == [
        ("reference", "2"),
        ("reference", "8"),
    ]
    assert {row["backend"] for row in rows} == names
    assert all(float(row["error"]) < 1e-4 for row in rows)

    def own(backend: str) -> list[int]:
        """What is not gradients."""
        found = [row for row in rows if row["backend"] == backend]
        return [int(row["peak_bytes"]) - 2 * int(row["gradient_bytes"]) for row in found]

    few, many = own("reference")
    assert many < 1.1 * few
    few, many = own("peer: torch dense")
    assert many > 3.5 * few
    shown = capsys.readouterr()
    lines = shown.out.strip().splitlines()[-4:]
    assert lines[0].startswith("| B | lattice nodes, packed / padded | gradients, MiB | reference")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 2", "| 8"]
    assert "at most 15 frames and 4 labels" in shown.out
    assert "torchaudio float32, B=2: No module" in shown.err or installed


def test_peers_are_those_of_the_benchmark() -> None:
    batch = transducer_memory.drawn(2, transducer_memory.parse(TINY))
    peers = {x.removeprefix("peer: ") for x in transducer_memory.ways(batch) if "peer" in x}
    assert peers <= transducer.PEERS.keys()
    assert "torch dense" in peers


def test_nothing_measured_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transducer_memory, "ways", lambda batch: {})
    assert transducer_memory.main([*TINY, "--batch", "2"]) == 1
    assert "|" not in capsys.readouterr().out
