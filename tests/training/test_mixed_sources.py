"""Runs on several sources, each with a share of the hours."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from effasr import config as configuration
from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.data.mixture import MixConfig
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.resolve import find_tokenizer
from effasr.training.trainer import run

SEED = 3


@pytest.fixture
def parts(tones, tmp_path) -> Path:
    """A folder with ``large.jsonl``, ``small.jsonl`` and ``tiny.jsonl``."""
    lines = (tones / "train.jsonl").read_text().replace('"train-', f'"{tones}/train-').splitlines()
    for name, some in (("large", lines[:28]), ("small", lines[28:38]), ("tiny", lines[38:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some) + "\n")
    return tmp_path


def mix(parts: Path, **fields) -> MixConfig:
    below = {"sources": {name: f"{parts}/{name}.jsonl" for name in ("small", "tiny")}}
    sources = {"large": f"{parts}/large.jsonl", "others": below}
    return configuration.from_mapping(MixConfig, {"sources": sources, "temperature": 0.5} | fields)


@pytest.fixture
def make_mixed(make_config, parts):
    def make(*, training: dict | None = None, epoch: str = "infinite", **settings) -> TrainConfig:
        data = {"train": (), "mix": mix(parts, epoch=epoch)}
        return make_config(data=data, training=training, **settings)

    return make


def loader(config: TrainConfig, **options) -> Loader:
    tokenizer = find_tokenizer(config, None)
    corpus = load_corpus(config, tokenizer, None)
    return Loader(corpus, config.data, seed=SEED, pin_memory=False, **options)


def tensors(state: object, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {name: state}
    if isinstance(state, dict):
        return {k: v for key in state for k, v in tensors(state[key], f"{name}.{key}").items()}
    return {}


@pytest.mark.extended
def test_an_interrupted_run_ends_as_one_that_was_left_alone(make_mixed, tmp_path, capsys) -> None:
    straight, stopped = make_mixed(name="straight"), make_mixed(name="stopped")
    assert run(straight) == 0
    assert run(configuration.load(TrainConfig, _written(stopped), ["training.stop_at=7"])) == 0
    assert run(stopped) == 0
    states = [
        RunCheckpoints(tmp_path / name / "checkpoints", 3).newest()[1]
        for name in ("straight", "stopped")
    ]
    ours, theirs = map(tensors, states)
    assert len(ours) > 50
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert states[0]["blend"] == states[1]["blend"]
    blends = [
        json.loads((tmp_path / name / "blend.json").read_text()) for name in ("straight", "stopped")
    ]
    assert blends[0] == blends[1]
    assert blends[0]["step"] == 12
    rows = {row["source"]: row for row in blends[0]["sources"]}
    assert list(rows) == ["large", "others/small", "others/tiny"]
    for row in rows.values():
        assert row["realised"] == pytest.approx(row["asked"], abs=0.1)
    assert rows["others/tiny"]["drawn_utterances"] > 2 * rows["others/tiny"]["utterances"]
    # The table at the start.
    assert "others/tiny" in capsys.readouterr().err


def _written(config: TrainConfig) -> Path:
    path = Path(config.output) / "written.yaml"
    path.write_text(configuration.dump(config))
    return path


def test_another_number_of_ranks_draws_the_same(make_mixed) -> None:
    alone = loader(make_mixed())
    pair = [loader(make_mixed(), rank=rank, world_size=2) for rank in range(2)]
    for ours, first, second in zip(
        alone.steps(1, 1), *(rank.steps(1, 1) for rank in pair), strict=False
    ):
        together = np.concatenate([first.indices, second.indices])
        assert sorted(together) == sorted(ours.indices)
        if ours.epoch == 3:
            return


def test_what_is_drawn_goes_on_in_the_next_epoch(make_mixed) -> None:
    """None is drawn for a third time before all of its source were drawn twice."""
    loaded = loader(make_mixed())
    sources = loaded._corpus.sources
    draw = loaded._corpus.populations(SEED)
    times = np.zeros(len(sources), dtype=int)
    for epoch in range(5):
        plan = loaded.plan(epoch)
        population = draw(epoch)
        assert sorted(plan.indices) == sorted(population)
        np.add.at(times, population, 1)
        for source in range(3):
            assert np.ptp(times[sources == source]) <= 1
    assert times[sources == 2].mean() > 2 * times[sources == 0].mean()


def test_other_strategies_draw_the_same(make_config, parts) -> None:
    config = make_config(
        data={"train": (), "mix": mix(parts), "strategy": "bucketed", "buckets": 2}
    )
    loaded = loader(config)
    draw = loaded._corpus.populations(SEED)
    for epoch in range(3):
        plan = loaded.plan(epoch)
        assert sorted([*plan.indices, *plan.deferred]) == sorted(draw(epoch))


def test_a_full_epoch_draws_each_once(make_mixed) -> None:
    loaded = loader(make_mixed(epoch="full"))
    plans = [loaded.plan(epoch) for epoch in range(4)]
    drawn = np.concatenate([plans[3].deferred, *(plan.indices for plan in plans)])
    assert np.bincount(drawn).tolist() == [4] * 40


def test_manifests_may_move_but_shares_must_stay(make_mixed, tmp_path, parts) -> None:
    config = make_mixed(training={"max_steps": 2})
    assert run(config) == 0
    (parts / "tiny.jsonl").rename(parts / "renamed.jsonl")
    path = "data.mix.sources.others.sources.tiny.manifests"
    more = "training.max_steps=3"
    moved = [more, f"{path}={parts}/renamed.jsonl"]
    assert run(configuration.load(TrainConfig, _written(config), moved)) == 0
    hotter = [*moved, "data.mix.sources.others.temperature=0.7"]
    with pytest.raises(ValueError, match=r"`data.mix.sources.others.temperature` must stay None"):
        run(configuration.load(TrainConfig, _written(config), hotter))


def test_a_source_of_which_nothing_is_left_is_named(make_mixed, parts) -> None:
    lines = (parts / "tiny.jsonl").read_text().splitlines()
    empty = [json.dumps(json.loads(line) | {"text": ""}) for line in lines]
    (parts / "tiny.jsonl").write_text("\n".join(empty) + "\n")
    with pytest.raises(ValueError, match=r"every source must have an utterance .*others/tiny has"):
        loader(make_mixed())


def test_the_budgets_of_tokens_and_nodes_are_those_of_the_blend(make_mixed, parts, tones) -> None:
    """A source with much text has more of it in an epoch than in the corpus."""
    config = make_mixed().data
    tokenizer = find_tokenizer(make_mixed(), None)
    lines = (parts / "tiny.jsonl").read_text().splitlines()
    wordy = [json.dumps(json.loads(line) | {"text": "low high " * 4}) for line in lines]
    (parts / "tiny.jsonl").write_text("\n".join(wordy) + "\n")

    def budgets(temperature: float) -> tuple[int, int]:
        own = DataConfig(
            mix=mix(parts, temperature=temperature),
            tokenizer=config.tokenizer,
            frame_budget=200,
        )
        paths, sources = zip(*own.manifests, strict=True)
        corpus = Corpus.load(paths, tokenizer, own, ctc=False, transducer=True, sources=sources)
        assert corpus.shape.node_budget is not None
        return corpus.shape.token_budget, corpus.shape.node_budget

    for of_equal_shares, of_sizes in zip(budgets(0.0), budgets(1.0), strict=True):
        assert of_equal_shares > 1.05 * of_sizes
