"""The study of slow nodes: what it makes of logs, a small run of it, and namespaces with limits."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import straggler_study
from bench import rows as table_file
from scale.strategies import Strategy
from straggler import network
from straggler.corpus import config, write_corpus
from straggler.launch import Window
from straggler.outcome import Judge, Point, Steps, at_samples, at_time, outcome
from straggler.settings import Settings

SVG = "{http://www.w3.org/2000/svg}"
NO_NAMESPACES = network.why_not()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tones")
    write_corpus(folder, utterances=60, held_out=12)
    return folder


def make_settings(folder: Path, **changes) -> Settings:
    plain = Settings("", str(folder), 2, 1, 0.25, (4.0, 1.0), in_step=False, every_s=1.0)
    return replace(plain, **changes)


def write_steps(settings: Settings, rank: int, ends: np.ndarray, samples: int) -> None:
    lines = [
        {"began": float(end - ends[0]), "time": float(end), "samples": samples, "micro_batches": 1}
        for end in ends
    ]
    settings.log(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_rate_is_counted_between_ends_of_steps(tmp_path) -> None:
    """Of steps of 3 s, a window of 10 s holds three and a third; neither 3 nor 4 over 10 is it."""
    settings = make_settings(tmp_path)
    write_steps(settings, 0, np.arange(1, 20) * 3.0, samples=6)
    steps = Steps.read(settings.log(0))
    for begin in (10.0, 11.0, 12.5):
        assert steps.rate(Window(begin, begin + 10)) == pytest.approx(2.0)
    assert steps.count(Window(10.0, 20.0)) == 3
    assert steps.until(9.5) == 18
    assert steps.rate(Window(10.0, 12.5)) == pytest.approx(6 / 2.5)


def test_learners_are_averaged_where_all_of_them_are_known(tmp_path, corpus) -> None:
    settings = make_settings(tmp_path)
    run = config(corpus, tmp_path, "run", 0, 2)
    judge = Judge(run)
    assert judge.parameters == 53_281
    size = len(judge._is_weight)
    write_steps(settings, 0, np.array([1.0, 5.0, 9.0]), samples=6)
    write_steps(settings, 1, np.arange(1.0, 10.0), samples=5)
    random = np.random.default_rng(0)
    first, second = 0.05 * random.standard_normal((2, size))
    for rank, number, weights in ((0, 1, first), (1, 2, first), (1, 3, second)):
        row = np.concatenate([[number + 0.5, 1], weights])
        np.save(settings.weights(rank, number), row)
    found = outcome(settings, run, Window(1.0, 9.0))
    # Rank 0, which is slow, has told its weights but once; before rank 1 has, there is no mean.
    assert [point.seconds for point in found.points] == [2.5, 3.5]
    assert [point.samples for point in found.points] == [6 + 10, 6 + 15]
    assert found.node_steps == [3, 9]
    same, apart = found.points
    assert same.consensus == 0
    assert same.loss == pytest.approx(judge([first])[0])
    mean = (first + second) / 2
    is_weight = judge._is_weight
    expected = np.linalg.norm((first - mean)[is_weight]) / np.linalg.norm(mean[is_weight])
    assert apart.consensus == pytest.approx(expected)
    assert apart.loss == pytest.approx(judge([mean])[0])
    assert found.samples_per_s == pytest.approx(6 / 4 + 5)
    assert found.micro_batch == pytest.approx((3 * 6 + 9 * 5) / 12)
    # Ranks in step count only where all have told the same step: here they never have.
    with pytest.raises(RuntimeError, match="no rank wrote its weights"):
        outcome(replace(settings, in_step=True), run, Window(1.0, 9.0))


def test_loss_between_points() -> None:
    points = [Point(1.0, 10, 4.0, 0.0), Point(3.0, 20, 2.0, 0.0)]
    assert at_time(points, 2.0) == pytest.approx(3.0)
    assert at_samples(points, 15) == pytest.approx(3.0)
    assert at_time(points, 3.5) is None
    assert at_samples([], 1) is None


def test_strategies_as_configurations(corpus, tmp_path) -> None:
    plain = config(corpus, tmp_path, "run", 0, 8)
    local = straggler_study.override(plain, Strategy.parse("local_sgd:4")).training
    assert (local.strategy, local.local_sgd.period, local.local_sgd.warmup_steps) == (
        "local_sgd",
        4,
        0,
    )
    groups = straggler_study.override(plain, Strategy.parse("hierarchical:2x4,8")).training
    assert groups.hierarchical.periods == {2: 4, 8: None}
    delayed = straggler_study.override(plain, Strategy.parse("delayed")).training
    assert delayed.delayed.warmup_steps == 0
    with pytest.raises(ValueError, match="must not be fsdp2"):
        straggler_study.override(plain, Strategy.parse("fsdp2"))


@pytest.mark.extended
def test_a_small_run(tmp_path, capsys) -> None:
    """Two nodes of one process, one of them four times slower: ddp goes at its pace."""
    made = tmp_path / "straggler.csv", tmp_path / "straggler.svg"
    options = ["--strategies", "ddp", "--slowdowns", "4", "--seeds", "1", "--nodes", "2"]
    options += ["--per-node", "1", "--base-s", "0.08", "--seconds", "5", "--utterances", "40"]
    assert straggler_study.main([*options, "--csv", str(made[0])]) == 0
    assert "| 4 x | ddp |" in capsys.readouterr().out
    (row,) = table_file.read(made[0])
    assert list(row) == list(straggler_study.COLUMNS)
    # 0.32 s of every step are sleep; what else there is on a busy machine is not known.
    assert float(row["samples_per_s"]) < 2 * float(row["micro_batch"]) / 0.32
    assert float(row["consensus"]) == 0
    assert 0 < float(row["loss_at_time"]) < 5
    assert row["loss_at_samples"] == row["loss_at_time"]
    first, second = map(int, row["node_steps"].split())
    assert abs(first - second) <= 1
    options = ["--table", str(made[0]), "--picture", str(made[1])]
    assert straggler_study.main(options) == 0
    texts = [text.text for text in ElementTree.parse(made[1]).iter(f"{SVG}text")]
    assert "one node 4 x slower" in texts


@pytest.mark.extended
def test_a_process_that_fails_is_heard(tmp_path, corpus) -> None:
    from straggler.launch import train

    settings = make_settings(tmp_path, nodes=1, factors=(1.0,), recipe=str(tmp_path / "none.yaml"))
    with pytest.raises(RuntimeError, match=r"rank 0 ended early, with 1: .*none\.yaml"):
        train(settings, network.plain(1), 1.0)


def test_table_is_of_means_over_seeds(tmp_path, capsys) -> None:
    path = tmp_path / "straggler.csv"
    some = dict.fromkeys(straggler_study.COLUMNS, "1") | {"rate_mbit": ""}
    for slowdown, rates in (("1", (90, 110)), ("10", (55, 65))):
        for seed, rate in enumerate(rates):
            row = {"strategy": "h_adpsgd:2", "slowdown": slowdown, "seed": seed}
            row |= {"samples_per_s": rate, "node_steps": f"{seed} 8", "loss_at_time": ""}
            table_file.append(path, straggler_study.COLUMNS, some | row)
    assert straggler_study.main(["--table", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].startswith("| 1 x | h_adpsgd:2 | 100.0 (100) |  | 1 |")
    assert shown[3].startswith("| 10 x | h_adpsgd:2 | 60.0 (60) |")
    assert shown[3].endswith("| 0 8 | 2 |")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategies", "horovod"], "`strategies` must be of"),
        (["--slowdowns", "0.5"], "`slowdowns` must be at least 1"),
        (["--nodes", "1"], "`nodes` must be at least 2"),
        (["--base-s", "0"], "`base_s` must be positive"),
        (["--utterances", "20"], "`utterances` must be at least 10 for each process"),
    ],
)
def test_what_makes_no_sense(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        straggler_study.main(options)


def test_no_namespaces_is_said(monkeypatch, capsys) -> None:
    monkeypatch.setattr(network, "why_not", lambda: "it needs root")
    assert straggler_study.main(["--netns", "100"]) == 0
    assert capsys.readouterr().out == "straggler_study: --netns is skipped: it needs root\n"
    with pytest.raises(RuntimeError, match="it needs root"), network.limited(2, 100.0):
        pass


@pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES))
def test_a_link_is_as_fast_as_it_was_limited_to() -> None:
    """500 kB, beyond the bucket that is full at first, at 8 Mbit/s: half a second."""
    receive = (
        "import socket; s = socket.create_server(('', 5000)); print('ready', flush=True); "
        "c, _ = s.accept()\nwhile c.recv(1 << 16): pass\nc.sendall(b'x')"
    )
    send = (
        "import socket, sys, time; c = socket.create_connection((sys.argv[1], 5000)); "
        "t = time.monotonic(); c.sendall(bytes(500_000)); c.shutdown(socket.SHUT_WR); c.recv(1); "
        "print(time.monotonic() - t)"
    )
    with network.limited(2, 8.0) as made:
        address = made.address.rsplit(".", 1)[0] + ".10"
        command = [*made.prefixes[0], sys.executable, "-c", receive]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            command = [*made.prefixes[1], sys.executable, "-c", send, address]
            began = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            assert time.monotonic() - began < 30
    assert 0.4 < float(done.stdout) < 3.0
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert made.prefixes[0][-1] not in spaces.stdout
