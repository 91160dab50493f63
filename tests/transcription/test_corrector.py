"""Correction: what is accepted, order of lists, times of words, and the commands."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from effasr import checkpoint
from effasr.data.manifest.pairs import TextPair
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.evaluate import evaluate_pairs
from effasr.model.asr import ASRModel
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.experts import ExpertsConfig
from effasr.transcription.results import Alternative, Failure, Segment, Transcription
from effasr.transcription.second_pass.corrector import Corrector, retimed
from effasr.transcription.second_pass.text_to_text import TextToText, Written, source_of
from effasr.transcription.word_timestamps import Word
from effasr_kernels import PackedLayout, PackedSequence
from tests.support.recognition import write_set


@pytest.fixture(scope="module")
def corrector(model, tokenizer) -> ASRModel:
    """Random weights; what it writes depends on what it reads."""
    encoder = TextEncoderConfig(layers=1, heads=2, feed_forward=32)
    torch.manual_seed(3)
    made = ASRModel(replace(model.config, text_encoder=encoder, ctc=False), tokenizer.vocab_size)
    local = model.state_dict()
    weights = {name: local.get(name, value) for name, value in made.state_dict().items()}
    made.load_state_dict(weights)
    return made.eval()


class Scripted:
    """Writes by a table from what it reads; its tokenizer knows all languages."""

    def __init__(self, tokenizer, table: dict[str, Written]) -> None:
        self.tokenizer, self.table = tokenizer, table
        self.calls: list[list[tuple[str, Prompt]]] = []

    def check(self, prompt, source=None):
        self.tokenizer.prompt(prompt)

    def write(self, asked, others=None):
        self.calls.append(list(asked))
        return [self.table[source] for source, _ in asked]


def segment(*texts: str, **fields) -> Segment:
    listed = tuple(Alternative(text, -float(n), -float(n)) for n, text in enumerate(texts))
    return Segment(0.0, 1.0, texts[0], alternatives=listed, **fields)


def recording(name: str, *segments: Segment, prompt: Prompt | None = None) -> Transcription:
    text = " ".join(item.text for item in segments if item.text)
    return Transcription(name, 1.0, text, segments, prompt=prompt or Prompt())


def test_what_is_likelier_by_more_than_the_margin_is_taken(tokenizer) -> None:
    table = {
        "a | b": Written("c", False, 2.0),
        "d": Written("e", False, 2.5),
        "f | g": Written("f", False, 0.0),
        "h": Written("", False, 9.0),
        "i": Written("j j j", True, 9.0),
        "k": Written("l", False, None),
    }
    results = [
        recording("1", segment("a", "b", "a"), segment("", ""), segment("d")),
        Failure("2", "broken"),
        recording("3"),
        recording("4", segment("f", "g"), segment("h"), segment("i"), segment("k")),
    ]
    writer = Scripted(tokenizer, table)
    result = list(Corrector(writer, 2.0).results(results))  # type: ignore[arg-type]
    assert (result[1], result[2]) == (results[1], results[2])
    assert [item.text for item in result[0].segments] == ["a", "", "e"]
    assert result[0].text == "a e"
    first, _, last = result[0].segments
    assert (first.correction.recognized, first.correction.written) == ("a", "c")
    assert last.correction.gain == 2.5
    assert last.as_row()["correction"] == {"recognized": "d", "written": "e", "gain": 2.5}
    assert result[3] == results[3]
    # All recordings in one call, and nothing for an empty list.
    (call,) = writer.calls
    assert [source for source, _ in call] == list(table)
    (never,) = Corrector(Scripted(tokenizer, table), math.inf).results(results[:1])  # type: ignore[arg-type]
    assert never.text == results[0].text
    with pytest.raises(ValueError, match="`margin` must be at least 0"):
        Corrector(writer, -1.0)  # type: ignore[arg-type]


def test_a_language_that_the_corrector_does_not_know_is_a_failure(corrector, tokenizer) -> None:
    french = recording("f", segment("un", "deux"), prompt=Prompt("fr", "fr"))
    results = [french, recording("e", segment("one", "two"))]
    failed, selected = Corrector(TextToText(corrector, tokenizer), math.inf).results(results)
    assert isinstance(failed, Failure)
    assert "the corrector cannot write it" in failed.reason
    assert selected.text == "one"


def test_common_words_keep_their_times() -> None:
    words = tuple(
        Word(text, start, start + 0.4) for text, start in zip("axybc", range(5), strict=True)
    )
    item = Segment(0.0, 6.0, "a x y b c", words=words)
    result = {(word.text, word.start, word.end) for word in retimed(item, "a z b c d")}
    assert result == {
        ("a", 0.0, 0.4), ("z", 1.0, 2.4), ("b", 3.0, 3.4), ("c", 4.0, 4.4), ("d", 4.4, 6.0)
    }  # fmt: skip
    added = retimed(item, "n m a x y q b")
    assert [word.text for word in added] == ["n", "m", "a", "x", "y", "q", "b"]
    assert [(word.start, word.end) for word in added[:2]] == [(0.0, 0.0), (0.0, 0.0)]
    assert (added[5].start, added[5].end) == (2.4, 3.0)
    assert all(a.end <= b.start for a, b in itertools.pairwise(added))
    empty = replace(item, words=(), text="")
    assert [(w.start, w.end) for w in retimed(empty, "p q")] == [(0.0, 3.0), (3.0, 6.0)]


def test_gains_are_differences_of_log_probabilities(corrector, tokenizer) -> None:
    prompt, texts = Prompt(), ["one two | two", "three", "four five six | four five | six"]
    other_items = ["one two", "three ü", "six " * 70]
    writer = TextToText(corrector, tokenizer, DecodingConfig(frame_budget=40))
    result = writer.write([(text, prompt) for text in texts], other_items)
    assert len({item.text for item in result}) == 3
    for text, other, item in zip(texts, other_items, result, strict=True):
        (alone,) = TextToText(corrector, tokenizer).write([(text, prompt)], [other])
        assert (alone.text, alone.truncated) == (item.text, item.truncated)
        assert alone.gain == pytest.approx(item.gain, abs=1e-4)
    # The second cannot be spelt, and the third is longer than the decoder's positions.
    assert [item.gain is None for item in result] == [False, True, True]
    read = torch.tensor([*tokenizer.encode(texts[0], "en"), tokenizer.eos_id])

    def log_prob(text: str) -> float:
        provided = [*tokenizer.prompt(prompt), *tokenizer.encode(text, "en")]
        encoded = corrector.text_encoder(_packed(read))
        hidden, _ = corrector.decode(_packed(torch.tensor(provided)), encoded)
        scores = corrector.logits(hidden).log_softmax(-1)
        first = len(tokenizer.prompt(prompt))
        requested = [*provided[first:], tokenizer.eos_id]
        return sum(float(scores[first - 1 + n, token]) for n, token in enumerate(requested))

    # What it writes is scored in both, so the difference is that of the others.
    both = writer.write([(texts[0], prompt)] * 2, ["one two", "two three four"])
    with torch.no_grad():
        expected = log_prob("two three four") - log_prob("one two")
    assert abs(expected) > 1.0
    assert both[0].gain - both[1].gain == pytest.approx(expected, abs=1e-3)
    (same,) = writer.write([(texts[0], prompt)], [result[0].text])
    assert same.gain == 0.0
    assert writer.write([]) == []
    with pytest.raises(ValueError, match=r"`model\.text_encoder` must be given to read texts"):
        TextToText(ASRModel(replace(corrector.config, text_encoder=None), 40), tokenizer)


def _packed(values: torch.Tensor) -> PackedSequence:
    return PackedSequence(values, PackedLayout.from_lengths([len(values)]))


def test_a_source_chooses_its_experts(corrector, tokenizer) -> None:
    named = ExpertsConfig(count=2, route="source", names=("ctc", "rnnt"))
    config = replace(
        corrector.config, text_encoder=replace(corrector.config.text_encoder, experts=named)
    )
    torch.manual_seed(1)
    model = ASRModel(config, tokenizer.vocab_size).eval()
    requested = [("one two | two", Prompt()), ("three", Prompt())]
    other_items = ["one", "six"]
    by_source = {}
    for source in named.names:
        writer = TextToText(model, tokenizer, source=source)
        by_source[source] = writer.write(requested, other_items)
        assert writer.write(requested[:1], other_items[:1])[0].gain == pytest.approx(
            by_source[source][0].gain, abs=1e-4
        )
    mixed = TextToText(model, tokenizer).write(requested, other_items, sources=["rnnt", "ctc"])
    for item, source, number in zip(mixed, ("rnnt", "ctc"), (0, 1), strict=True):
        assert item.gain == pytest.approx(by_source[source][number].gain, abs=1e-4)
    assert abs(by_source["ctc"][0].gain - by_source["rnnt"][0].gain) > 1e-2

    assert source_of(config, "rnnt") == "rnnt"
    only = replace(named, count=1, names=("ctc",))
    single = replace(config, text_encoder=replace(config.text_encoder, experts=only))
    assert source_of(single, None) == "ctc"
    assert source_of(corrector.config, None) is None
    for given in (None, "llm"):
        message = f"`corrector_source` must be one of ctc, rnnt, but is {given!r}"
        with pytest.raises(ValueError, match=message):
            source_of(config, given)
    with pytest.raises(ValueError, match="`corrector_source` must be left out for a corrector wit"):
        source_of(corrector.config, "ctc")
    pair = TextPair("p", "pairs:1", "one | two", "one", Prompt(), "llm")
    result = evaluate_pairs(model, tokenizer, [pair, replace(pair, source_name="ctc")])
    assert [item.reason for item in result.failures] == [
        "the source of an utterance must be one of ctc, rnnt, which `experts.names` lists, but is "
        "'llm': use one of these, or train an expert for it."
    ]
    assert len(result.utterances) == 1


def test_commands_correct(
    effasr, tmp_path, saved, corrector, tokenizer, noise, monkeypatch
) -> None:
    """Random weights do not correct: what the loaded corrector writes is given."""
    checkpoint.save_model(tmp_path / "corrector", corrector, tokenizer)
    read = []

    def write(self, asked, others=None):
        assert self.model.config == corrector.config
        read.append((asked, others))
        return [Written("one two", False, 2.0) for _ in asked]

    monkeypatch.setattr(TextToText, "write", write)
    manifest, wave = write_set(tmp_path, [noise(2.6, seed=6)], ["one two"]), tmp_path / "u0.wav"
    options = ("--device", "cpu", "--method", "ctc", "--beam", "4")
    options += ("--corrector", tmp_path / "corrector")
    asked = ("transcribe", "--run", saved, *options, wave, "--words", "--json")
    selected = effasr(*asked, "--corrector-margin", "2").segment
    texts = [item["text"] for item in selected["alternatives"]]
    assert selected["text"] == texts[0]
    assert selected["correction"] == {"recognized": texts[0], "written": "one two", "gain": 2.0}
    assert read == [([(" | ".join(dict.fromkeys(texts)), Prompt())], [texts[0]])]
    result = effasr(*asked, "--corrector-margin", "1.9").segment
    assert result["text"] == "one two"
    assert [word["word"] for word in result["words"]] == ["one", "two"]
    assert result["alternatives"] == selected["alternatives"]
    assert result["words"][0]["start"] == selected["words"][0]["start"]

    command = ("evaluate", "--run", saved, *options, "--manifest", manifest)
    assert effasr(*command, "--corrector-margin", "1", "--output", tmp_path / "out").code == 0
    assert json.loads((tmp_path / "out/wer.json").read_text())["wer"] == 0.0
    tuned = effasr("tune", saved, manifest, *options, "--output", tmp_path / "tuned.yaml")
    assert "corrector_margin" in tuned.out
    assert f"corrector: {tmp_path / 'corrector'}" in (tmp_path / "tuned.yaml").read_text()
    refused = effasr(*asked, "--corrector-source", "ctc").error
    assert "`corrector_source` must be left out for a corrector" in refused
    refused = effasr(*asked, "--corrector", saved).error
    assert "`corrector` must be a run of a model with a text encoder" in refused
