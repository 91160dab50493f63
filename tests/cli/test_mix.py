"""Sources with shares, and text beside speech, as a user meets them."""

import json
from pathlib import Path

import pytest
import yaml

from effasr.checkpoint import load_model, resolve
from tests.cli.conftest import write_rows


@pytest.fixture
def recipe(workplace, corpus_rows, tmp_path, effasr):
    """Two sources of speech and one of text, and a tokenizer of all."""
    read = write_rows(tmp_path / "read.jsonl", corpus_rows[:18])
    wild = write_rows(tmp_path / "wild.jsonl", corpus_rows[18:])
    languages = {"source_lang": "de", "target_lang": "en"}
    texts = [row["text"] for row in corpus_rows]
    pairs = [{"source_text": text.upper(), "text": text, **languages} for text in texts]
    path = write_rows(tmp_path / "pairs.jsonl", pairs)
    outcome = effasr("tokenizer", read, path, tmp_path / "tok", "--vocab-size=30")
    assert outcome.code == 0, outcome
    config = yaml.safe_load(Path(workplace.recipe).read_text())
    config["output"] = str(tmp_path / "runs")
    config["model"]["text_encoder"] = {"layers": 1, "heads": 2, "feed_forward": 16}
    english = {"temperature": 0.5, "sources": {"read": str(read), "wild": [str(wild)]}}
    config["data"] |= {
        "mix": {"sources": {"en": english, "de_en": str(path)}},
        "tokenizer": str(tmp_path / "tok"),
        "text_share": 0.5,
    }
    del config["data"]["train"]
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "mixed.yaml"


def test_a_recipe_with_sources_trains_and_says_what_it_draws(effasr, recipe, tmp_path):
    outcome = effasr("train", recipe)
    assert outcome.code == 0, outcome
    assert "en/wild" in outcome.err
    blend = json.loads((tmp_path / "runs" / "first" / "blend.json").read_text())
    assert [row["source"] for row in blend["sources"]] == ["en/read", "en/wild", "de_en"]
    written = yaml.safe_load((tmp_path / "runs" / "first" / "config.yaml").read_text())
    assert written["data"]["mix"]["sources"]["en"]["sources"]["wild"]["weight"] is None
    loaded = load_model(resolve(tmp_path / "runs" / "first"))
    assert loaded.model.text_encoder is not None
    assert loaded.tokenizer.languages == ("de", "en")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.mix.sources.en.temprature=1", "did you mean `temperature`?"),
        ("data.text_share=null", "`data.text_share` must be given where a manifest is text-only"),
        ("model.text_encoder=null", "`model.text_encoder` must be given for text-only batches"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(effasr, recipe, override, message):
    outcome = effasr("train", recipe, override)
    assert outcome.code == 2
    assert message in outcome.error


def test_text_alone_is_for_training_only(effasr, recipe, tmp_path, workplace):
    pairs = tmp_path / "pairs.jsonl"
    outcome = effasr("evaluate", "--run", workplace.run, "--manifest", pairs)
    assert "only training reads such manifests" in outcome.error
