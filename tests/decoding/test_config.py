"""Options that cannot be, alone or with a model, and the method that a model is decoded with."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from effasr.data.prompt import Prompt
from effasr.decoding.checks import check_config, check_prompt, choose_method
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode
from effasr.model.transducer import TransducerConfig
from effasr.transcription.recognizer import Recognizer
from tests.decoding.cases import batch_of

NAN, INFINITE, LM = float("nan"), float("inf"), Path("lm.arpa")
LISTED = {"beam": 2, "nbest": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "`beam` must be at least 1, but is 0"),
        ({"frame_budget": 0}, "`frame_budget` must be"),
        ({"max_sequences": 0}, "`max_sequences` must be"),
        ({"extra_tokens": 0}, "`extra_tokens` must be"),
        ({"workers": 0}, "`workers` must be"),
        ({"chunk_seconds": 0.9}, "`chunk_seconds` must be"),
        ({"chunk_seconds": 5.0, "search_seconds": 2.6}, "`search_seconds` must be"),
        ({"tokens_per_frame": -0.1}, "`tokens_per_frame` must be"),
        ({"length_penalty": NAN}, "`length_penalty` must be at least 0, but is nan"),
        ({"coverage_penalty": -0.1}, "`coverage_penalty` must be at least 0, but is -0.1"),
        ({"coverage_penalty": INFINITE}, "`coverage_penalty` must be at least 0, but is inf"),
        ({"ctc_weight": 1.1}, "`ctc_weight` must be from 0 to 1, but is 1.1"),
        ({"no_repeat_ngram": 1}, "`no_repeat_ngram` must be at least 2, but is 1"),
        ({"beam": 2, "nbest": 3}, "`nbest` must be from 1 to `beam` = 2, but is 3"),
        ({"score_parts": True}, "`nbest` must be at least 2 with `score_parts`"),
        ({"lm_unit": "word"}, "`lm_unit` must be token where there is no `lm`"),
        ({"lm_weight": 0.5}, "`lm_weight` must be left out where there is no `lm`"),
        ({"lm": LM, "lm_weight": 0.0}, "`lm_weight` must be above 0, but is 0.0"),
        ({"boost_weight": 1.0}, "`boost_weight` must be left out where there is no `boost`"),
        ({"boost": LM, "boost_weight": 0.0}, "`boost_weight` must be above 0, but is 0.0"),
        (LISTED | {"boost": LM, "score_parts": True}, "`boost` must be left out with `score_p"),
        ({"gap_seconds": 0.01}, "`gap_seconds` must be at least 0.1, but is 0.01"),
        ({"no_speech": 1.5}, "`no_speech` must be from 0 to 1, but is 1.5"),
        ({"fallback_confidence": 1.5}, "`fallback_confidence` must be from 0 to 1, .* but is 1.5"),
        ({"fallback_confidence": 0.1, "fallback": False}, "left out where `fallback` is false"),
        ({"temperature": -0.1}, "`temperature` must be 0 with a beam, and at least 0, but is -0.1"),
        ({"timestamps": True, "lm": LM}, "`lm` must be left out with `timestamps`"),
        (
            {"timestamps": True, "ctc_weight": 0.3},
            "`ctc_weight` must be left out with `time",
        ),
        (LISTED | {"timestamps": True}, "`nbest` must be left out with `timestamps`, but is 2"),
        ({"calibration": LM}, "`calibration` must be left out without `word_confidence`"),
        ({"second_lm": LM}, "`nbest` must be at least 2 with `second_lm`"),
        ({"second_lm_weight": 0.5}, "`second_lm_weight` must be left out"),
        (LISTED | {"second_lm": LM, "words": True}, "`words` must be false with `second_lm`"),
        (LISTED | {"second_lm": LM, "second_lm_weight": -1.0}, "`second_lm_weight` must be at l"),
        (LISTED | {"second_lm": LM, "no_speech": 0.5}, "`no_speech` must be left out with `sec"),
    ],
)
def test_options_that_cannot_be(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingConfig(**options)


LEFT_OUT = "must be left out for the method"
LACKS = "because this model has no"


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        ("all", {"length_penalty": 1.0}, f"`length_penalty` {LEFT_OUT} attention"),
        ("all", {"method": "ctc", "beam": 2, "length_penalty": 1.0}, f"{LEFT_OUT} ctc"),
        ("all", {"coverage_penalty": 0.5}, f"{LEFT_OUT} attention with a beam of 1"),
        ("all", {"method": "ctc", "coverage_penalty": 0.5}, f"{LEFT_OUT} ctc with a beam of 1"),
        ("all", {"method": "ctc", "beam": 2, "coverage_penalty": 0.5}, "with a beam of 2"),
        ("transducer", {"beam": 2, "coverage_penalty": 0.5}, f"{LEFT_OUT} transducer"),
        ("all", {"method": "ctc", "ctc_weight": 0.5}, "`ctc_weight` must be 0 for the method ctc"),
        ("transducer", {"ctc_weight": 0.3}, "`ctc_weight` must be 0 for the method transducer"),
        ("decoder", {"ctc_weight": 0.5}, "`ctc_weight` must be 0 for a model without CTC head"),
        ("all", {"method": "ctc", "no_repeat_ngram": 3}, f"`no_repeat_ngram` {LEFT_OUT} ctc"),
        ("all", {"method": "ctc", "lm": LM}, "`beam` must be at least 2 for CTC with the language"),
        ("language_model", {"boost": LM}, "`boost` must be left out for the method language_model"),
        ("language_model", {"words": True}, f"`words` {LEFT_OUT} language_model"),
        ("ctc", {"method": "attention"}, f"`method` must not be attention, {LACKS} decoder"),
        ("decoder", {"method": "ctc"}, f"`method` must not be ctc, {LACKS} CTC head"),
        ("ctc", {"method": "transducer"}, f"`method` must not be transducer, {LACKS} transducer"),
    ],
)  # fmt: skip
def test_options_that_a_model_does_not_support(parts, options, message, model) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(with_parts(model, parts), DecodingConfig(**options))


def with_parts(model, parts: str) -> SimpleNamespace:
    """What checks read of a model with these parts: its configuration."""
    config = replace(model.config, transducer=TransducerConfig(width=8, joint=8), ctc=True)
    if parts == "language_model":
        parts_of = {"decoder": None, "transducer": None, "ctc": False}
        config = SimpleNamespace(**parts_of, language_model=object())
    elif parts == "transducer":
        config = replace(config, decoder=None)
    elif parts != "all":
        decoder = config.decoder if parts == "decoder" else None
        config = replace(config, decoder=decoder, transducer=None, ctc=parts == "ctc")
    return SimpleNamespace(config=config)


def test_the_method_follows_from_the_model(model) -> None:
    chosen = {"all": "attention", "decoder": "attention", "transducer": "transducer", "ctc": "ctc"}
    for parts, method in chosen.items():
        assert choose_method(with_parts(model, parts), "auto") == method
    assert choose_method(with_parts(model, "all"), "ctc") == "ctc"


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("attention", {"ctc_weight": 0.5}, "`ctc_weight` must be 0 for a translation"),
        ("attention", {"words": True}, "`words` must be false for a translation"),
        ("transducer", {}, "must be transcribe for a transducer, which follows"),
        ("ctc", {}, "must be transcribe for CTC, which follows"),
    ],
)
def test_translations_that_cannot_be(method, options, message) -> None:
    check_prompt(Prompt("en", "en"), method, DecodingConfig(**options))
    with pytest.raises(ValueError, match=message):
        check_prompt(Prompt("en", "de", "translate"), method, DecodingConfig(**options))


def test_a_recognizer_checks_prompt_options_and_language_model(model, tokenizer, tmp_path) -> None:
    recognizer = Recognizer(model, tokenizer, DecodingConfig(beam=2, ctc_weight=0.5))
    assert recognizer.prompt(Prompt("en", "en"))
    with pytest.raises(ValueError, match="`ctc_weight` must be 0 for a translation"):
        recognizer.prompt(Prompt("en", "de", "translate"))
    with pytest.raises(ValueError, match="`ctc_weight` must be 0 for the method ctc"):
        Recognizer(model, tokenizer, DecodingConfig(method="ctc", ctc_weight=0.3))
    with pytest.raises(FileNotFoundError):
        Recognizer(model, tokenizer, DecodingConfig(lm=tmp_path / "none.arpa"))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[2]], "must be 2, one per utterance, but are 1"),
        ([[2], []], "must not be empty"),
        ([[2], [3] * 64], "shorter than the decoder's 64 positions, but one has 64"),
    ],
)
def test_prompts_that_cannot_be(prompts, message, examples, model, tokenizer) -> None:
    with pytest.raises(ValueError, match=message):
        decode(model, tokenizer, batch_of(examples[:2], tokenizer), prompts)
