"""Utterances without text: read, planned and packed where a recipe wants them."""

import gzip

import numpy as np
import pytest
from lhotse import CutSet

from effasr.data.batch import IGNORED, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.config import DataConfig
from effasr.data.loader import Loader
from effasr.data.manifest.reader import iterate, read
from effasr.planning.listing import read_listing, select
from tests.support.corpora import dropped, load_corpus, read_lines, write_lines, write_tone

SHAPE = StaticShape(frame_budget=40, token_budget=30, max_sequences=5)


@pytest.fixture
def half(nemo):
    """A manifest of ten lines; every other one has no text: missing, null or empty."""
    rows = read_lines(nemo(10))
    for number, row in enumerate(rows):
        if number % 2:
            row["text"] = [None, ""][number // 2 % 2]
        if number == 1:
            del row["text"]
    return write_lines(nemo(10).parent / "half.jsonl", rows)


def test_a_line_without_text_is_still_an_error_where_texts_are_required(half, tokenizer):
    with pytest.raises(ValueError, match=r"leaves out 4 of 10 utterances"):
        load_corpus(half, tokenizer)


def test_ignored_texts_leave_frames_alone(half, nemo, tokenizer):
    corpus = load_corpus(half, tokenizer, text="ignored")
    assert len(corpus) == 10
    assert not corpus.dropped
    assert not corpus.lengths.tokens.any()
    assert corpus.shape.token_budget == 1
    assert not corpus.monotonic.any()
    example = corpus.example(0)
    assert (example.text, example.reserved) == (None, 0)
    whole = load_corpus(nemo(10), tokenizer, text="ignored")
    assert whole.fingerprint == corpus.fingerprint
    assert load_corpus(nemo(10), tokenizer).fingerprint != whole.fingerprint


def test_batches_without_tokens_have_one_shape_and_count_frames(half, tokenizer):
    corpus = load_corpus(half, tokenizer, text="ignored")
    config = DataConfig(train=str(half), frame_budget=60, text="ignored", workers=0)
    loader = Loader(corpus, config, seed=0)
    steps = loader.steps(0, 0)
    batches = [next(steps).batches[0] for _ in range(loader.plan(0).num_steps)]
    steps.close()
    names = [name for batch in batches for name in batch.ids]
    assert len(names) == len(set(names)) >= 5
    for batch in batches:
        assert batch.tokens.values.shape == (1,)
        assert batch.tokens.layout.total == batch.text.layout.total == 0
        assert (batch.targets == IGNORED).all()
        assert batch.is_untranscribed
        assert batch.num_targets == batch.num_frames > 0
        assert batch.num_monotonic_targets == 0
        assert not batch.monotonic.any()
        assert batch.label_room is None
    assert {batch.frames.rows for batch in batches} == {60}


def test_room_for_labels_is_planned_by_duration(half, tokenizer):
    corpus = load_corpus(half, tokenizer, text="optional", frame_budget=100)
    has_text = corpus.monotonic
    assert has_text.tolist() == [True, False] * 5
    seconds = corpus.samples / 16_000
    rate = 1.25 * (corpus.text_lengths[has_text] / seconds[has_text]).max()
    room = np.minimum(np.ceil(rate * seconds) + 1, corpus.lengths.frames)
    assert (corpus.lengths.tokens[~has_text] == room[~has_text]).all()
    assert corpus.example(1).reserved == room[1]
    assert corpus.example(1).text is None
    assert corpus.example(0).text
    fixed = load_corpus(
        half, tokenizer, text="optional", frame_budget=100, label_tokens_per_second=2.0
    )
    assert fixed.example(1).reserved == min(np.ceil(2 * seconds[1]) + 1, corpus.lengths.frames[1])


def test_room_must_be_given_where_no_line_has_a_text(nemo, tokenizer):
    rows = [row | {"text": ""} for row in read_lines(nemo(4))]
    path = write_lines(nemo(4).parent / "none.jsonl", rows)
    with pytest.raises(ValueError, match="`label_tokens_per_second` must be given"):
        load_corpus(path, tokenizer, text="optional")
    provided = load_corpus(path, tokenizer, text="optional", label_tokens_per_second=5.0)
    assert len(provided) == 4


def test_nobody_labels_a_translation(nemo, tokenizer):
    rows = read_lines(nemo(10))
    rows[2] |= {"text": "", "source_lang": "en", "target_lang": "de"}
    path = write_lines(nemo(10).parent / "translation.jsonl", rows)
    assert dropped(load_corpus(path, tokenizer, text="optional")) == [("u2", "empty_text")]


def test_a_batch_reserves_rows_for_labels():
    noise = np.random.default_rng(0).normal(size=9_000).astype(np.float32)
    examples = [
        Example("a", noise, [2, 3], [4, 5]),
        Example("b", noise, [], None, reserved=7),
        Example("c", noise, [2], [6], monotonic=False),
    ]
    batch = collate(examples, SHAPE, eos_id=1, pad_id=0)
    assert batch.label_room is not None
    assert batch.label_room.tolist() == [0, 7, 0, 0, 0]
    assert batch.tokens.layout.lengths == (4, 0, 2, 0, 0)
    assert batch.text.layout.lengths == (2, 0, 0, 0, 0)
    assert batch.monotonic.tolist() == [True, False, False, False, False]
    assert (batch.num_targets, batch.num_monotonic_targets) == (5, 3)
    assert not batch.is_untranscribed
    assert batch.to("cpu").label_room is not None
    full = [Example(str(n), noise[:1300], [], None, reserved=11) for n in range(3)]
    with pytest.raises(ValueError, match="`token_budget` = 30, but fills 33"):
        collate(full, SHAPE, eos_id=1, pad_id=0)


def test_every_kind_of_manifest_may_lack_texts(half, tmp_path):
    def texts(path):
        return {cut.id: cut.supervisions[0].text for cut in iterate(path, untranscribed=True)}

    cuts = list(iterate(half, untranscribed=True))
    assert [cut.supervisions[0].text == "" for cut in cuts] == [False, True] * 5
    bare = [cut.drop_supervisions() if n % 2 else cut for n, cut in enumerate(cuts)]
    CutSet.from_cuts(bare).to_file(tmp_path / "cuts.jsonl")
    assert texts(tmp_path / "cuts.jsonl") == texts(half)
    with pytest.raises(ValueError, match="must have one supervision, but has 0"):
        read(tmp_path / "cuts.jsonl")

    audio = [write_tone(tmp_path / f"folder/{name}.wav", 1.0) for name in "ab"]
    (tmp_path / "folder/b.txt").write_text("one\n")
    assert texts(tmp_path / "folder") == {"a": "", "b": "one"}
    with pytest.raises(ValueError, match=r"there is no a\.txt beside it"):
        read(tmp_path / "folder")

    kaldi = tmp_path / "kaldi"
    kaldi.mkdir()
    (kaldi / "wav.scp").write_text("x {}\ny {}\n".format(*audio))
    assert texts(kaldi) == {"x": "", "y": ""}
    (kaldi / "text").write_text("y one\n")
    assert texts(kaldi) == {"x": "", "y": "one"}

    write_lines(tmp_path / "table/metadata.jsonl", [{"file_name": "../folder/a.wav"}])
    assert texts(tmp_path / "table") == {"a": ""}


def test_a_plan_counts_frames_alone(half, tmp_path):
    config = DataConfig(text="ignored", frame_budget=60)
    listing = read_listing([half], limits=config.limits())
    assert not listing.columns.tokens.any()
    selection = select(listing, config.limits(), config)
    assert len(selection.lengths) == 10
    assert selection.shape.token_budget == 1
    optional = read_listing([half], limits=DataConfig(text="optional").limits())
    assert (optional.columns.text > 0).tolist() == [True, False] * 5
    with gzip.open(tmp_path / "durations.txt.gz", "wt") as file:
        file.write("1.5\n2.5\n")
    rows = read_listing([tmp_path / "durations.txt.gz"], limits=config.limits())
    assert rows.columns.text.tolist() == [0, 0]
