"""SentencePiece models in transformers: the same ids for a text, the same text for ids."""

import pytest

from effasr.data.tokenizer.sentence_piece import SHARED, SentencePieceTokenizer, train_model
from effasr.interop.huggingface.sentence_piece import export_sentence_piece

transformers = pytest.importorskip("transformers")

TEXTS = [
    *("a small boat", "Ärger über  Öl", "  tabs\tand spaces ", "ﬁne ½ ①", "x" * 40, "日本", "it's"),
    *(
        "the boat sails over the sea",
        "she sells sea shells by the sea shore",
        "e\u0301 \u200b joined",
    ),
]


@pytest.mark.parametrize("normalization", ["identity", "nfc", "nfkc"])
@pytest.mark.parametrize(
    ("kind", "byte_fallback"),
    [("unigram", False), ("unigram", True), ("bpe", False), ("bpe", True)],
)
def test_ids_and_texts(tmp_path, kind, byte_fallback, normalization):
    size = 330 if byte_fallback else 60
    model = train_model(
        SHARED, TEXTS, size, kind, byte_fallback=byte_fallback, normalization=normalization
    )
    ours = SentencePieceTokenizer({SHARED: model}, sharing=("en",), normalization=normalization)
    size = ours.vocab_size
    export_sentence_piece(ours, tmp_path, pad_id=size, bos_id=2, eos_id=ours.eos_id)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.pad_token_id, theirs.eos_token_id) == (size + 1, size, ours.eos_id)
    for text in TEXTS:
        ids = ours.encode(text, "en")
        assert theirs(text, add_special_tokens=False).input_ids == ids, text
        spoken = [size, *(part for token in ids for part in (token, token, size))]
        text = ours.decode(ids).replace(" ⁇ ", "<unk>").strip()
        assert theirs.decode(spoken).strip() == text
        prompt = list(ours.specials.values())
        decoded = theirs.decode([*prompt, *ids], group_tokens=False, skip_special_tokens=True)
        assert decoded.strip() == text.replace("<unk>", "").strip()  # a special token, too


def test_an_old_transformers_is_named(tmp_path, monkeypatch):
    converter = pytest.importorskip("transformers.convert_slow_tokenizer").SpmConverter
    monkeypatch.delattr(converter, "build_tokenizer_from_spm_proto")
    ours = SentencePieceTokenizer({SHARED: train_model(SHARED, TEXTS, 60, "unigram")})
    with pytest.raises(ImportError, match=r"transformers must be at least 5.23, but is 5\."):
        export_sentence_piece(ours, tmp_path, pad_id=0, bos_id=2, eos_id=ours.eos_id)


def test_several_models_are_refused(tmp_path):
    models = {name: train_model(name, TEXTS, 60, "unigram") for name in ("de", "en")}
    with pytest.raises(ValueError, match="it has a model for each of de, en"):
        export_sentence_piece(
            SentencePieceTokenizer(models), tmp_path, pad_id=0, bos_id=2, eos_id=1
        )
