"""Times of words as targets: read from data, moved with the audio, written as tokens."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from effasr.data.audio.silence import SilencePaddingConfig
from effasr.data.config import DataConfig
from effasr.data.filters.config import FilterConfig
from effasr.data.manifest.prepare import parse_clean, prepare
from effasr.data.manifest.reader import named
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import NeMoTokenizer, WhisperTokenizer
from effasr.data.tokenizer.hugging_face import TIMESTAMP
from effasr.data.tokenizer.nemo import SPECIAL
from effasr.decoding import decode
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decoded import Decoded
from effasr.interop.nemo.checkpoint import import_nemo
from effasr.interop.nemo.tokenizer import _special_model
from effasr.model.decoder import DecoderConfig
from effasr.model.losses import gather_losses
from effasr.planning.listing import read_listing
from effasr.training.fault_tolerance.oom_recovery import utterances
from effasr.transcription.transcribe import Waveform, transcribe
from tests.interop import whisper
from tests.support import corpora
from tests.support.recognition import make_model

WORDS = [("a", 0.08, 0.32), ("dog", 0.32, 0.72), ("ran", 0.8, 1.2)]
WHOLE = {"timestamps": "words", "timestamp_share": 1.0, "filters": FilterConfig(max_dropped=1)}


@pytest.fixture(scope="module")
def canary() -> NeMoTokenizer:
    plain = import_nemo(Path(__file__).parents[1] / "interop/nemo/flash.nemo").tokenizer
    models = plain.models | {
        SPECIAL: _special_model([*plain.specials, *(f"<|{n}|>" for n in range(30))])
    }
    return NeMoTokenizer(models, "canary2")


def listed(items=WORDS, name="word"):
    return [{name: text, "start": start, "end": end} for text, start, end in items]


def manifest(folder, count=1, **fields):
    audio = str(corpora.write_tone(folder / "a.wav", 2.5))
    row = {"audio_filepath": audio, "text": "a dog ran", "words": listed()} | fields
    return corpora.write_lines(folder / "m.jsonl", [row | {"id": f"u{n}"} for n in range(count)])


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({}, "word", WORDS),
        ({"words": 3, "segments": [x | {"words": [x]} for x in listed()]}, "word", WORDS),
        ({"words": 3, "segments": listed(WORDS, "segment")}, "segment", WORDS),
        ({"text": "<|1|> a <|4|> <|4|> dog <|9|> <|10|> ran <|15|>"}, "word", WORDS),
        ({"text": "<|0.08|> a dog<|0.74|><|0.80|> ran<|1.20|>"},
         "segment", [("a dog", 0.08, 0.74), ("ran", 0.8, 1.2)]),
    ],
)  # fmt: skip
def test_times_are_read_and_kept(fields, kind, expected, tmp_path):
    source = manifest(tmp_path, offset=1.0, duration=1.5, **fields)
    prepare(source, tmp_path / "cuts", clean=parse_clean("lower"))
    prepare(tmp_path / "cuts", tmp_path / "shards", shards=1)  # without the audio around it
    for path in (source, tmp_path / "cuts", tmp_path / "shards"):
        ((cut, said),) = [(x.cut(name), x.cut(name).supervisions[0]) for name, x in named(path)]
        times = [(x.symbol, x.start - cut.start, x.end - cut.start) for x in said.alignment[kind]]
        rounded = [(text, round(a, 3), round(b, 3)) for text, a, b in times]
        assert (said.text, rounded) == ("a dog ran", expected)


@pytest.mark.parametrize("speed", [0.9, 1.0, 1.1])
def test_targets_follow_the_speed(speed, canary, tmp_path):
    path, first = manifest(tmp_path, 60, text="A dog ran"), canary.timestamps.first
    options = {"speed_perturbation": (speed,), "timestamps": "words", "timestamp_share": 0.4}
    corpus = corpora.load_corpus(path, canary, **options)
    planned = read_listing([path], limits=DataConfig(**options).limits(), tokenizer=canary)
    assert planned.columns.tokens.tolist() == corpus.lengths.tokens.tolist()
    timed, plain = [], []
    for example in map(corpus.example, range(60)):
        (timed if canary.specials["<|timestamp|>"] in example.prompt else plain).append(example)
    assert 12 < len(timed) < 36
    parts = [canary.encode(word, "en") for word in ("A", "dog", "ran")]  # the aligner has "a"
    pairs = [[first + round(x / speed / 0.08) for x in ends] for _, *ends in WORDS]
    expected = [[a, *part, b] for part, (a, b) in zip(parts, pairs, strict=True)]
    assert all(example.text == list(chain(*expected)) for example in timed)
    text = canary.encode("A dog ran", "en")
    assert all(example.text == text for example in plain)
    packed = corpus.collate([timed[0], plain[0]], None)
    assert packed.text.values.tolist() == [*chain(*parts), *text]
    # CTC and guided attention are means over the words, of either text.
    losses = gather_losses(packed, penalty=torch.ones(packed.tokens.layout.rows))
    assert losses.guided == packed.num_monotonic_targets == packed.text.layout.total + 2
    assert packed.num_targets == packed.num_monotonic_targets + 6
    assert utterances(packed, 0, 2).num_monotonic_targets == packed.num_monotonic_targets
    whole = corpora.load_corpus(path, canary, **options | WHOLE | {"timestamps": "segments"})
    assert whole.example(0).text == [pairs[0][0], *text, pairs[2][1]]


def test_silence_before_the_speech_moves_the_times(canary, tmp_path):
    padding = SilencePaddingConfig(seconds=0.5, probability=1.0)
    loader = corpora.make_loader(manifest(tmp_path, 8), canary, silence_padding=padding, **WHOLE)
    delays = set()
    for batch in (batch for step in corpora.take_steps(loader, 3) for batch in step.batches):
        pairs = zip(batch.audio.unpack(), batch.tokens.unpack(), strict=True)
        for samples, tokens in (pair for pair in pairs if len(pair[0])):
            delays.add(delay := int((samples.abs() > 0.3).nonzero()[0]) / 16_000)
            numbers = np.array(tokens.tolist()) - canary.timestamps.first
            heard = numbers[(numbers >= 0) & (numbers < 30)]
            expected = [(time + delay) / 0.08 for _, *times in WORDS for time in times]
            assert np.abs(heard - expected).max() < 0.52  # a tone is loud within a millisecond
    assert len(delays) > 3


def test_what_cannot_be_used_is_dropped_or_refused(canary, tokenizer, tmp_path):
    late, long, mixed = ([("a", 0.1, 0.2), ("dog", *x)] for x in ((0.3, 2.2), (0.3, 9), (0.05, 1)))
    rows = [("late", "a dog", late), ("long", "a dog", long), ("order", "a dog", mixed)]
    rows += [("other", "a dog ran", late), ("end", "a", [("a", 0.5, 0.3)]), ("open", "<|1|> a", [])]
    audio = {"audio_filepath": str(corpora.write_tone(tmp_path / "a.wav", 2.5))}
    lines = [audio | {"id": x, "text": text, "words": listed(w)} for x, text, w in rows]
    path = corpora.write_lines(tmp_path / "m.jsonl", lines)
    corpus = corpora.load_corpus(path, canary, speed_perturbation=(0.9, 1.0), **WHOLE)
    unusable = [(x, "unusable_times") for x in ("late_sp0.9", "long", "order", "other")]
    malformed = [(f"m.jsonl:{n}", "malformed_row") for n in (5, 6)]
    assert {*corpora.dropped(corpus)} >= {*unusable, *malformed}
    assert [corpus.name(index) for index in range(len(corpus))] == ["late"]
    with pytest.raises(ValueError, match=r"`data.timestamps` must be none where the tokenizer"):
        corpora.load_corpus(path, tokenizer, **WHOLE)
    with pytest.raises(ValueError, match=r"`data.timestamps` must be none for times after 2.32 s"):
        canary.timestamps.timed([canary.timestamps.first], [2.4])


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_whisper_need_not_list_its_times(is_listed, tmp_path):
    """Those that OpenAI published end with ``<|notimestamps|>``."""
    content = json.loads(whisper.make_tokenizer().to_str())
    if not is_listed:
        keep = [x for x in content["added_tokens"] if not TIMESTAMP.fullmatch(x["content"])]
        content["added_tokens"] = keep
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = WhisperTokenizer(tmp_path)
    corpus = corpora.load_corpus(manifest(tmp_path), tokenizer, **WHOLE)
    prompt, text = corpus.example(0).prompt, corpus.example(0).text
    first, words = tokenizer.timestamps.first, [tokenizer.encode(x, "en") for x, *_ in WORDS]
    pairs = [[first + round(x / 0.02) for x in ends] for _, *ends in WORDS]
    parts = zip(words, pairs, strict=True)
    assert text == [x for part, (a, b) in parts for x in (a, *part, b)]
    assert tokenizer.timestamps.without not in prompt
    assert tokenizer.decode(text) == "a dog ran"
    assert corpus.count_unknown(tokenizer)[0] == 0


@pytest.mark.parametrize("long_form", ["chunked", "sequential"])
def test_words_have_the_times_that_a_canary_writes(long_form, canary, monkeypatch):
    stamps, (a, dog, ran) = canary.timestamps, (canary.encode(x, "en") for x, *_ in WORDS)
    tokens = [stamps.first, *a, stamps.first, stamps.first, *dog, *ran, stamps.first]
    written, prompts = Decoded(tuple(stamps.timed(tokens, [0.08, 0.24, 0.32, 0.8]))), []
    beam = lambda model, encoded, given, *_, **__: prompts.extend(given) or [written]
    monkeypatch.setattr(decode, "attention_beam", beam)
    sizes = {"width": 32, "layers": 1, "heads": 2, "feed_forward": 32, "max_positions": 64}
    model = make_model(canary.vocab_size, decoder=DecoderConfig(**sizes))
    noise = (0.1 * np.random.default_rng(0).standard_normal(16_000)).astype("f4")
    config = DecodingConfig(timestamps=True, vad="loudness", long_form=long_form, fallback=False)
    (result,) = transcribe(model, canary, [Waveform("a", noise, 16_000)], config=config)
    assert result.text == canary.decode([*a, *dog, *ran])
    words = [(x.text, round(x.start, 2), round(x.end, 2)) for x in result.segments[0].words]
    assert words == [("a", 0.08, 0.24), ("dog", 0.32, 0.56), ("ran", 0.56, 0.8)]
    changed = set(zip(canary.prompt(Prompt()), prompts[0], strict=True))
    assert tuple(canary.specials[x] for x in ("<|notimestamp|>", "<|timestamp|>")) in changed
