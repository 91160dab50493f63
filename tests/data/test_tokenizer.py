import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from effasr.data.prompt import Prompt
from effasr.data.tokenizer import (
    CanaryTokenizer,
    NoTokenizer,
    ParakeetTokenizer,
    SentencePieceTokenizer,
    UnknownLanguageError,
    load_tokenizer,
    sentence_piece,
    train_tokenizer,
)
from effasr.data.tokenizer.fidelity import TextFidelity

ENGLISH = ["one two three four", "five six seven eight nine ten", "two ten five one"] * 20
GERMAN = ["eins zwei drei vier fünf", "sechs sieben acht neun zehn", "zwei zehn fünf"] * 20


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    out = tmp_path_factory.mktemp("both")
    return train_tokenizer({"en": ENGLISH, "de": GERMAN}, out, vocab_size=40, model_type="bpe")


def names(tokenizer: SentencePieceTokenizer, ids: list[int]) -> list[str]:
    by_id = {index: name for name, index in tokenizer.specials.items()}
    return [by_id[token] for token in ids]


def test_ids_are_specials_then_one_range_per_language(both: SentencePieceTokenizer) -> None:
    assert both.languages == ("de", "en")
    specials = len(both.specials)
    assert sorted(both.specials.values()) == list(range(specials))
    assert both.vocab_size == specials + 2 * 40
    german, english = both.encode("zwei", "de"), both.encode("two", "en")
    assert all(specials <= token < specials + 40 for token in german)
    assert all(specials + 40 <= token < both.vocab_size for token in english)
    assert both.blank_id == both.vocab_size


def test_languages_that_share_a_model_have_the_same_pieces(tmp_path) -> None:
    texts = {"en": ENGLISH, "de": GERMAN}
    tokenizer = train_tokenizer(texts, tmp_path, vocab_size=40, model_type="bpe", shared=True)
    assert tokenizer.languages == ("de", "en")
    assert tokenizer.vocab_size == len(tokenizer.specials) + 40
    again = load_tokenizer(tmp_path)
    for item in (tokenizer, again):
        assert item.encode("zwei two", "de") == item.encode("zwei two", "en")
        assert item.decode(item.encode("fünf", "de") + item.encode("ten", "en")) == "fünf ten"
        prompt = names(item, item.prompt(Prompt(source="en", target="de", task="translate")))
        assert prompt[1:4] == ["<|en|>", "<|translate|>", "<|de|>"]
    with pytest.raises(UnknownLanguageError, match="fr"):
        again.encode("un", "fr")


@pytest.mark.parametrize("shared", [False, True])
def test_further_languages_change_no_id(tmp_path, shared) -> None:
    """Two extensions, of which the alphabet has the second before all others."""
    texts = {"en": ENGLISH, "de": GERMAN}
    first = train_tokenizer(texts, tmp_path / "first", vocab_size=40, shared=shared, sources=["it"])
    dutch = {"nl": ["een twee drie vier vijf", "zes zeven acht negen tien"] * 20}
    second = train_tokenizer(dutch, tmp_path / "second", vocab_size=30, extend=first)
    third = second.extended({"af": second.models["nl"]})
    third.save(tmp_path / "third")
    for item in (second, third, load_tokenizer(tmp_path / "third")):
        assert item.pieces()[: first.vocab_size] == first.pieces()
        assert first.specials.items() < item.specials.items()
        assert len(set(item.pieces()) & set(item.specials)) == len(item.specials)
        for text, language in (("zwei drei", "de"), ("two ten", "en")):
            assert item.encode(text, language) == first.encode(text, language)
        ids = item.encode("twee vijf", "nl")
        assert min(ids) > item.specials["<|nl|>"] == first.vocab_size
        prompt = item.prompt(Prompt(source="it", target="nl", task="translate"))
        assert item.decode([*prompt, *ids, item.eos_id]) == "twee vijf"
        assert item.blank_id == item.vocab_size > max(ids)
    assert third.languages == ("af", "de", "en", "nl")
    assert third.sources == ("af", "de", "en", "it", "nl")
    assert min(third.encode("tien", "af")) > second.vocab_size
    for known in ("de", "it"):
        with pytest.raises(ValueError, match=f"lacks .* but is one with {known}: leave"):
            train_tokenizer({known: GERMAN}, tmp_path / "no", extend=first)
    with pytest.raises(ValueError, match=r"`extend` must be .* but is one without sv: add texts"):
        train_tokenizer(dutch, tmp_path / "no", sources=["sv"], extend=first)
    with pytest.raises(ValueError, match=r"`extend` must be .* but is a NoTokenizer"):
        train_tokenizer(dutch, tmp_path / "no", extend=NoTokenizer())


def test_models_of_languages_are_not_shared(both) -> None:
    models = {"en": both.models["en"], "de": both.models["en"]}
    with pytest.raises(ValueError, match=r"`models` must hold one model .* holds 2: de, en"):
        SentencePieceTokenizer(models, sharing=["en", "de"])


@given(words=st.lists(st.sampled_from(" ".join(ENGLISH).split()), max_size=12))
def test_decode_is_the_inverse_of_encode(words: list[str], both: SentencePieceTokenizer) -> None:
    text = " ".join(words)
    ids = both.encode(text, "en")
    assert both.decode(ids) == text
    assert both.decode([both.specials["<|en|>"], *ids, both.eos_id]) == text


def test_unknown_languages_are_refused_with_the_known_ones(tokenizer, both) -> None:
    with pytest.raises(UnknownLanguageError, match="must be one of de, en, but is 'fr'"):
        both.encode("un", "fr")
    with pytest.raises(UnknownLanguageError, match="must be one of de, en, but is 'fr'"):
        both.prompt(Prompt("fr", "fr"))
    # German is spoken in this one, but never written.
    assert len(tokenizer.prompt(Prompt("de", "en", "translate"))) == 5
    with pytest.raises(UnknownLanguageError, match="text must be one of en, but is 'de'"):
        tokenizer.prompt(Prompt("en", "de", "translate"))


def test_training_is_deterministic_and_silent(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    for name in ("a", "b"):
        train_tokenizer({"en": iter(ENGLISH)}, tmp_path / name, vocab_size=30)
    for file in ("en.model", "effasr_tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert capfd.readouterr() == ("", "")


def test_a_small_corpus_gets_the_pieces_that_it_can_fill(tmp_path: Path) -> None:
    small = train_tokenizer({"en": ENGLISH}, tmp_path, vocab_size=5000)
    assert small.vocab_size < 200
    assert small.decode(small.encode("seven ten", "en")) == "seven ten"


@pytest.mark.parametrize(
    ("texts", "options"),
    [(ENGLISH, {}), ([*ENGLISH, "ж"], {"model_type": "bpe", "coverage": 0.999})],
)
def test_byte_fallback_spells_everything(tmp_path: Path, texts, options) -> None:
    """Also characters that are too rare to have a piece."""
    tokenizer = train_tokenizer(
        {"en": texts}, tmp_path, vocab_size=320, byte_fallback=True, **options
    )
    ids = tokenizer.encode("one ж", "en")
    assert len(ids) >= 3
    assert tokenizer.count_unknown(ids) == 0
    assert tokenizer.decode(ids) == "one ж"


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ({}, {}, "`texts_by_language` must name at least one language"),
        ({"en": []}, {}, r"`texts_by_language\['en'\]` must hold text, but is empty"),
        ({"en": ["  ", "\n"]}, {}, "must hold text, but is empty"),
        (
            {"en": ENGLISH},
            {"vocab_size": 5},
            r"must be at least \d+, the characters of 'en', but is 5",
        ),
        ({"en": ENGLISH}, {"coverage": 0.5}, r"`coverage` must be from 0\.9 to 1, .* but is 0\.5"),
        ({"en": ENGLISH}, {"normalization": "nfd"}, "must be one of identity, nfc, nfkc, but"),
        (
            {"en": ENGLISH, "de": GERMAN},
            {"vocab_size": {"en": 40, "de": 40}, "shared": True},
            r"`vocab_size` must be one number for a shared model",
        ),
    ],
)
def test_what_cannot_be_trained(tmp_path: Path, texts: dict, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, tmp_path, **{"vocab_size": 40} | options)


@pytest.mark.parametrize("language", ["N/A", "../evil"])
def test_a_language_that_is_no_file_name_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both, language: str
) -> None:
    model = both.models["en"]
    monkeypatch.setattr(sentence_piece, "train_model", lambda *_, **__: pytest.fail("trains"))
    with pytest.raises(ValueError, match=f"`language` must be .*, but is '{language}': use"):
        train_tokenizer({"en": ENGLISH, language: GERMAN}, tmp_path / "out", vocab_size=40)
    with pytest.raises(ValueError, match=f"`language` must be .*, but is '{language}': use"):
        SentencePieceTokenizer({"en": model, language: model}).save(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_broken_folders_are_refused(both: SentencePieceTokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither effasr_tokenizer\.json nor"):
        load_tokenizer(tmp_path)
    both.save(tmp_path)
    (tmp_path / "en.model").unlink()
    with pytest.raises(ValueError, match=r"en\.model: the model of 'en' is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "en.model").write_bytes(b"junk")
    with pytest.raises(ValueError, match="the model of 'en' is no SentencePiece model"):
        load_tokenizer(tmp_path)
    metadata = json.loads((tmp_path / "effasr_tokenizer.json").read_text())
    (tmp_path / "effasr_tokenizer.json").write_text(json.dumps(metadata | {"version": 99}))
    with pytest.raises(ValueError, match="`version` must be 1, but is 99"):
        load_tokenizer(tmp_path)
    (tmp_path / "effasr_tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)


PROMPT_TOKENS = [
    *("<unk>", "<pad>", "<|endoftext|>", "<|startofcontext|>", "<|startoftranscript|>"),
    *("<|emo:undefined|>", "<|pnc|>", "<|nopnc|>", "<|noitn|>", "<|notimestamp|>"),
    *("<|nodiarize|>", "<|de|>", "<|en|>"),
]


def train_bpe(texts: list[str], specials: list[str], size: int) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_hugging_face(folder: Path, specials: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    train_bpe(ENGLISH + GERMAN, specials, 80).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    return folder


def test_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_hugging_face(tmp_path / "hf", PROMPT_TOKENS))
    assert isinstance(tokenizer, CanaryTokenizer)
    assert tokenizer.languages == ("de", "en")
    assert (tokenizer.pad_id, tokenizer.eos_id) == (1, 2)
    ids = tokenizer.encode("one two", "en")
    assert tokenizer.decode([tokenizer.specials["<|en|>"], *ids, tokenizer.eos_id]) == "one two"
    assert tokenizer.count_unknown(ids) == 0
    assert tokenizer.count_unknown(tokenizer.encode("ж", "en")) == 1
    expected = [
        *("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>"),
        *("<|de|>", "<|en|>", "<|nopnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"),
    ]
    prompt = tokenizer.prompt(Prompt("de", "en", "translate", punctuation=False))
    assert names(tokenizer, prompt) == expected  # type: ignore[arg-type]
    with pytest.raises(UnknownLanguageError, match="must be one of de, en, but is 'fr'"):
        tokenizer.encode("un", "fr")
    # The prompt of Cohere's model begins with a space, wherever its tokenizer is copied to.
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "cohere_asr"}')
    load_tokenizer(tmp_path / "hf").save(tmp_path / "copy")
    of_cohere = load_tokenizer(tmp_path / "copy")
    request = Prompt("de", "en", "translate", punctuation=False)
    assert [of_cohere.pieces()[token] for token in of_cohere.prompt(request)] == ["▁", *expected]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    folder = write_hugging_face(tmp_path / "hf", PROMPT_TOKENS)
    plain = load_tokenizer(folder)
    texts = ("one", "one two three four five six")
    expected = [plain.encode(text, "en") for text in texts]
    tokenizers = pytest.importorskip("tokenizers")
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=4)
    saved.save(str(folder / "tokenizer.json"))
    assert [load_tokenizer(folder).encode(text, "en") for text in texts] == expected


def test_hugging_face_tokenizer_is_saved_unchanged(tmp_path: Path) -> None:
    source = write_hugging_face(tmp_path / "hf", PROMPT_TOKENS)
    load_tokenizer(source).save(tmp_path / "copy")
    load_tokenizer(tmp_path / "copy").save(tmp_path / "copy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()


def test_other_hugging_face_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt tokens of canary-1b-v2, but lacks <pad>"):
        load_tokenizer(write_hugging_face(tmp_path / "a", ["<unk>"]))
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer that can be read"):
        load_tokenizer(folder)


def add_to(folder: Path, *tokens: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("first", "last", "pad_id"),
    [
        # As transformers writes them for RNN-T, TDT and CTC.
        (["<unk>"], ["<blank>"], 0),
        (["<unk>", "<pad>"], ["<blank>"], 1),
        (["<unk>"], ["<pad>"], 0),
        # What has prompts as well, and what has something after the blank.
        (PROMPT_TOKENS, ["<blank>"], 1),
        (["<unk>"], ["<blank>", "<pad>"], 0),
    ],
)
def test_a_parakeet_tokenizer_ends_with_the_blank(
    tmp_path: Path, first: list[str], last: list[str], pad_id: int
) -> None:
    tokenizer = load_tokenizer(add_to(write_hugging_face(tmp_path / "hf", first), *last))
    assert isinstance(tokenizer, ParakeetTokenizer)
    assert tokenizer.blank_id == tokenizer.vocab_size == 80
    assert tokenizer.pad_id == pad_id
    ids = tokenizer.encode("one two", "fr")  # of any language
    assert tokenizer.decode([*ids, 0]) == "one two"
    assert tokenizer.count_unknown([*ids, 0]) == 1
    with pytest.raises(ValueError, match=r"must be in 0 \.\. 79, but one is 80"):
        tokenizer.decode([80])
    spelled = tokenizer.encode(f"one {last[0]} two", "en")
    assert max(spelled) < 80
    assert tokenizer.decode(spelled).split() == ["one", "two"]
    assert tokenizer.prompt(Prompt("fr", "fr")) == [pad_id]
    tokenizer.save(tmp_path / "copy")
    assert load_tokenizer(tmp_path / "copy").vocab_size == 80


# ruff: noqa: RUF001 -- letters of many scripts look like Latin ones
SCRIPTS = {
    "fa": "می\u200cخواهم کتاب\u200cها را بخوانم",
    "ar": "العَرَبِيَّةُ لُغَةٌ جَمِيلَةٌ",
    "hi": "हिन्दी क़लम और क्\u200dष",
    "te": "తెలుగు భాష క్\u200cష",
    "km": "ភាសាខ្មែរ ស្រី\u200bល្អ",
    "th": "ภาษาไทยกำลังน้ำ",
    "ko": "한국어 텍스트",
    "ja": "日本語の ガラス ｶﾞﾗｽ ～ ㍿",
    "zh": "中文，文本。",
    "el": "Ελληνικά ΰ ᾳ",
    "tr": "İstanbul ığne ŞİŞLİ",
    "emoji": "👨\u200d👩\u200d👧 🇩🇪 ❤\ufe0f",
    "signs": "½ ² ™ ﬁ № …",
    "marks in another order": "q\u0307\u0323 a",
}


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_texts_come_back_as_they_are(tmp_path: Path, model_type: sentence_piece.ModelType) -> None:
    texts = {
        name: [*text.split(), unicodedata.normalize("NFC", text)] * 9
        for name, text in SCRIPTS.items()
    }
    train_tokenizer(texts, tmp_path, vocab_size=120, model_type=model_type)
    tokenizer = load_tokenizer(tmp_path)
    for name, text in SCRIPTS.items():
        composed = unicodedata.normalize("NFC", text)
        for form in (text, composed, unicodedata.normalize("NFD", text)):
            ids = tokenizer.encode(form, name)
            assert tokenizer.decode(ids) == composed
            assert tokenizer.count_unknown(ids) == 0


def test_the_model_alone_composes_characters(tmp_path: Path) -> None:
    """As NeMo reads it: without what effasr does to a text before."""
    tokenizer = train_tokenizer({"ko": ["한국어 fünf"] * 9}, tmp_path, vocab_size=20)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.models["ko"])
    decomposed = unicodedata.normalize("NFD", "한국어 fünf")
    assert processor.decode(processor.encode(decomposed)) == "한국어 fünf"


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("identity", "fu\u0308nf \u200c½"),
        ("nfc", "fünf \u200c½"),
        ("nfkc", "fünf \u200c1\u20442"),
    ],
)
def test_a_normalization_is_a_choice(tmp_path, normalization, expected) -> None:
    text, options = "fu\u0308nf \u200c½", {"vocab_size": 30, "model_type": "bpe"}
    train_tokenizer({"en": [text] * 9}, tmp_path, normalization=normalization, **options)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text, "en")) == expected


def test_unknown_tokens_and_changed_texts_are_counted(tmp_path: Path) -> None:
    tokenizer = train_tokenizer({"en": ENGLISH}, tmp_path, vocab_size=40, normalization="nfkc")
    fidelity = TextFidelity(tokenizer)
    for text in (*ENGLISH, "One two", "three  four", "ZZ"):
        fidelity.add(text, "en")
    assert (fidelity.unknown, fidelity.changed) == (2, 0)
    assert fidelity.characters == {"O": 1, "Z": 2}
    (line,) = fidelity.lines()
    assert "2 of " in line
    assert "are unknown to the tokenizer; commonest characters: 'Z' (2), 'O' (1)" in line
    fidelity.check(0.05, "--max-unknown")
    with pytest.raises(ValueError, match=r"over the 0.1 % of --max-unknown: 'Z' \(2\)"):
        fidelity.check(0.001, "--max-unknown")
    texts, options = {"en": ["a ½"] * 9}, {"vocab_size": 20, "normalization": "nfkc"}
    changing = TextFidelity(train_tokenizer(texts, tmp_path / "b", **options))
    changing.add("a ½", "en")
    (line,) = changing.lines()
    assert line == "1 of 1 texts come back changed from the tokenizer, such as 'a ½' as 'a 1⁄2'"
