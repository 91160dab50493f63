"""Segments by the tokens of times of a Whisper, whose decoding tests/interop compares."""

import json
import math

import numpy as np
import pytest
import soundfile

from effasr.checkpoint import load_model
from effasr.cli.main import main
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decoded import Decoded
from effasr.decoding.timestamps import with_parts_of_time
from effasr.transcription import decode_queue
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.transcribe import Waveform, transcribe
from tests.support.recognition import RATE

approx = pytest.approx
whisper = pytest.importorskip("tests.interop.whisper")


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A model directory of a Whisper whose texts have several parts."""
    folder = tmp_path_factory.mktemp("timed")
    (folder / "source").mkdir()
    whisper.make_timed_whisper(folder / "source")
    assert main(["import", str(folder / "source"), str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture
def waves(all_is_speech):
    all_is_speech()
    draw = np.random.default_rng(0)
    return [
        Waveform(str(n), (0.1 * draw.standard_normal(6_000 * n)).astype("f4"), RATE)
        for n in range(1, 6)
    ]


def test_segments_have_the_times_of_tokens_or_of_words(timed, waves, monkeypatch):
    loaded, decoded = load_model(timed), []
    divided = Recognizer._divided
    monkeypatch.setattr(
        Recognizer, "_divided", lambda r, p, d: decoded.append((p, d)) or divided(r, p, d)
    )
    parts = loaded.model, loaded.tokenizer, waves
    prompt, vad = Prompt("de", "de"), {"vad": "loudness"}
    options = {"confidence": True, "word_confidence": True, **vad}
    configs = [DecodingConfig(timestamps=True, words=words, **options) for words in (False, True)]
    plain, worded = (list(transcribe(*parts, prompt=prompt, config=config)) for config in configs)
    by_id = {piece.recording.request.id: result for piece, result in decoded}
    for result, other in zip(plain, worded, strict=True):
        assert result.text == other.text
        times = [part for part in by_id[result.id].parts if part.last > part.first]
        said = [
            (part.start, loaded.tokenizer.decode(by_id[result.id].tokens[part.first : part.last]))
            for part in times
        ]
        shown = [(min(start, result.duration), text) for start, text in said if text]
        assert [(item.start, item.text) for item in result.segments] == shown
        assert result.segments[-1].end <= result.duration
        whole = by_id[result.id].score
        assert sum(item.score.symbols for item in result.segments) <= whole.symbols
        for item in other.segments:
            assert [word.text for word in item.words] == item.text.split()
            assert [word.text for word in item.word_confidences] == item.text.split()
            assert (item.start, item.end) == (item.words[0].start, item.words[-1].end)
    assert max(len(result.segments) for result in plain) > 2


@pytest.fixture
def accepting(monkeypatch):
    """Accept every text, so that none is drawn again."""
    monkeypatch.setattr(decode_queue, "_LEAST_LOG_PROB", -math.inf)
    monkeypatch.setattr(decode_queue, "_MOST_COMPRESSION", math.inf)


@pytest.mark.parametrize("previous_text", [False, True])
def test_windows_go_on_where_transformers_do(previous_text, timed, accepting):
    """The segments of recordings of several windows, and their times, are those of `generate`."""
    folder, loaded = timed.parent / "source", load_model(timed)
    theirs = whisper.transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = whisper.transformers.WhisperFeatureExtractor.from_pretrained(folder)
    settings, stamps = theirs.generation_config, loaded.tokenizer.timestamps
    settings.no_timestamps_token_id, settings.is_multilingual = stamps.without, True
    settings.prev_sot_token_id = stamps.previous
    settings.lang_to_id = {"<|de|>": loaded.tokenizer.prompt(Prompt("de", "de"))[1]}
    settings.task_to_id = {"transcribe": loaded.tokenizer.prompt(Prompt("de", "de"))[2]}
    draw = np.random.default_rng(0)
    waves = [
        Waveform(str(n), (0.1 * draw.standard_normal(RATE * n)).astype("f4"), RATE)
        for n in (5, 9, 7)
    ]
    config = DecodingConfig(long_form="sequential", previous_text=previous_text, gap_seconds=None)
    parts = loaded.model, loaded.tokenizer, waves
    results = list(transcribe(*parts, prompt=Prompt("de", "de"), config=config))
    for wave, result in zip(waves, results, strict=True):
        features = extractor(
            wave.samples, sampling_rate=RATE, return_tensors="pt", truncation=False
        )
        expected = theirs.generate(
            features.input_features, return_timestamps=True, return_segments=True, language="de",
            condition_on_prev_tokens=previous_text,
        )["segments"][0]  # fmt: skip
        texts = [(s["start"].item(), s["end"].item(), s["tokens"].tolist()) for s in expected]
        texts = [
            (start, end, loaded.tokenizer.decode(t for t in tokens if t < stamps.start))
            for start, end, tokens in texts
        ]
        # transformers continues the last window otherwise than it does a recording.
        until = result.duration - whisper.SECONDS
        expected = [(*map(approx, item[:2]), item[2]) for item in texts if item[1] <= until]
        shown = [(s.start, s.end, s.text) for s in result.segments]
        assert len(expected) >= 3
        assert shown[: len(expected)] == expected


def test_what_is_not_accepted_is_drawn_again(timed, waves, monkeypatch):
    loaded, drawn = load_model(timed), []
    draw = decode_queue.SequentialBatches._drawn

    def record(batches, piece, prompt, temperature):
        drawn.append((piece.recording, temperature, draw(batches, piece, prompt, temperature)))
        return drawn[-1][-1]

    def texts(**options):
        config = DecodingConfig(long_form="sequential", vad="loudness", **options)
        parts = loaded.model, loaded.tokenizer, waves
        return [r.text for r in transcribe(*parts, prompt=Prompt("de", "de"), config=config)]

    monkeypatch.setattr(decode_queue.SequentialBatches, "_drawn", record)
    monkeypatch.setattr(decode_queue, "_NO_SPEECH", 1.0)
    monkeypatch.setattr(decode_queue, "_LEAST_LOG_PROB", -math.inf)
    greedy = texts()
    assert not drawn
    # No text is likely enough: the likeliest stays, whatever the temperature.
    monkeypatch.setattr(decode_queue, "_LEAST_LOG_PROB", 1.0)
    again = texts()
    assert [heat for _, heat, _ in drawn] == [0.2, 0.4, 0.6, 0.8, 1.0] * len(waves)
    assert all(recording.context == [] for recording, *_ in drawn)
    likely = [decode_queue.mean_log_prob(result) for *_, result in drawn]
    assert len({result.tokens for *_, result in drawn}) > 2 * len(waves)
    assert any(old != new for old, new in zip(greedy, again, strict=True)) or max(likely) < 0
    assert texts(fallback=False) == greedy
    # Nor is any accepted that repeats itself.
    monkeypatch.setattr(decode_queue, "_LEAST_LOG_PROB", -math.inf)
    monkeypatch.setattr(decode_queue, "_MOST_COMPRESSION", 0.0)
    drawn.clear()
    assert texts()
    assert len(drawn) == 5 * len(waves)
    # What is unlikely may be no speech.
    monkeypatch.setattr(decode_queue, "_LEAST_LOG_PROB", 1.0)
    monkeypatch.setattr(decode_queue, "_NO_SPEECH", -1.0)
    assert texts() == [""] * len(waves)


def test_silence_before_speech_is_skipped(timed, noise):
    loaded = load_model(timed)
    silence, speech = np.zeros(3 * RATE, np.float32), noise(1.0)
    wave = Waveform("a", np.concatenate([silence, speech, silence]), RATE)
    config = DecodingConfig(long_form="sequential", vad="loudness", fallback=False, gap_seconds=0.5)
    parts = loaded.model, loaded.tokenizer, [wave]
    (result,) = transcribe(*parts, prompt=Prompt("de", "de"), config=config)
    assert result.segments
    assert all(2.8 <= s.start <= s.end <= 5.5 for s in result.segments)


@pytest.mark.parametrize(
    ("tokens", "text", "parts"),
    [
        # Times are numbers from 100 on; text is below.
        ((), (), []),
        ((100, 5, 6, 150), (5, 6), [(0.0, 1.0, 0, 2)]),
        ((110, 5, 150, 160, 6), (5, 6), [(0.2, 1.0, 0, 1), (1.2, None, 1, 2)]),
        ((100, 5, 150, 150, 6, 160), (5, 6), [(0.0, 1.0, 0, 1), (1.0, 1.2, 1, 2)]),
        ((100, 5, 150, 150), (5,), [(0.0, 1.0, 0, 1), (1.0, None, 1, 1)]),
        ((100,), (), [(0.0, None, 0, 0)]),
    ],
)
def test_parts_of_a_text(tokens, text, parts, timed):
    from effasr.data.tokenizer import TimestampTokens

    result = with_parts_of_time(Decoded(tokens), TimestampTokens(97, 99, 100, None, None))
    assert result.tokens == text
    assert [(p.start, p.end, p.first, p.last) for p in result.parts] == parts
    assert tuple(token for part in result.parts for token in part.tokens) == tokens


def test_the_command_and_models_without_times(timed, saved, waves, tmp_path, capsys):
    audio = str(tmp_path / "a.wav")
    soundfile.write(audio, waves[-1].samples, RATE)
    line = ["transcribe", audio, "--language", "de", "--timestamps", "--vad", "loudness", "--run"]
    assert main([*line, str(timed), "--json"]) == 0
    segments = json.loads(capsys.readouterr().out)["segments"]
    assert len(segments) > 2
    assert [s["start"] for s in segments] == sorted(s["start"] for s in segments)
    assert main([*line, str(timed), "--format", "srt"]) == 0
    assert "-->" in capsys.readouterr().out
    long = ["--long-form", "sequential", "--no-fallback"]
    assert main([*line, str(timed), *long, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["segments"]
    for options, message in (
        ([str(saved)], "`timestamps` must be false, and `long_form` chunked, for a model that has"),
        ([str(saved), "--long-form", "sequential", "--method", "ctc"], "`timestamps` must be"),
        ([str(timed), "--long-form", "sequential", "--stream"], "`--long-form` must be chunked"),
    ):
        assert main([*line, *options]) == 2
        assert message in capsys.readouterr().err
