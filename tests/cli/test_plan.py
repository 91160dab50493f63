"""`effasr plan`: what batches a corpus makes, for people and for programs."""

import dataclasses
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from effasr import config as configuration
from effasr.cli.plan import _STRATEGIES
from effasr.data.loader import Loader
from effasr.data.sampling.options import STRATEGIES
from effasr.data.tokenizer import load_tokenizer
from effasr.model.cost import cost_model
from effasr.training.calibration.calibrate import LinearModel
from effasr.training.calibration.store import Calibration
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.run_dir.run_directory import read_lines
from tests.cli.conftest import write_rows

RATIOS = (
    "padding_frames", "padding_tokens", "padding_flops", "padding_cells", "rank_imbalance_mean",
    "rank_imbalance_p99",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Durations as those of read speech: 3,000 utterances, of which two are too long."""
    generator = np.random.default_rng(0)
    seconds = np.minimum(generator.lognormal(1.8, 0.6, 3000), 35.0).round(2)
    seconds[[7, 9]] = 41.0
    rows = (
        {"id": f"u{n}", "duration": s, "num_tokens": 1 + int(3.5 * s * generator.uniform(0.7, 1.3))}
        for n, s in enumerate(seconds.tolist())
    )
    return write_rows(tmp_path_factory.mktemp("plan") / "corpus.jsonl", rows)


def test_the_json_has_what_was_agreed(effasr, corpus):
    done = effasr("plan", "--manifest", corpus, "--frame-budget", 2000, "--world-size", 8, "--json")
    assert done.code == 0
    assert done.err == ""
    made = json.loads(done.out)
    for name in RATIOS:
        assert 0 <= made[name] < 0.02, name
    assert made["padding_frames"] <= 0.005
    assert made["rank_imbalance_p99"] <= 0.005
    assert made["dropped"] == {"too_long": 2, "total": 2}
    assert (made["strategy"], made["world_size"], made["micro_batches"]) == ("packed", 8, 8)
    assert made["utterances"] == 2998
    assert made["planned"] + made["deferred"] == 2998
    assert made["batch_utterances"] * made["steps"] * 8 == pytest.approx(made["planned"])
    assert 0 < 160 - made["batch_audio_seconds"] < 2
    assert made["bucket_mismatch"] is None
    assert made["estimated_tokens"] == 0
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in made.values())


def test_what_a_person_reads(effasr, corpus, tmp_path):
    listed = tmp_path / "dropped.jsonl"
    done = effasr(
        "plan", "--manifest", corpus, "--strategy", "all", "--frame-budget", 2000,
        "--dropped", listed, "--picture", tmp_path / "p.svg",
    )  # fmt: skip
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("2,998 utterances, 5.")
    rows = [line for line in lines if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    assert [row.split()[1] for row in rows[2:]] == [
        "random", "bucketed", "sync_bucketed", "sync_bucketed_2d", "packed",
    ]  # fmt: skip
    assert max(map(len, lines)) <= 140
    assert f"dropped 2 utterances (0.07 %): too_long 2; each listed in {listed}" in lines
    assert lines[-1].startswith("Train with data.strategy=packed: random batches, padded, ")
    drops = read_lines(listed)
    assert [(x["id"], x["reason"]) for x in drops] == [("u7", "too_long"), ("u9", "too_long")]
    assert drops[0]["details"] == "41.000 s, over `max_duration` 40 s"
    picture = ElementTree.parse(tmp_path / "p.svg").getroot()
    texts = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "Padding of corpus" in texts
    assert texts.count("sync_bucketed_2d") == 1


def test_what_if_has_the_figures_of_the_planner(effasr, corpus, tmp_path):
    common = ("--manifest", corpus, "--frame-budget", 2000, "--world-size", 4, "--json")
    made = json.loads(effasr("plan", *common, "--what-if", "--tflops", 100).out)
    assert [*made] == ["random, fixed size", "bucketed, fixed size", *STRATEGIES[1:], "packed"]
    size = 2000 // 438  # 35 s are 438 frames
    for name, figures in made.items():
        strategy, *fixed = name.split(", ")
        options = ("--batch-size", size) if fixed else ()
        planned = json.loads(effasr("plan", *common, "--strategy", strategy, *options).out)
        for field in ("batch_utterances", "batch_audio_seconds", "padding_flops"):
            assert figures[field] == planned[field], (name, field)
        assert 0 < figures["memory"] <= 1.01
        audio_s = planned["batch_audio_seconds"] * 4
        step_s = 3 * planned["step_flops"] * (1 + planned["rank_imbalance_mean"]) / 4 / 100e12
        hours = planned["hours"] / audio_s * step_s
        assert figures["hours"] == pytest.approx(hours, rel=1e-4)
        assert figures["gpu_hours"] == pytest.approx(4 * hours, rel=1e-4)
        assert figures["relative_time"] == pytest.approx(hours / made["packed"]["hours"], rel=1e-3)
        wanted = 4 * made["packed"]["batch_audio_seconds"] / figures["batch_audio_seconds"]
        assert wanted <= figures["gpus_for_batch"] + 1e-5 < wanted + 1 + 1e-4
    assert made["bucketed, fixed size"]["memory"] < 0.5 < made["bucketed"]["memory"]


def test_what_if_for_people_and_with_a_calibration(effasr, corpus, tmp_path):
    content = {field.name: None for field in dataclasses.fields(Calibration)}
    content |= {"frame_budget": 1500, "token_budget": 900}
    content["speed_model"] = dataclasses.asdict(LinearModel(0.5, 1e-3))
    file = tmp_path / "calibration.json"
    file.write_text(Calibration(**content).to_json())
    done = effasr(
        "plan", corpus, "--what-if", "--calibration", file, "--world-size", 2, "--buckets", 10,
        "--dropped", tmp_path / "dropped.jsonl",
        "--picture", tmp_path / "p.svg",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "each 1,500 frames (120 s) and 900 tokens" in done.out
    lines = done.out.splitlines()
    (packed,) = (line.split("|") for line in lines if line.startswith("| packed "))
    # A micro-batch is nearly full: 0.5 s and a millisecond for each of 1,500 frames.
    corpus_h = float(lines[0].split(", ")[1].split(" h")[0].replace(",", ""))
    assert float(packed[-3]) == pytest.approx(corpus_h * 2.0 / (2 * float(packed[3])), rel=0.02)
    assert "time as calibrated" in lines[-1]
    assert "Batches of corpus at equal memory" in (tmp_path / "p.svg").read_text()
    assert [x["id"] for x in read_lines(tmp_path / "dropped.jsonl")] == ["u7", "u9"]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (("--frame-budget", "2000"), "No change is needed: train with these budgets."),
        (("--strategy", "random"), "Plan with --strategy all to see what packed saves: up to "),
        (("--max-duration", "5"), "Look at the dropped utterances first: too_long drops "),
        (("--frame-budget", "2000", "--token-budget", "900"), "Leave --token-budget out: this "),
        (("--frame-budget", "30000"), "Steps are large for this corpus, and "),
        (("--frame-budget", "60000"), "The corpus fills no more than one step, and that not well"),
        (("--frame-budget", "2000", "--micro-batches", "4"), "8 ranks cannot share 4 micro-batch"),
    ],
)
def test_it_says_what_to_do(effasr, corpus, options, advice):
    done = effasr("plan", "--manifest", corpus, "--world-size", 8, *options)
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith(advice), done.out


def test_a_recipe_gives_manifests_budgets_and_tokenizer(effasr, workplace):
    made = json.loads(effasr("plan", "--recipe", workplace.recipe, "--world-size", 2, "--json").out)
    assert (made["model"], made["frame_budget"], made["micro_batches"]) == ("first", 60, 2)
    assert made["utterances"] == 24
    assert made["estimated_tokens"] == 0
    trained = [line for line in read_lines(workplace.run / "metrics.jsonl") if line["epoch"] == 0]
    assert made["steps"] == len(trained)
    for name in ("padding_frames", "padding_tokens"):
        assert made[name] == pytest.approx(np.mean([line[name] for line in trained])), name
    over = ("--frame-budget", 80, "--manifest", workplace.folder / "dev.jsonl")
    made = json.loads(effasr("plan", "--recipe", workplace.recipe, *over, "--json").out)
    assert (made["frame_budget"], made["utterances"], made["micro_batches"]) == (80, 4, 2)


def test_a_recipe_says_how_an_epoch_ends(effasr, workplace, tmp_path):
    recipe = Path(workplace.recipe).read_text()
    path = tmp_path / "exact.yaml"
    path.write_text(recipe.replace("data:\n", "data:\n  epoch_end: exact\n", 1))
    plan = ("plan", "--world-size", 2, "--json", "--recipe")
    made, over = (
        json.loads(effasr(*plan, path, *provided).out)
        for provided in ((), ("--epoch-end", "carry"))
    )
    assert made["deferred"] == 0
    assert over["deferred"] > 0


def test_manifests_of_text_alone_are_left_out(effasr, workplace, tmp_path):
    pair = {"source_text": "one", "text": "two", "source_lang": "en", "target_lang": "en"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    recipe = Path(workplace.recipe).read_text()
    train = f"train: {workplace.folder}/train"
    assert train in recipe
    both = f"text_share: 0.5\n  train: [{workplace.folder}/train, {tmp_path}/pairs.jsonl]"
    path = tmp_path / "text.yaml"
    path.write_text(recipe.replace(train, both))
    done = effasr("plan", "--recipe", path, "--world-size", 1, "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    # Of two micro-batches one is of text.
    assert (made["utterances"], made["micro_batches"]) == (24, 1)


def test_shares_of_sources_are_planned_as_they_are_trained_on(
    effasr, workplace, corpus_rows, tmp_path
):
    read = write_rows(tmp_path / "read.jsonl", corpus_rows[:20])
    wild = write_rows(tmp_path / "wild.jsonl", corpus_rows[20:])
    recipe = yaml.safe_load(Path(workplace.recipe).read_text())
    del recipe["data"]["train"]
    sources = {"read": str(read), "wild": {"manifests": str(wild), "weight": 0.75}}
    recipe["data"]["mix"] = {"sources": sources, "epoch_hours": 0.1}
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(recipe))
    planned = effasr("plan", "--recipe", path, "--world-size", 1, "--json")
    assert planned.code == 0, planned
    result = json.loads(planned.out)
    read, wild = result["sources"]
    assert (read["source"], wild["source"]) == ("read", "wild")
    assert (read["asked"], wild["asked"]) == (0.25, 0.75)
    assert wild["realised"] == pytest.approx(0.75, abs=0.02)
    assert result["planned"] == read["drawn_utterances"] + wild["drawn_utterances"]
    config = configuration.load(TrainConfig, path, [])
    corpus = load_corpus(config, load_tokenizer(config.data.tokenizer), None)
    assert result["token_budget"] == corpus.shape.token_budget
    cost = cost_model(config.model, load_tokenizer(config.data.tokenizer).vocab_size)
    plan = Loader(corpus, config.data, seed=config.seed, pin_memory=False, cost=cost).plan(0)
    assert result["steps"] == plan.num_steps
    assert corpus.summaries(plan)[0].mapping() == result["sources"]
    for strategy in ("random", "all"):
        visible = effasr("plan", "--recipe", path, "--world-size", 1, "--strategy", strategy)
        assert visible.code == 0, visible
        assert "Sources (data.mix), of which an epoch of " in visible.out
    # Manifests in their place have no shares.
    provided = ("--manifest", workplace.folder / "train", "--world-size", 1)
    plain = effasr("plan", "--recipe", path, *provided)
    assert plain.code == 0
    assert "Sources" not in plain.out


def test_text_needs_no_tokenizer_and_says_so(effasr, workplace):
    manifest = workplace.folder / "train"
    done = effasr("plan", "--manifest", manifest, "--frame-budget", 60, "--world-size", 1)
    assert "tokens of 24 utterances are estimated from texts, 3 bytes each" in done.out
    exact = ("--tokenizer", workplace.folder / "tokenizer", "--manifest", manifest)
    done = effasr("plan", *exact, "--frame-budget", 60, "--world-size", 1)
    assert done.code == 0
    assert "estimated" not in done.out


def test_a_strategy_that_plans_no_utterance_has_no_figures(effasr, tmp_path):
    """Buckets of one utterance fill no micro-batch; 0 % would look better than all others."""
    rows = [{"id": f"u{n}", "duration": 2 + n / 100, "num_tokens": 10} for n in range(25)]
    path = write_rows(tmp_path / "few.jsonl", rows)
    options = "--manifest", path, "--strategy", "all", "--frame-budget", 8000
    made = json.loads(effasr("plan", *options, "--json").out)
    assert made["bucketed"]["deferred"] == 25
    row = next(line for line in effasr("plan", *options).out.splitlines() if "| bucketed" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["bucketed", *[""] * 10, str(made["bucketed"]["steps"]), "25"]


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "two utterances or more to compare strategies, but is 1: plan --strategy packed"),
        (2, "must have utterances for a batch of each strategy, but 2 make none of bucketed"),
        (8, None),
    ],
)
def test_what_if_of_few_utterances(effasr, tmp_path, count, message):
    rows = [{"id": f"u{n}", "duration": 2 + n, "num_tokens": 10} for n in range(count)]
    result = effasr("plan", write_rows(tmp_path / "few.jsonl", rows), "--what-if")
    assert message in result.error if message else "packed" in result.out


def test_choices_are_the_strategies_that_there_are():
    assert set(_STRATEGIES) == {*STRATEGIES, "all"}
