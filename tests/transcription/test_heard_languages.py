"""`--language auto`: the language is that under whose prompt a recording is likeliest."""

import json

import numpy as np
import pytest
import soundfile

from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.transcribe import Waveform, transcribe

AUTO = Prompt("auto", "auto")
RATE = 16_000


@pytest.fixture(scope="module")
def waves(noise):
    return [Waveform(str(n), noise(0.5 + 0.4 * n, seed=n), RATE) for n in range(6)]


def likelihoods(model, tokenizer, wave, language):
    (result,) = transcribe(
        model, tokenizer, [wave], prompt=Prompt(language, language),
        config=DecodingConfig(confidence=True),
    )  # fmt: skip
    score = result.segments[0].score
    return score.log_prob / score.symbols if result.segments[0].text else -np.inf


def test_the_language_is_the_likeliest_of_the_first_segment(model, tokenizer, waves):
    results = list(transcribe(model, tokenizer, waves, prompt=AUTO))
    for wave, result in zip(waves, results, strict=True):
        scores = {x: likelihoods(model, tokenizer, wave, x) for x in tokenizer.sources}
        assert scores[result.language] == pytest.approx(max(scores.values()), abs=1e-4)
        named = Prompt(result.language, result.language)
        (alone,) = transcribe(model, tokenizer, [wave], prompt=named)
        assert result.prompt == alone.prompt
        assert result.text == alone.text
        assert result.as_row()["language"] == result.language
        assert "language" not in alone.as_row()
    assert len({result.language for result in results}) > 1


def test_a_translation_stays_one_into_another_language(model, tokenizer, waves):
    for result in transcribe(model, tokenizer, waves, prompt=Prompt("auto", "en", "translate")):
        assert result.prompt.source == result.language
        assert result.prompt.target == "en"


@pytest.mark.parametrize("options", [{"words": True}, {"ctc_weight": 0.3}])
def test_what_a_translation_lacks_is_refused_at_once_whatever_is_heard(
    model, tokenizer, waves, options
):
    for target in tokenizer.sources:
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be .* a translation"):
            transcribe(
                model, tokenizer, waves, prompt=Prompt("auto", target, "translate"),
                config=DecodingConfig(**options),
            )  # fmt: skip


def test_a_method_without_prompts_needs_the_language(model, tokenizer, waves):
    with pytest.raises(ValueError, match="`language` must be named for the method ctc"):
        transcribe(model, tokenizer, waves, prompt=AUTO, config=DecodingConfig(method="ctc"))


def test_whisper_hears_what_transformers_hears(tmp_path, monkeypatch):
    whisper = pytest.importorskip("tests.interop.whisper")
    from effasr.checkpoint import load_model
    from effasr.cli.main import main

    folder = tmp_path / "source"
    folder.mkdir()
    theirs = whisper.make_whisper(folder)
    assert main(["import", str(folder), str(tmp_path / "model")]) == 0
    loaded, pieces = load_model(tmp_path / "model"), []
    hear = Recognizer._languages_of

    def record(recognizer, chosen):
        pieces.extend((piece.recording.request.id, piece.audio) for piece in chosen)
        return hear(recognizer, chosen)

    monkeypatch.setattr(Recognizer, "_languages_of", record)
    generator = np.random.default_rng(0)
    waves = [
        Waveform(str(n), (0.05 * (n + 1) * generator.standard_normal(20_000)).astype("f4"), RATE)
        for n in range(6)
    ]
    heard = {
        r.id: r.language for r in transcribe(loaded.model, loaded.tokenizer, waves, prompt=AUTO)
    }
    extractor = whisper.transformers.WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = whisper.make_tokenizer()
    theirs.generation_config.lang_to_id = {
        f"<|{code}|>": tokenizer.token_to_id(f"<|{code}|>") for code in ("en", "de", "yue")
    }
    assert len(pieces) == len(heard) == 6
    for name, audio in pieces:
        features = extractor(audio, sampling_rate=RATE, return_tensors="pt").input_features
        token = theirs.detect_language(features).item()
        assert tokenizer.id_to_token(token) == f"<|{heard[name]}|>"


def test_the_command_writes_what_it_heard(tmp_path, model, tokenizer, noise, capsys):
    from effasr.checkpoint import save_model
    from effasr.cli.main import main

    save_model(tmp_path / "model", model, tokenizer)
    soundfile.write(tmp_path / "a.wav", noise(1.0, seed=1), RATE)
    line = ["--run", str(tmp_path / "model"), "--language", "auto"]
    assert main(["transcribe", *line, "--json", str(tmp_path / "a.wav")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["language"] in tokenizer.sources
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"audio_filepath": "a.wav", "text": "one"}) + "\n")
    out = str(tmp_path / "out")
    assert main(["evaluate", *line, "--manifest", str(manifest), "--output", out]) == 0
    groups = json.loads((tmp_path / "out" / "wer.json").read_text())
    assert row["language"] in json.dumps(groups)
