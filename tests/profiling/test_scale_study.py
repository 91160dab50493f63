"""The simulator of clusters: closed forms, what must not decrease, and what the script prints."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import scale_study
from hypothesis import given, settings
from hypothesis import strategies as st
from scale import cluster as costs
from scale.check import check
from scale.cluster import Cluster, Link
from scale.gossip import Gossip, GossipCosts, neighbours
from scale.strategies import GOSSIP, LOCKSTEP, Strategy, predict
from scale.workload import BUCKET_BYTES, COUNTS_BYTES, Stragglers, Workload, draw, observe

SVG = "{http://www.w3.org/2000/svg}"
INTRA, INTER = Link(5e-6, 100e9), Link(2e-5, 10e9)
FREE = Link(0.0, 1e30)
WORK = Workload(step_s=0.5, samples=8.0, parameters=100e6)
EVEN = Stragglers()
EVERY = [Strategy.parse(name) for name in scale_study.STRATEGIES]


def even(gpus: int, **changes) -> Cluster:
    return Cluster(gpus, 8, INTRA, INTER, **changes)


def without_costs(gpus: int) -> tuple[Cluster, GossipCosts]:
    free = GossipCosts(staging=FREE, host_bytes_per_s=1e30, claim_s=0.0)
    return Cluster(gpus, 8, FREE, FREE), free


def rate(
    name: str, cluster: Cluster, work: Workload = WORK, stragglers: Stragglers = EVEN
) -> float:
    return predict(Strategy.parse(name), cluster, work, stragglers, GossipCosts()).samples_per_s


def test_ring() -> None:
    """2 (n - 1) messages of an n-th; at many ranks, twice the bytes over the bandwidth."""
    link = Link(1e-5, 1e9)
    assert costs.ring(4e6, 4, link) == pytest.approx(6 * (1e-5 + 1e6 / 1e9))
    assert costs.ring(1e9, 1000, Link(0.0, 1e9)) == pytest.approx(2.0, rel=2e-3)
    assert costs.ring(4e6, 1, link) == 0.0


def test_tree_has_fewer_messages_in_a_row() -> None:
    link = Link(1e-5, 1e9)
    assert costs.tree(0.0, 1024, link) == pytest.approx(20e-5)
    assert costs.ring(0.0, 1024, link) == pytest.approx(2046e-5)
    # Small sums on many nodes go by a tree, large ones on few by rings.
    many, few = even(1024), even(16)
    assert many.all_reduce(1e3) == pytest.approx(replace(many, algorithm="tree").all_reduce(1e3))
    assert few.all_reduce(1e9) == pytest.approx(replace(few, algorithm="two_level").all_reduce(1e9))


def test_all_reduce_inside_and_between_nodes() -> None:
    ring = even(16, algorithm="ring")
    assert ring.all_reduce(1e6, 8) == pytest.approx(costs.ring(1e6, 8, INTRA))
    assert ring.all_reduce(1e6) == pytest.approx(costs.ring(1e6, 16, Link(2e-5, 10e9)))
    slow = replace(ring, slowest_inter=4.0)
    assert slow.all_reduce(1e6, 8) == ring.all_reduce(1e6, 8)
    assert slow.all_reduce(1e6) == pytest.approx(costs.ring(1e6, 16, Link(2e-5, 2.5e9)))
    assert ring.all_gather(1e6) < ring.all_reduce(1e6)


def test_step_of_ddp_is_compute_and_exposed_communication() -> None:
    cluster = even(64)
    size = WORK.parameters * 4
    buckets = math.ceil(size / BUCKET_BYTES)
    one = cluster.all_reduce(size / buckets)
    counts = 2 * cluster.all_reduce(COUNTS_BYTES)
    found = predict(Strategy.parse("ddp"), cluster, WORK, EVEN, GossipCosts())
    # The backward, 0.33 s, hides all but the last bucket.
    assert found.step_s == pytest.approx(0.5 + one + counts)
    late = predict(Strategy.parse("ddp"), cluster, replace(WORK, overlap=0.0), EVEN, GossipCosts())
    assert late.step_s == pytest.approx(0.5 + buckets * one + counts)
    assert late.samples_per_s == pytest.approx(64 * 8.0 / late.step_s)
    assert late.efficiency == pytest.approx(0.5 / late.step_s)


def test_averaging_pays_once_a_period() -> None:
    cluster = even(64)
    whole = cluster.all_reduce(WORK.parameters * 4)
    counts = 2 * cluster.all_reduce(COUNTS_BYTES)
    work = replace(WORK, step_s=0.05)

    def step_s(name: str) -> float:
        return predict(Strategy.parse(name), cluster, work, EVEN, GossipCosts()).step_s

    assert step_s("local_sgd:4") == pytest.approx(0.05 + whole / 4 + counts)
    inside = cluster.all_reduce(WORK.parameters * 4, 8)
    # Of four steps, one averages all, and one of the other three those of a node.
    expected = 0.05 + whole / 4 + inside / 4 + counts
    assert step_s("hierarchical:2x8,4") == pytest.approx(expected)
    assert whole > 0.05
    assert step_s("delayed") == pytest.approx(whole + counts)


def test_fsdp2_gathers_behind_the_layers() -> None:
    """Slow enough layers hide all but the first gathering and the last scattering."""
    cluster = even(16)
    layer = WORK.parameters / WORK.layers
    gather, scatter = cluster.all_gather(2 * layer), cluster.all_gather(4 * layer)
    counts = 2 * cluster.all_reduce(COUNTS_BYTES)
    found = predict(Strategy.parse("fsdp2"), cluster, WORK, EVEN, GossipCosts())
    assert found.step_s == pytest.approx(0.5 + 2 * gather + scatter + counts)


@pytest.mark.parametrize("gpus", [16, 64, 256])
def test_one_node_ten_times_slower(gpus) -> None:
    """Who waits falls to a tenth; who does not loses nine tenths of a node."""
    cluster, free = without_costs(gpus)
    slow = Stragglers(slow_nodes=(10.0,))
    nodes = gpus // 8
    for strategy in EVERY:
        found = predict(strategy, cluster, WORK, slow, free)
        expected = 0.1 if strategy.waits else (nodes - 1 + 0.1) / nodes
        assert found.efficiency == pytest.approx(expected, rel=1e-9), strategy.text
    shares = [predict(s, cluster, WORK, slow, free).slowest_share for s in EVERY]
    assert shares[-1] == pytest.approx(0.1 * nodes / (nodes - 1 + 0.1))


def test_nothing_costs_nothing() -> None:
    cluster, free = without_costs(64)
    for strategy in EVERY:
        assert predict(strategy, cluster, WORK, EVEN, free).efficiency == pytest.approx(1.0)


def test_jitter_costs_those_who_wait_the_slowest_of_all() -> None:
    cluster, free = without_costs(128)
    jitter = Stragglers(jitter=0.1)
    waits = predict(Strategy.parse("ddp"), cluster, WORK, jitter, free)
    random = np.random.default_rng(7)
    sigma = math.sqrt(math.log(1.01))
    most = random.lognormal(-(sigma**2) / 2, sigma, (4000, 128)).max(axis=1).mean()
    assert 1 / waits.efficiency == pytest.approx(most, rel=5e-3)
    assert predict(Strategy.parse("adpsgd"), cluster, WORK, jitter, free).efficiency > 0.99


def test_pauses_are_as_often_and_as_long_as_they_are_said_to_be() -> None:
    stragglers = Stragglers(pauses_per_hour=360.0, pause_s=2.0)
    seconds = draw(WORK, stragglers, [0, 0, 1, 1], 40_000, np.random.default_rng(0))
    assert (seconds[:, 0] == seconds[:, 1]).all()
    assert (seconds[:, 0] != seconds[:, 2]).any()
    extra = seconds[:, 0] - WORK.step_s
    # Every tenth second has one; each of them is not part of the time in which they come.
    assert (extra > 0).mean() == pytest.approx(1 - math.exp(-0.05), rel=0.1)
    assert extra.mean() == pytest.approx(0.05 * 2.0, rel=0.1)


PROPERTY = settings(max_examples=25, deadline=None)


@PROPERTY
@given(
    name=st.sampled_from(scale_study.STRATEGIES),
    bandwidth=st.floats(1e7, 1e12),
    more=st.floats(1.0, 100.0),
    gpus=st.sampled_from([8, 24, 64]),
)
def test_more_bandwidth_is_never_slower(name, bandwidth, more, gpus) -> None:
    def with_bandwidth(value: float) -> float:
        return rate(name, Cluster(gpus, 8, INTRA, Link(2e-5, value)))

    # Gossip may meet a step a little sooner or later: what arrives has to be added, too.
    slack = 1e-9 if name.partition(":")[0] in LOCKSTEP else 0.05
    assert with_bandwidth(bandwidth * more) >= with_bandwidth(bandwidth) * (1 - slack)


@PROPERTY
@given(
    name=st.sampled_from(scale_study.STRATEGIES),
    slow=st.floats(1.0, 10.0),
    more=st.floats(1.0, 4.0),
    gpus=st.sampled_from([8, 24, 64]),
)
def test_a_slower_node_never_helps(name, slow, more, gpus) -> None:
    fast, slower = (Stragglers(slow_nodes=(factor,)) for factor in (slow, slow * more))
    slack = 1e-9 if name.partition(":")[0] in LOCKSTEP else 0.01
    assert rate(name, even(gpus), stragglers=slower) <= rate(name, even(gpus), WORK, fast) * (
        1 + slack
    )


@pytest.mark.parametrize("name", [*LOCKSTEP, *GOSSIP])
def test_the_seed_decides(name) -> None:
    stragglers = Stragglers(jitter=0.2, pauses_per_hour=100.0, pause_s=3.0)
    strategy, work = Strategy.parse(name), GossipCosts()

    def at(seed: int) -> object:
        return predict(strategy, even(32), WORK, stragglers, work, steps=60, seed=seed)

    assert at(3) == at(3)
    assert at(3) != at(4)


def test_neighbours_join_even_and_odd_places() -> None:
    assert [neighbours(place, 4) for place in range(4)] == [[1, 3], [0, 2], [1, 3], [0, 2]]
    # Of an odd ring, the two ends are both even, and no neighbours.
    assert [neighbours(place, 3) for place in range(3)] == [[1], [0, 2], [1]]
    assert neighbours(0, 2) == [1]
    assert neighbours(0, 1) == []


def test_exchanges_keep_up_with_updates_or_with_the_network() -> None:
    strategy, stragglers = Strategy.parse("h_adpsgd:8"), EVEN
    fast = predict(strategy, even(64), WORK, stragglers, GossipCosts())
    # A learner that begins has one for each of its updates, one that answers too.
    assert fast.updates_per_exchange == pytest.approx(1.0, abs=0.05)
    slow = Cluster(64, 8, INTRA, Link(2e-5, 0.2e9))
    found = predict(strategy, slow, WORK, stragglers, GossipCosts())
    # Both ways 400 MB at 0.2 GB/s, or twice as long where a neighbour has another: 8 to 16 steps.
    assert 8 < found.updates_per_exchange < 20
    assert found.staleness > 6
    assert rate("ddp", slow) < 0.2 * found.samples_per_s


def test_the_store_is_a_queue() -> None:
    """If a claim takes longer than a step shared by all learners, the store limits them."""
    cluster, free = without_costs(64)
    busy = replace(free, claim_s=0.1)
    found = predict(Strategy.parse("adpsgd"), cluster, WORK, EVEN, busy)
    assert found.samples_per_s == pytest.approx(10 * WORK.samples, rel=0.02)


def test_a_learner_of_several_nodes_waits_for_the_slow_one() -> None:
    cluster, free = without_costs(32)
    run = Gossip(cluster, WORK, Stragglers(slow_nodes=(2.0,)), free, 16, 0)
    run.run(100.0)
    assert [len(learner.ends) for learner in run.learners] == [100, 200]


@pytest.mark.parametrize(
    "text",
    ["ddq", "ddp:3", "local_sgd:0", "local_sgd:x", "hierarchical:2x8", "h_adpsgd:-1", "adpsgd:2"],
)
def test_what_is_no_strategy(text) -> None:
    with pytest.raises(ValueError, match=f"`strategies` must be .* one is '{text}'"):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1.0, 1.0), "`latency_s` must be at least 0"),
        (lambda: Link(0.0, 0.0), "`bytes_per_s` must be positive"),
        (lambda: even(0), "`gpus` must be at least 1"),
        (lambda: replace(WORK, step_s=0.0), "`step_s` must be positive"),
        (lambda: replace(WORK, overlap=1.5), "`overlap` must be a part"),
        (lambda: Stragglers(slow_nodes=(0.5,)), "`slow_nodes` and `slow_link` must be factors"),
        (lambda: rate("hierarchical:2x6,8", even(64)), "groups that divide the 64 GPUs"),
        (lambda: GossipCosts(period=0), "`period` must be at least 1"),
    ],
)
def test_what_makes_no_sense(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_metrics_of_a_run(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [(10, 9.0, 1.0), (20, 1.2, 0.1), (30, 0.9, 0.1), (40, 1.2, 0.1)]
    lines = [
        {"step": step, "step_s": seconds, "data_wait_s": waited, "audio_seconds": 30.0}
        for step, seconds, waited in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen = observe(path)
    own = np.array([1.1, 0.8, 1.1])
    assert seen.step_s == pytest.approx(own.mean())
    assert seen.jitter == pytest.approx(own.std() * math.sqrt(10) / own.mean())
    assert seen.audio_seconds == 30.0
    path.write_text(json.dumps(lines[0]))
    with pytest.raises(ValueError, match="must have two lines"):
        observe(path)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: not a line of metrics"):
        observe(path)


def test_the_script(tmp_path, capsys) -> None:
    made = tmp_path / "scale.csv", tmp_path / "scale.svg"
    options = ["--parameters", "1e8", "--step-s", "0.4", "--slow", "10", "--gpus", "8", "64"]
    options += ["--steps", "40", "--csv", str(made[0]), "--picture", str(made[1])]
    scale_study.main(options)
    shown = capsys.readouterr().out
    assert "Assumed, not measured" in shown
    assert "20 us + 12.5 GB/s" in shown
    assert "a node 10 x slower" in shown
    with made[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(EVERY)
    assert {row["scenario"] for row in rows} == {"all alike", "a node 10 x slower"}
    texts = [text.text for text in ElementTree.parse(made[1]).iter(f"{SVG}text")]
    assert texts.count("h_adpsgd") == 2
    assert texts.count("64 GPUs: %") == 1
    scale_study.main([*options[:9], "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["scenarios"][1]["predictions"][0]["strategy"] == "ddp"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parameters", "1e8"], "`--step-s` must be given"),
        (["--step-s", "1"], "`--model` or `--parameters` must be given"),
    ],
)
def test_what_is_missing(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        scale_study.main(options)


def test_parameters_of_a_published_model() -> None:
    from scale.workload import count_parameters

    assert count_parameters("canary_180m_flash") == (182_643_840, 21)


def measured(path: Path, rows: list[tuple[str, float, float]]) -> Path:
    names = "strategy slowdown rate_mbit nodes per_node base_s micro_batch parameters samples_per_s"
    lines = [names.replace(" ", ",")]
    lines += [f"{name},{slow:g},,4,2,0.3,6,50000,{rate}" for name, slow, rate in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_predictions_are_checked_against_measurements(tmp_path, capsys) -> None:
    """Of 8 processes with steps of 0.3 s and 0.1 s besides."""
    step = 0.3 + 0.1
    rows = [("ddp", 1.0, 47 / step), ("ddp", 1.0, 49 / step), ("ddp", 10.0, 48 / 3.1)]
    # Three nodes as before, and one which is as slow as ddp.
    rows.append(("h_adpsgd:2", 10.0, 36 / step + 12 / 3.1))
    path = measured(tmp_path / "straggler.csv", rows)
    fitted, slow, gossip = check(path)
    assert fitted.fitted
    assert fitted.error == pytest.approx(0.0, abs=1e-9)
    assert fitted.spread == pytest.approx(2 / 48)
    assert abs(slow.error) < 1e-3
    assert abs(gossip.error) < 2e-2
    scale_study.main(["--check", str(path)])
    assert "| ddp | 10 x |" in capsys.readouterr().out
    # With a row of its own, what its steps take besides is its own.
    rows += [("h_adpsgd:2", 1.0, 48 / 0.35), ("h_adpsgd:2", 5.0, 36 / 0.35 + 12 / 1.55)]
    *_, own, slower = check(measured(path, rows))
    assert own.fitted
    assert not slower.fitted
    assert abs(slower.error) < 2e-2


def test_nothing_to_fit_to(tmp_path) -> None:
    path = measured(tmp_path / "straggler.csv", [("ddp", 2.0, 60.0)])
    with pytest.raises(ValueError, match="must have a row of ddp with slowdown 1"):
        check(path)
