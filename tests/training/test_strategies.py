"""Training on the batches of every strategy, and on ranks that cannot share them evenly."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from effasr import config as configuration
from effasr.data.batch import IGNORED
from effasr.data.collate import Example, collate
from effasr.data.loader import Loader
from effasr.data.sampling.options import STRATEGIES
from effasr.model.asr import ASRModel
from effasr.training.checkpointing.resume import check_same_plan, check_same_ranks
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.training.conftest import without_randomness
from tests.training.test_exactness import assert_same_end

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
    tokenizer = find_tokenizer(config, None)
    corpus = load_corpus(config, tokenizer, None)
    plan = Loader(corpus, config.data, seed=config.seed).plan(0)
    for step, line in enumerate(read_lines(tmp_path / "run" / "metrics.jsonl")[: plan.num_steps]):
        for name in ("frames", "tokens"):
            lengths = getattr(corpus.lengths, name)
            batches = [lengths[batch] for batch in plan.step(step) if len(batch)]
            rows = sum(len(batch) * int(batch.max()) for batch in batches)
            expected = 1 - sum(int(batch.sum()) for batch in batches) / rows
            assert line[f"padding_{name}"] == pytest.approx(expected)


def test_padded_losses_are_those_of_real_targets_after_padding_by_hand(model_config):
    """Audio is padded by hand, one utterance at a time, and nothing but the text is given."""
    torch.manual_seed(0)
    # Batch norm would mix utterances in training.
    model = ASRModel(without_randomness(model_config), 12).eval()
    generator = np.random.default_rng(0)
    examples = [
        Example(
            str(n),
            generator.normal(size=samples).astype(np.float32),
            [2, 3],
            generator.integers(4, 12, size=length).tolist(),
            monotonic=n != 1,
        )
        for n, (samples, length) in enumerate([(9_000, 7), (16_000, 2), (4_000, 1)])
    ]
    padded = model(collate(examples, eos_id=1, pad_id=0, padded=True))
    cross_entropy, ctc = [], []
    for example in examples:
        silent = replace(example, audio=np.pad(example.audio, (0, 16_000 - len(example.audio))))
        alone = model(collate([silent], eos_id=1, pad_id=0))
        cross_entropy.append(alone.cross_entropy.item())
        ctc.append(alone.ctc.item())
    assert padded.cross_entropy.item() == pytest.approx(sum(cross_entropy), rel=1e-5)
    assert padded.ctc.item() == pytest.approx(sum(ctc), rel=1e-5)
    # Silence counts, as it does where nobody masks it.
    exact = model(collate(examples, eos_id=1, pad_id=0))
    assert abs(exact.cross_entropy.item() / padded.cross_entropy.item() - 1) > 1e-4
    assert (collate(examples, eos_id=1, pad_id=0, padded=True).targets != IGNORED).sum() == 13


@pytest.mark.parametrize("strategy", ["random", "sync_bucketed_2d"])
@pytest.mark.representative(strategy="random")
def test_a_stopped_run_of_a_baseline_goes_on_where_it_was(make_config, tmp_path, strategy):
    data = options(strategy) | {"padded": True}
    assert run(make_config(name="straight", data=data)) == 0
    for stop_at in (6, None):
        assert run(make_config(data=data, training={"stop_at": stop_at})) == 0
    assert_same_end(tmp_path / "run", tmp_path / "straight", 12)
    with pytest.raises(ValueError, match=r"`data\.strategy` must stay .* but is 'packed'"):
        run(make_config())
    with pytest.raises(ValueError, match=r"`data\.padded` must stay True"):
        run(make_config(data=data | {"padded": False}))


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
