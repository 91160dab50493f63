import pytest

from effasr.data.audio.waveform import AudioError, AudioSegment, load_audio
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.config import FilterConfig
from effasr.data.index.corpus import Corpus
from effasr.data.manifest.prepare import prepare
from effasr.data.manifest.reader import read
from effasr.data.prompt import Prompt
from tests.support.corpora import load_corpus


def test_examples_are_those_of_the_manifest(nemo, tokenizer):
    manifest = nemo(12)
    corpus = load_corpus(manifest, tokenizer)
    assert len(corpus) == 12
    assert not corpus.dropped
    for index, cut in enumerate(read(manifest)):
        example = corpus.example(index)
        assert (example.id, corpus.audio(index)) == (cut.id, AudioSegment.of(cut))
        assert (example.audio == load_audio(cut)).all()
        assert tokenizer.decode(example.text) == cut.supervisions[0].text
        assert len(example.prompt) == 5
        assert corpus.lengths.frames[index] == Framing().frames(example.audio.shape[0])
        assert corpus.lengths.tokens[index] == len(example.prompt) + len(example.text)
    assert corpus.prompt == Prompt()
    assert corpus.seconds == pytest.approx(sum(cut.duration for cut in read(manifest)))


def test_a_prepared_folder_gives_the_same_corpus_without_opening_audio(nemo, tokenizer, tmp_path):
    manifest = nemo(5)
    direct = load_corpus(manifest, tokenizer)
    prepare(manifest, tmp_path / "out")
    for file in (manifest.parent / "audio").iterdir():
        file.rename(file.with_suffix(".away"))
    prepared = load_corpus(tmp_path / "out", tokenizer)
    assert prepared.fingerprint == direct.fingerprint
    assert [prepared.audio(i) for i in range(5)] == [direct.audio(i) for i in range(5)]
    with pytest.raises(AudioError, match=r"utterance 'u3': .*u3\.wav: there is no such file"):
        prepared.example(3)


def test_over_budgets(nemo, tokenizer, write_lines):
    manifest = nemo(7)
    anything = FilterConfig(max_dropped=1)
    frames = load_corpus(manifest, tokenizer, frame_budget=10, token_budget=60, filters=anything)
    assert {drop.reason for drop in frames.dropped} == {"over_frame_budget"}
    rows = [{"audio_filepath": f"audio/u{index % 7}.wav", "text": "one"} for index in range(1500)]
    rows[9]["text"] = "one four two eight"
    many = write_lines(manifest.parent / "many.jsonl", rows)
    config = DataConfig(frame_budget=16)
    derived = Corpus.load([many], tokenizer, config, ctc=False)
    (drop,) = derived.dropped
    assert (drop.reason, drop.id) == ("over_token_budget", "u2-2")
    assert "was derived from `frame_budget`: set `token_budget`" in drop.details
    assert len(derived) == 1499
    assert derived.example(9).id == "u3-2"
    assert tokenizer.decode(derived.example(9).text) == "one"


def test_the_shape_is_derived_where_it_is_not_given(nemo, tokenizer):
    manifest = nemo(12)
    corpus = load_corpus(manifest, tokenizer, frame_budget=200)
    ratio = corpus.lengths.tokens.sum() / corpus.lengths.frames.sum()
    assert corpus.shape.token_budget == pytest.approx(200 * ratio, abs=1)
    by_bound = load_corpus(manifest, tokenizer, frame_budget=200, max_sequences=None)
    assert by_bound.shape.max_sequences == 25
    provided = load_corpus(manifest, tokenizer, token_budget=33, max_sequences=4)
    assert (provided.shape.token_budget, provided.shape.max_sequences) == (33, 4)


def test_a_corpus_without_anything_to_train_on_is_refused(nemo, tokenizer):
    with pytest.raises(
        ValueError, match=r"no utterance can be trained on \(3 dropped; the first: "
    ):
        load_corpus(nemo(3), tokenizer, min_duration=5.0)
    with pytest.raises(ValueError, match=r"no manifest: no utterance can be trained on"):
        Corpus.load([], tokenizer, DataConfig())
