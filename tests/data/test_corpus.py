import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import MonoCut, Recording

from effasr.data.audio.silence import SilencePaddingConfig
from effasr.data.audio.waveform import (
    AudioError,
    AudioSegment,
    duration_at,
    load_at,
    load_audio,
    name_at,
    samples_in,
)
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.config import FilterConfig
from effasr.data.index.corpus import Corpus
from effasr.data.manifest.prepare import prepare
from effasr.data.manifest.reader import read
from effasr.data.mixture import MixConfig
from effasr.data.prompt import Prompt
from effasr.planning.listing import read_listing, select
from tests.support.corpora import load_corpus, write_tone


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
    derived = Corpus.load([many], tokenizer, DataConfig(frame_budget=16), ctc=False)
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


SPEEDS = (0.9, 1.0, 1.1)
ANYTHING = FilterConfig(max_dropped=1)


def load(path, tokenizer, **options):
    return load_corpus(path, tokenizer, **{"speed_perturbation": SPEEDS} | options)


@given(
    samples=st.integers(100, 9000),
    rate=st.sampled_from([8000, 16_000, 22_050, 44_100]),
    speed=st.sampled_from([0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0]),
    start=st.integers(0, 50),
)
@settings(max_examples=150, deadline=None)
def test_a_copy_has_exactly_the_planned_samples(tmp_path_factory, samples, rate, speed, start):
    path = tmp_path_factory.getbasetemp() / f"{samples}-{rate}.wav"
    soundfile.write(path, np.sin(np.arange(samples) / 7).astype(np.float32), rate)
    recording = Recording.from_file(path)
    seconds = recording.duration - start / rate
    cut = MonoCut("u", start / rate, seconds, 0, recording=recording)
    audio = load_at(cut, speed)
    assert len(audio) == samples_in(duration_at(seconds, speed))
    assert abs(len(audio) - seconds * 16_000 / speed) <= 1
    if speed == 1:
        assert (audio == load_audio(cut)).all()
    path.unlink()


def test_speech_is_slower_and_lower_as_by_lhotse(tmp_path):
    path = write_tone(tmp_path / "a.wav", 1.0, hertz=450.0)
    cut = Recording.from_file(path, recording_id="a").to_cut()
    slow = load_at(cut, 0.9)
    assert np.abs(np.fft.rfft(slow)).argmax() * 16_000 / len(slow) == pytest.approx(405, abs=1)
    other = cut.perturb_speed(0.9)
    assert name_at("a", 0.9) == other.id == "a_sp0.9"
    theirs = other.load_audio()[0]
    assert len(theirs) == len(slow)
    # Their resampler is another one; at the ends both see silence.
    assert np.abs(theirs - slow)[100:-100].max() < 0.01


def test_rates_and_ctc_are_those_of_the_copy(nemo, tokenizer):
    manifest = nemo(3, text="one")
    plain = load(manifest, tokenizer, speed_perturbation=(1.0,), filters=ANYTHING)
    rates = (plain.lengths.tokens - 5) / (plain.samples / 16_000)
    limit = FilterConfig(max_tokens_per_second=float(rates[0]) * 1.05, max_dropped=1)
    corpus = load(manifest, tokenizer, filters=limit)
    # One copy of the shortest is too fast; the second, slower, is as far below as it was.
    assert [(d.id, d.reason) for d in corpus.dropped] == [("u0_sp1.1", "token_rate_outlier")]
    dense, speeds = nemo(3, text="one two three four"), (0.5, 1.0, 2.0)
    slow = load(dense, tokenizer, speed_perturbation=speeds, filters=ANYTHING, token_budget=60)
    infeasible = {d.id for d in slow.dropped if d.reason == "ctc_infeasible"}
    assert "u0_sp2.0" in infeasible
    assert "u0_sp0.5" not in infeasible


def test_shares_of_sources_count_the_hours_of_the_copies(nemo, tokenizer):
    manifest = str(nemo(7))
    config = DataConfig(
        mix=MixConfig(sources={"a": manifest}), frame_budget=60, speed_perturbation=SPEEDS
    )
    corpus = Corpus.load([manifest], tokenizer, config, sources=[0])
    assert corpus.mixture is not None
    assert corpus.mixture.utterances.tolist() == [21]
    assert corpus.mixture.amounts.tolist() == [corpus.samples.sum()]
    draw = corpus.populations(seed=0)
    assert draw is not None
    assert sorted(draw(0).tolist()) == list(range(21))


def test_a_plan_lists_what_training_reads(nemo, tokenizer):
    manifest, padding = nemo(7), SilencePaddingConfig(seconds=(0.1, 0.3))
    options = {"max_duration": 1.1, "silence_padding": padding}
    corpus = load(manifest, tokenizer, filters=ANYTHING, **options)
    config = DataConfig(frame_budget=60, speed_perturbation=SPEEDS, **options)
    for reader in (tokenizer, None):
        listing = read_listing([manifest], limits=config.limits(), tokenizer=reader)
        chosen = select(listing, config.limits(), config)
        assert (chosen.lengths.frames == corpus.lengths.frames).all()
        assert chosen.seconds.sum() == pytest.approx(corpus.seconds)
        assert [d.details for d in chosen.dropped] == [d.details for d in corpus.dropped]
    assert listing.by_text == 21
