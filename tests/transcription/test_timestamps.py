"""Segments by the tokens of times of a Whisper, whose decoding tests/interop compares."""

import json

import numpy as np
import pytest
import soundfile

from effasr.checkpoint import load_model
from effasr.cli.main import main
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decoded import Decoded
from effasr.decoding.timestamps import with_parts_of_time
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.transcribe import Waveform, transcribe
from tests.support.recognition import RATE

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
    assert main([*line, str(saved)]) == 2
    assert "`timestamps` must be false for a model that has no tokens" in capsys.readouterr().err
