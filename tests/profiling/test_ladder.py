"""Predicted and measured figures of a small ladder, in one run."""

import csv
from pathlib import Path
from xml.etree import ElementTree

import ladder
import numpy as np
import pytest

from effasr.planning.study import StudyOptions


@pytest.fixture
def corpus(tmp_path) -> Path:
    generator = np.random.default_rng(0)
    seconds = np.minimum(generator.lognormal(1.6, 0.6, 200), 20.0)
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{s:.2f}\n" for s in seconds))
    return path


@pytest.mark.extended
def test_a_ladder(corpus, tmp_path, capsys) -> None:
    made = (tmp_path / "l.csv", tmp_path / "l.svg")
    options = ["--frame-budget", "800", "--world-size", "2", "--scale", "0.1", "--seconds", "0"]
    ladder.main([str(corpus), *options, "--csv", str(made[0]), "--picture", str(made[1])])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown[2:]] == list(ladder.RUNGS)
    with made[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    by_name = {row["strategy"]: row for row in rows}
    # Short utterances take less memory than their frames say, so that more of them fit.
    assert float(by_name["calibrated"]["batch_utterances"]) > 0
    assert (
        by_name["calibrated"]["batch_utterances"] != by_name["sync_bucketed_2d"]["batch_utterances"]
    )
    for row in rows:
        assert int(row["measured_steps"]) == 1
        per_hour = 3600 * float(row["measured_cpu_seconds"]) / float(row["measured_audio_seconds"])
        assert float(row["cpu_seconds_per_audio_hour"]) == pytest.approx(per_hour, rel=1e-4)
        assert per_hour > 0
    texts = [text.text for text in ElementTree.parse(made[1]).iter()]
    assert "measured, CPU s / audio h" in texts


def test_batches_are_those_of_the_plan(corpus) -> None:
    request = ladder.Request.of(manifests=[corpus], frame_budget=800)
    _, selection = request.read()
    short = ladder.shorten(selection, 0.1)
    assert short.shape.frame_budget == 80
    assert short.lengths.frames.max() <= short.shape.frame_budget
    options = StudyOptions(world_size=2, buckets=4)
    for strategy in ("packed", "bucketed"):
        planned = ladder.plan_by(strategy, short, request.cost, options)
        load = ladder.Workload(short, planned)
        plan = planned.plans[0]
        for number in range(plan.num_steps):
            for batch, members in zip(load.step(number), plan.step(number), strict=True):
                assert batch.num_frames == short.lengths.frames[members].sum()
                assert batch.num_tokens == short.lengths.tokens[members].sum()
                widest = len(members) * short.lengths.frames[members].max()
                assert batch.frames.rows == (80 if strategy == "packed" else widest)
        steps = iter(load.next_step, None)
        assert sum(1 for _ in steps) == plan.num_steps
