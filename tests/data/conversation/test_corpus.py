import json

import numpy as np
import pytest
import soundfile

from effasr.data.config import DataConfig
from effasr.data.conversation.corpus import load_conversation_corpus
from effasr.data.conversation.rows import CLIP
from effasr.data.filters.config import FilterConfig
from effasr.data.loader import Loader
from effasr.data.mixture import MixConfig
from effasr.data.sampling.cost import CANARY_180M_FLASH
from effasr.data.sampling.report import measure
from effasr.data.tokenizer import load_tokenizer
from tests.support.chat_folder import THINKING, write_tokenizer
from tests.support.talks import WORDS, write_talks

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    return [str(path) for path in write_talks(tmp_path_factory.mktemp("talks"))]


def load(paths, tokenizer, **settings):
    config = DataConfig(**{"frame_budget": 60, "workers": 0, "cache": None, **settings})
    sources = list(range(len(paths))) if config.mix is not None else None
    return config, load_conversation_corpus(paths, tokenizer, config, stack=4, sources=sources)


def test_every_conversation_is_loaded_with_its_speech(talks, tokenizer):
    _config, corpus = load(talks, tokenizer)
    assert len(corpus) == 20
    assert not corpus.dropped
    for index in range(len(corpus)):
        example = corpus.example(index)
        batch = corpus.collate([example], None)
        assert batch.frame_lengths == (corpus.lengths.frames[index],)
        assert batch.token_lengths == (corpus.lengths.tokens[index],)
        assert len(example.clips) == (example.rows == CLIP).sum()
        assert sum(map(len, example.clips)) == corpus.samples[index]
    assert [len(corpus.clips(index)) for index in (0, 1, 12)] == [2, 1, 0]
    assert corpus.name(0) == "s0"
    assert corpus.audio(1).path.endswith("s1.wav")


def test_text_alone_needs_a_token_budget(talks, tokenizer):
    with pytest.raises(ValueError, match=r"data\.token_budget"):
        load(talks[1:], tokenizer)
    _, corpus = load(talks[1:], tokenizer, token_budget=80)
    assert corpus.shape.frame_budget == 1
    assert corpus.max_clips == 1
    assert corpus.collate([corpus.example(0)], corpus.shape).num_targets > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "bucketed"},
        {"speed_perturbation": (0.9, 1.0)},
        {"text_share": 0.5, "micro_batches": 2},
    ],
)
def test_settings_for_utterances_are_refused(talks, tokenizer, settings):
    with pytest.raises(ValueError, match=f"data.{next(iter(settings))}"):
        load(talks, tokenizer, **settings)


def test_a_conversation_has_an_example_for_each_answer_where_the_template_needs_it(
    tmp_path, tokenizer
):
    turns = []
    for number, seconds in enumerate((0.5, 1.0, 4.0)):
        soundfile.write(tmp_path / f"{number}.wav", np.full(int(16_000 * seconds), 0.1), 16_000)
        turns += [
            {"role": "user", "content": [{"type": "audio", "audio": f"{number}.wav"}]},
            {"role": "assistant", "content": WORDS[number]},
        ]
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"id": "talk", "messages": turns}))
    thinking = load_tokenizer(write_tokenizer(tmp_path / "thinking", THINKING))
    settings = {"frame_budget": 30, "filters": FilterConfig(max_dropped=1.0)}
    _, corpus = load([str(path)], thinking, **settings)
    assert corpus.divided == 1
    assert list(map(corpus.name, range(len(corpus)))) == ["talk-answer-1", "talk-answer-2"]
    (dropped,) = corpus.dropped
    assert (dropped.id, dropped.reason) == ("talk-answer-3", "over_frame_budget")
    assert dropped.duration == 5.5
    assert [len(corpus.clips(index)) for index in range(2)] == [1, 2]
    for index, seconds in enumerate((0.5, 1.5)):
        example = corpus.example(index)
        assert corpus.duration(index) == seconds == sum(map(len, example.clips)) / 16_000
        batch = corpus.collate([example], None)
        assert batch.token_lengths == (corpus.lengths.tokens[index],)
        words = thinking.decode([~x for x in example.rows.tolist() if x < 0 and x != CLIP])
        assert words == WORDS[index]
    _, whole = load([str(path)], tokenizer, frame_budget=80)
    assert (len(whole), whole.divided) == (1, 0)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Speech of the lengths of read books, and short and long texts."""
    folder, random = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    soundfile.write(folder / "long.flac", random.normal(0, 0.1, 16_000 * 40), 16_000)

    def words(count):
        return " ".join(random.choice(WORDS, count))

    def rows(name, count, content, mean):
        for number in range(count):
            turns = [
                {"role": "user", "content": content()},
                {"role": "assistant", "content": words(1 + random.poisson(mean))},
            ]
            yield {"id": f"{name}{number}", "messages": turns}

    def speech():
        seconds = round(float(np.clip(random.lognormal(2.2, 0.6), 0.5, 39)), 2)
        part = {"type": "audio", "audio": "long.flac", "offset": 0.5, "duration": seconds}
        return [part, {"type": "text", "text": "what is said"}]

    paths = []
    for name, result in (
        ("speech", rows("s", 1500, speech, 20)),
        ("text", rows("t", 1400, lambda: words(1 + random.poisson(25)), 20)),
    ):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in result))
    return [str(path) for path in paths]


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_mixed_data_leaves_little_padding_at_8000_frames(mixed, tokenizer, temperature):
    mix = None
    if temperature is not None:
        sources = {"speech": mixed[0], "text": mixed[1]}
        mix = MixConfig(sources=sources, temperature=temperature)
    config, corpus = load(mixed, tokenizer, mix=mix, frame_budget=8000)
    assert not corpus.dropped
    loader = Loader(corpus, config, seed=0)
    plans = [loader.plan(epoch) for epoch in range(3)]
    options = {"cost": CANARY_180M_FLASH, "world_size": 1, "shape": corpus.shape}
    report = measure(plans, corpus.lengths, corpus.samples / 16_000, **options)
    assert report.steps >= 50
    for drawn in corpus.summaries(plans[0]):
        assert len(drawn.rows) == 2
        for row in drawn.rows:
            assert row.realised == pytest.approx(row.asked, abs=0.01)
    assert 0 <= report.padding_frames < 0.005, report
    assert 0 <= report.padding_tokens < 0.005, report
