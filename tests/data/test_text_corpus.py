import json
import re
from dataclasses import replace

import numpy as np
import pytest

from effasr import config as configuration
from effasr.data.batch import IGNORED
from effasr.data.config import DataConfig
from effasr.data.index.text_corpus import TextCorpus
from effasr.data.manifest.pairs import is_text_only, pairs
from effasr.data.manifest.reader import read
from effasr.data.mixture import MixConfig
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import train_tokenizer
from effasr.nn.experts import ExpertsConfig
from tests.support.corpora import dropped, write_lines

EN = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
DE = ["null", "eins", "zwei", "drei", "vier", "sechs", "sieben", "acht", "neun", "zehn"]


@pytest.fixture(scope="module")
def bilingual(tmp_path_factory):
    rows = [row(n, 4) for n in range(40)]
    texts = {"en": [x["text"] for x in rows], "de": [x["source_text"] for x in rows]}
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer"), vocab_size=40)


def row(index, length):
    words = [(index + step) % 10 for step in range(length)]
    return {
        "source_text": " ".join(DE[word] for word in words),
        "text": " ".join(EN[word] for word in words),
        "source_lang": "de",
        "target_lang": "en",
    }


@pytest.fixture
def manifest(tmp_path):
    return write_lines(tmp_path / "pairs.jsonl", [row(n, 1 + n % 5) for n in range(200)])


def load(path, tokenizer, **options):
    limits = {name: options.pop(name) for name in ("max_positions",) if name in options}
    config = DataConfig(micro_batches=2, text_share=0.5, **options)
    return TextCorpus.load([path], tokenizer, config, token_budget=300, **limits)


def test_a_batch_has_sentences_where_others_have_speech(manifest, bilingual):
    corpus = load(manifest, bilingual)
    assert len(corpus) == 200
    assert not corpus.dropped
    batch = corpus.batch(np.array([3, 7, 11]))
    assert batch.source is not None
    assert batch.frames is batch.source.layout
    sources, tokens = batch.source.unpack()[:3], batch.tokens.unpack()[:3]
    prompt = bilingual.prompt(Prompt("de", "en", "translate"))
    for index, source, written in zip((3, 7, 11), sources, tokens, strict=True):
        expected = row(index, 1 + index % 5)
        assert source[-1] == bilingual.eos_id
        assert bilingual.decode(source.tolist()[:-1]) == expected["source_text"]
        assert written.tolist()[: len(prompt)] == prompt
        assert bilingual.decode(written.tolist()[len(prompt) :]) == expected["text"]
        assert corpus.lengths.frames[index] == len(source)
        assert corpus.lengths.tokens[index] == len(written)
    assert batch.ids[0] == "pairs.jsonl:4"
    counted = (batch.targets != IGNORED).sum()
    assert batch.num_targets == counted == sum(len(t) - len(prompt) + 1 for t in tokens)
    assert (batch.num_monotonic_targets, batch.audio_seconds) == (0, 0.0)
    assert (batch.num_frames, batch.num_tokens) == (sum(map(len, sources)), sum(map(len, tokens)))
    assert batch.text.layout.total == batch.audio.layout.total == 0


def test_epochs_go_on_where_the_last_one_ended(manifest, bilingual):
    corpus = load(manifest, bilingual)
    times = np.zeros(len(corpus), dtype=int)
    for epoch in range(12):
        plan = corpus.plan(epoch, steps=3, micro_batches=1, seed=1)
        assert plan.num_steps in (3, 4)
        np.add.at(times, plan.indices, 1)
        assert np.ptp(times) <= 1
    assert times.min() >= 1


def test_shares_of_text_are_by_tokens(tmp_path, bilingual):
    counts = {"many": 360, "few": 40}
    paths = [
        write_lines(tmp_path / f"{name}.jsonl", [row(n, 4) for n in range(count)])
        for name, count in counts.items()
    ]
    mix = MixConfig(sources={path.stem: str(path) for path in paths}, temperature=0.5)
    config = DataConfig(mix=mix, micro_batches=2, text_share=0.5)
    corpus = TextCorpus.load(paths, bilingual, config, token_budget=300, sources=[0, 1])
    assert corpus.shares.asked == pytest.approx((0.75, 0.25), abs=0.01)
    plan = corpus.plan(0, steps=40, micro_batches=2, seed=0)
    drawn = np.bincount(corpus.sources[plan.indices], corpus.lengths.frames[plan.indices])
    assert drawn / drawn.sum() == pytest.approx(corpus.shares.asked, abs=0.01)


@pytest.fixture
def unlike(tmp_path):
    """Manifests of pairs with much to read and little to write, and the other way round."""
    many = [row(n, 8) | {"text": EN[n % 10]} for n in range(400)]
    few = [row(n, 8) | {"source_text": DE[n % 10]} for n in range(100)]
    manifests = {"read": many, "write": few}
    return [write_lines(tmp_path / f"{name}.jsonl", rows) for name, rows in manifests.items()]


def shares(paths, **fields):
    sources = {path.stem: {"manifests": str(path), "weight": 0.5} for path in paths}
    return configuration.from_mapping(MixConfig, {"sources": sources} | fields)


def test_budgets_and_steps_are_those_of_what_the_shares_draw(unlike, bilingual):
    config = DataConfig(mix=shares(unlike), micro_batches=2, text_share=0.5)
    corpus = TextCorpus.load(unlike, bilingual, config, token_budget=400, sources=[0, 1])
    plan = corpus.plan(0, steps=20, micro_batches=1, seed=0)
    assert plan.num_steps in (20, 21)
    assert plan.padding_tokens < 0.06
    assert plan.padding_frames < 0.06


def test_what_cannot_be_trained_on_is_listed(tmp_path, bilingual):
    rows = [
        row(0, 3),
        row(1, 3) | {"text": " "},
        row(2, 3) | {"source_lang": "fr"},
        row(3, 400),
        row(4, 24),
        row(5, 3) | {"source_text": "中"},
        row(6, 3) | {"id": "seventh"},
    ]
    path = write_lines(tmp_path / "p.jsonl", rows)
    corpus = load(path, bilingual, max_positions=20)
    assert dropped(corpus) == [
        ("p.jsonl:2", "empty_text"),
        ("p.jsonl:3", "unknown_language"),
        ("p.jsonl:4", "over_token_budget"),
        ("p.jsonl:5", "over_model_length"),
        ("p.jsonl:6", "unknown_text"),
    ]
    assert corpus.dropped[0].audio == f"{path}:2"
    assert corpus.batch(np.arange(2)).ids == ("p.jsonl:1", "seventh")
    with pytest.raises(ValueError, match=r"no text pair can be trained on \(5 dropped; the first"):
        load(write_lines(tmp_path / "q.jsonl", rows[1:-1]), bilingual, max_positions=20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_lang": None}, "p.jsonl:2: `source_lang` must be a string, but is None"),
        ({"target_lang": 3}, "p.jsonl:2: `target_lang` must be a string, but is 3"),
        ({"text": None}, "p.jsonl:2: `text` must be a string, but is None"),
        ({"audio_filepath": "a.wav"}, "p.jsonl:2: has audio, but the first line .* has none"),
        ({"task": "transcribe"}, "p.jsonl:2: `target` must be 'de'"),
    ],
)
def test_lines_that_are_no_pairs_are_refused(tmp_path, change, message):
    path = write_lines(tmp_path / "p.jsonl", [row(0, 2), row(1, 2) | change])
    with pytest.raises(ValueError, match=message):
        list(pairs(path))


def test_the_first_line_tells_what_a_manifest_is(manifest, nemo, tmp_path):
    assert is_text_only(manifest)
    assert not is_text_only(nemo(2))
    assert not is_text_only(tmp_path)
    assert not is_text_only(tmp_path / "none")
    both = row(0, 1) | {"audio_filepath": "a.wav"}
    (tmp_path / "both.jsonl").write_text(json.dumps(both))
    assert not is_text_only(tmp_path / "both.jsonl")
    with pytest.raises(ValueError, match=re.escape("pairs.jsonl:1: a text-only line")):
        read(manifest)
    other = row(0, 1)
    other["target_text"] = other.pop("text")
    (tmp_path / "other.jsonl").write_text(json.dumps(other))
    assert next(pairs(tmp_path / "other.jsonl")).text == "zero"


def test_the_language_of_a_line_chooses_the_expert(tmp_path, bilingual):
    named = ExpertsConfig(count=2, route="language", names=("en", "de"))
    languages = ("de", "en", "de")
    rows = [row(n, 2) | {"source_lang": languages[n % 3]} for n in range(6)]
    for line in rows:
        if line["source_lang"] == "en":
            line["source_text"] = line["text"]
    corpus = load(write_lines(tmp_path / "named.jsonl", rows), bilingual)
    assert corpus.batch(np.arange(3)).expert is None
    told = corpus.with_experts(named.number_of)
    batch, nothing = told.batch(np.arange(5)), told.batch(np.arange(0))
    assert batch.expert is not None
    assert nothing.expert is not None
    assert batch.expert[:5].tolist() == [1, 0, 1, 1, 0]
    assert batch.expert.shape == nothing.expert.shape == (corpus.shape.max_sequences,)
    assert corpus.prompt == Prompt("de", "en", "translate")
    english = replace(named, count=1, names=("en",))
    with pytest.raises(ValueError, match=r"language of an utterance must be one of en,.*'de'"):
        corpus.with_experts(english.number_of)
