"""NeMo's own classes say which ids a text and a prompt have: see `tests/interop/nemo/make.py`."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from effasr.data.prompt import Prompt
from effasr.data.tokenizer import NeMoTokenizer, UnknownLanguageError, load_tokenizer
from effasr.data.tokenizer.nemo import NEMO_FILE, SPECIAL, UNIFIED
from effasr.interop.nemo.checkpoint import import_nemo

FOLDER = Path(__file__).parents[1] / "interop" / "nemo"
CASES = ("ctc", "rnnt", "canary", "flash", "unified")
TEXTS = {"en": "a dog ran to the red barn", "de": "der rote hund lief zum haus"}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, NeMoTokenizer]:
    return {case: import_nemo(FOLDER / f"{case}.nemo").tokenizer for case in CASES}


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, np.ndarray]]:
    return {case: dict(np.load(FOLDER / f"{case}.npz")) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_ids_are_nemos(tokenizers, expected, case) -> None:
    tokenizer, theirs = tokenizers[case], expected[case]
    assert tokenizer.vocab_size == theirs["vocabulary"]
    for language, text in TEXTS.items():
        ids = tokenizer.encode(text, language)
        assert ids == theirs[f"ids_{language}"].tolist()
        assert tokenizer.decode(ids) == str(theirs[f"back_{language}"]).strip()
    if "eos" in theirs:
        assert (tokenizer.eos_id, tokenizer.pad_id) == (theirs["eos"], theirs["pad"])
        around = [*tokenizer.prompt(Prompt()), *ids, tokenizer.pad_id, tokenizer.eos_id]
        assert tokenizer.decode(around) == tokenizer.decode(ids)
    else:
        assert tokenizer.prompt(Prompt()) == [tokenizer.pad_id]


@pytest.mark.parametrize("case", ["canary", "flash", "unified"])
def test_prompts_are_nemos(tokenizers, expected, case) -> None:
    compared = 0
    for name, ids in expected[case].items():
        if name.startswith("prompt_"):
            source, target, pnc = name.removeprefix("prompt_").split("-")
            task = "transcribe" if source == target else "translate"
            prompt = Prompt(source, target, task, pnc == "pnc")
            assert tokenizers[case].prompt(prompt) == ids.tolist()
            compared += 1
    assert compared == 6


def test_languages(tokenizers) -> None:
    """A unified tokenizer without prompts takes any; French is spoken, and only v2 writes it."""
    languages = {case: (item.languages, item.sources) for case, item in tokenizers.items()}
    assert languages == {
        "ctc": ((), ()),
        "rnnt": (("de", "en"), ("de", "en")),
        "canary": (("de", "en"), ("de", "en", "fr")),
        "flash": (("de", "en"), ("de", "en", "fr")),
        "unified": (("de", "en", "fr"), ("de", "en", "fr")),
    }
    for case in ("rnnt", "canary", "unified"):
        with pytest.raises(UnknownLanguageError, match=r"must be one of de, en.* but is 'es'"):
            tokenizers[case].encode("a", "es")
    with pytest.raises(UnknownLanguageError, match="speech must be one of de, en, fr, but is 'es'"):
        tokenizers["flash"].prompt(Prompt("es", "en", "translate"))


def test_runs_of_languages_are_joined_as_their_pieces_say(tokenizers) -> None:
    tokenizer = tokenizers["canary"]
    english, german = tokenizer.encode("a dog", "en"), tokenizer.encode("ein hund", "de")
    assert tokenizer.decode(english + german) == "a dog ein hund"
    names, pieces = list(tokenizer.models), tokenizer.pieces_by_model
    position = names.index("de")
    ending = next(
        piece for piece in pieces[position] if piece.isalpha() and not piece.startswith("▁")
    )
    token = sum(map(len, pieces[:position])) + pieces[position].index(ending)
    assert tokenizer.decode([*english, token]) == f"a dog{ending}"


def test_what_cannot_be_spelt_is_counted(tokenizers) -> None:
    tokenizer = tokenizers["canary"]
    ids = tokenizer.encode("dog ж", "en") + tokenizer.encode("ж hund", "de")
    assert tokenizer.count_unknown(ids) == 2
    assert "⁇" in tokenizer.decode(ids)


@pytest.mark.parametrize("case", CASES)
def test_it_is_saved_and_read_again(tokenizers, case, tmp_path) -> None:
    tokenizer = tokenizers[case]
    tokenizer.save(tmp_path)
    for again in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert isinstance(again, NeMoTokenizer)
        assert again.models == tokenizer.models
        assert again.specials == tokenizer.specials
        assert again.languages == tokenizer.languages
        assert again.encode(TEXTS["en"], "en") == tokenizer.encode(TEXTS["en"], "en")
    again.save(tmp_path)  # over itself


def test_a_broken_folder_is_refused(tokenizers, tmp_path) -> None:
    tokenizers["canary"].save(tmp_path)
    (tmp_path / "de.model").unlink()
    path = tmp_path / NEMO_FILE
    metadata = json.loads(path.read_text())
    for content, message in (
        (json.dumps(metadata), r"de.model: the model of .de. is missing"),
        (json.dumps(metadata | {"version": 2}), "`version` must be 1, but is 2"),
        ("{", "cannot be read"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(tmp_path)
    tokenizers["canary"].save(tmp_path)
    path.write_text(json.dumps(metadata | {"vocab_size": 61}))
    with pytest.raises(ValueError, match="its models must have 61 tokens, but have 60"):
        load_tokenizer(tmp_path)


def test_bad_models_are_refused(tokenizers) -> None:
    models = tokenizers["canary"].models
    for arguments, message in (
        ([{}], "`models` must hold at least one model, but is empty"),
        ([{"../en": models["en"]}], "`models` must be named by languages"),
        ([{"en": b"x"}], "the model of 'en' is no SentencePiece model"),
        ([models, "phi"], "`prompt_format` must be canary or canary2, but is phi"),
        (
            [{"de": models["de"]}, "canary"],
            "must have one named spl_tokens for prompts, but are de",
        ),
        ([{UNIFIED: models["en"]}, "canary"], r"lack <pad>, <\|endoftext\|>"),
    ):
        with pytest.raises(ValueError, match=message):
            NeMoTokenizer(*arguments)
    with pytest.raises(ValueError, match=r"must be in 0 .. 59, but one is 60"):
        tokenizers["canary"].decode([60])


def test_a_language_of_the_prompts_can_follow(tokenizers) -> None:
    for case, tokenizer in tokenizers.items():
        model = next(iter(tokenizer.models.values()))
        name = next(iter(set(tokenizer.sources) - set(tokenizer.languages)), "xx")
        if tokenizer.is_unified or (tokenizer.prompt_format and name == "xx"):
            with pytest.raises(ValueError, match="`extend` must be a tokenizer with a model and"):
                tokenizer.extended({name: model})
            continue
        longer = tokenizer.extended({name: model})
        assert longer.pieces()[: tokenizer.vocab_size] == tokenizer.pieces(), case
        assert {*longer.languages} - {*tokenizer.languages} == {name}


def test_long_codes_are_found_by_short_ones(tokenizers) -> None:
    """As NeMo maps canary-1b's languages to models named en-US and the like."""
    models = tokenizers["canary"].models
    tokenizer = NeMoTokenizer(
        {SPECIAL: models[SPECIAL], "en-US": models["en"], "de-DE": models["de"]}, "canary"
    )
    assert tokenizer.languages == ("de", "en")
    same = tokenizers["canary"]
    assert tokenizer.encode("hund", "de") == same.encode("hund", "de")
    pieces = sentencepiece.SentencePieceProcessor(model_proto=models["en"])
    assert tokenizer.pieces_by_model[1][3] == pieces.id_to_piece(3)
