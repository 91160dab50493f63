"""Training on the batches of every strategy, and on ranks that cannot share them evenly."""

import numpy as np
import pytest

from effasr import config as configuration
from effasr.data.loader import Loader
from effasr.data.sampling.options import STRATEGIES
from effasr.training.checkpointing.resume import check_same_plan, check_same_ranks
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run

BASELINES = STRATEGIES[1:]


def options(strategy: str) -> dict:
    return {"strategy": strategy} | ({"buckets": 3} if "bucketed" in strategy else {})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_and_validates(make_config, tmp_path, tones, strategy):
    data = options(strategy) | {"validation": str(tones / "test.jsonl")}
    assert run(make_config(data=data, training={"max_steps": 3})) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(np.isfinite(line["loss"]) and line["skipped"] == 0 for line in lines)
    if strategy != "packed":
        assert {line["padding_frames"] for line in lines} == {0.0}
    assert len(read_lines(tmp_path / "run" / "validation.jsonl")) == 1


@pytest.mark.parametrize("strategy", BASELINES)
def test_padded_training_reports_its_padding(make_config, tmp_path, capsys, strategy):
    config = make_config(data=options(strategy) | {"padded": True}, training={"max_steps": 3})
    # Plans are those of the loader, whose padding the metrics must show.
    assert run(config) == 0
    visible = capsys.readouterr().err
    assert f"2 micro-batches a step, {strategy}, padded, each on average" in visible
    corpus = load_corpus(config, find_tokenizer(config, None), None)
    plan = Loader(corpus, config.data, seed=config.seed).plan(0)
    for step, line in enumerate(read_lines(tmp_path / "run" / "metrics.jsonl")[: plan.num_steps]):
        for name in ("frames", "tokens"):
            lengths = getattr(corpus.lengths, name)
            batches = [lengths[batch] for batch in plan.step(step) if len(batch)]
            rows = sum(len(batch) * int(batch.max()) for batch in batches)
            expected = 1 - sum(int(batch.sum()) for batch in batches) / rows
            assert line[f"padding_{name}"] == pytest.approx(expected)


def test_another_table_of_buckets_does_not_go_on(make_config, tmp_path):
    """The path is as before, but not what it holds."""
    table = tmp_path / "buckets.json"
    table.write_text('{"bucket_duration_bins": [[9.9, 99]], "bucket_batch_size": [3]}')
    data = {"strategy": "sync_bucketed_2d", "bucket_batch_sizes": str(table)}
    assert run(make_config(data=data, training={"max_steps": 3})) == 0
    assert run(make_config(data=data, training={"max_steps": 4})) == 0
    table.write_text('{"bucket_duration_bins": [[9.9, 99]], "bucket_batch_size": [4]}')
    with pytest.raises(ValueError, match=r"the plan of epoch 0 must stay .* of which 4 steps"):
        run(make_config(data=data, training={"max_steps": 5}))


def test_only_packed_goes_on_on_another_number_of_ranks():
    saved = {"ranks": 2, "position": (3, 7), "plan": "abc"}
    check_same_ranks(saved, "packed", 3)
    check_same_ranks(saved, "random", 2)
    with pytest.raises(ValueError, match=r"= random needs 2 ranks, .* but has 3: lh"):
        check_same_ranks(saved, "random", 3)
    requested = []
    check_same_plan(saved, lambda epoch: requested.append(epoch) or "abc")
    assert requested == [3]
    with pytest.raises(ValueError, match=r"the plan of epoch 3 must stay .* of which 7 steps"):
        check_same_plan(saved, lambda epoch: "abd")
    # Between two epochs, no plan is under way.
    check_same_plan({"position": (3, 0), "plan": None}, lambda epoch: "abd")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.strategy=packed", "data.padded=true"], "`padded` must be false for strategy"),
        (["data.batch_size=4"], "`batch_size` must be left out for strategy packed"),
        (["data.strategy=bucketd"], "`data.strategy` must be one of .*'bucketd'"),
        (["data.strategy=random", "data.batch_size=0"], "`batch_size` must be greater than 0"),
        *(
            (["data.strategy=bucketed", f"training.{name}=true"], f"`training.{name}` must be fal")
            for name in ("cuda_graph", "compile")
        ),
    ],
)
def test_error_messages(make_config, tmp_path, overrides, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(configuration.dump(make_config()))
    with pytest.raises(ValueError, match=message):
        resolve_config(configuration.load(TrainConfig, recipe, overrides), None)
