"""Runs on several sources, each with a share of the hours."""

import json
from pathlib import Path

import pytest

from effasr import config as configuration
from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.resolve import find_tokenizer
from effasr.training.trainer import run
from tests.training.conftest import mix

SEED = 3


def loader(config: TrainConfig, **options) -> Loader:
    tokenizer = find_tokenizer(config, None)
    corpus = load_corpus(config, tokenizer, None)
    return Loader(corpus, config.data, seed=SEED, pin_memory=False, **options)


def test_sources_have_their_shares(make_mixed, tmp_path, capsys):
    assert run(make_mixed()) == 0
    blend = json.loads((tmp_path / "run" / "blend.json").read_text())
    assert blend["step"] == 12
    rows = {row["source"]: row for row in blend["sources"]}
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


@pytest.mark.parametrize("options", [{}, {"strategy": "bucketed", "buckets": 2}])
def test_plans_have_what_the_sources_draw(make_mixed, options):
    loaded = loader(make_mixed(data=options))
    draw = loaded._corpus.populations(SEED)
    for epoch in range(5):
        plan = loaded.plan(epoch)
        assert sorted([*plan.indices, *plan.deferred]) == sorted(draw(epoch))


def test_manifests_may_move_but_shares_must_stay(make_mixed, tmp_path, sources):
    config = make_mixed(training={"max_steps": 2})
    assert run(config) == 0
    (sources / "tiny.jsonl").rename(sources / "renamed.jsonl")
    path = "data.mix.sources.others.sources.tiny.manifests"
    more = "training.max_steps=3"
    moved = [more, f"{path}={sources}/renamed.jsonl"]
    assert run(configuration.load(TrainConfig, _written(config), moved)) == 0
    hotter = [*moved, "data.mix.sources.others.temperature=0.7"]
    with pytest.raises(ValueError, match=r"`data.mix.sources.others.temperature` must stay None"):
        run(configuration.load(TrainConfig, _written(config), hotter))


def test_a_source_of_which_nothing_is_left_is_named(make_mixed, sources):
    lines = (sources / "tiny.jsonl").read_text().splitlines()
    empty = [json.dumps(json.loads(line) | {"text": ""}) for line in lines]
    (sources / "tiny.jsonl").write_text("\n".join(empty) + "\n")
    with pytest.raises(ValueError, match=r"every source must have an utterance .*others/tiny has"):
        loader(make_mixed())


def test_the_budgets_of_tokens_and_nodes_are_those_of_the_blend(make_mixed, sources, tones):
    """A source with much text has more of it in an epoch than in the corpus."""
    config = make_mixed().data
    tokenizer = find_tokenizer(make_mixed(), None)
    lines = (sources / "tiny.jsonl").read_text().splitlines()
    wordy = [json.dumps(json.loads(line) | {"text": "low high " * 4}) for line in lines]
    (sources / "tiny.jsonl").write_text("\n".join(wordy) + "\n")

    def budgets(temperature: float) -> tuple[int, int]:
        data = DataConfig(
            mix=mix(sources, temperature=temperature),
            tokenizer=config.tokenizer,
            frame_budget=200,
        )
        paths, names = zip(*data.manifests, strict=True)
        corpus = Corpus.load(paths, tokenizer, data, ctc=False, transducer=True, sources=names)
        assert corpus.shape.node_budget is not None
        return corpus.shape.token_budget, corpus.shape.node_budget

    for of_equal_shares, of_sizes in zip(budgets(0.0), budgets(1.0), strict=True):
        assert of_equal_shares > 1.05 * of_sizes
