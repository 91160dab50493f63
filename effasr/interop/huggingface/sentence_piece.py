"""A SentencePiece model as the ``tokenizer.json`` that transformers reads."""

from pathlib import Path
from typing import Any

from effasr.data.tokenizer.hugging_face import SETTINGS_FILE, TOKENIZER_FILE
from effasr.data.tokenizer.sentence_piece import AggregateTokenizer
from effasr.interop.huggingface.files import write_json

_CONTROL = 3  # type of a piece that no text has
_BLANK = "<blank>"


def export_sentence_piece(
    tokenizer: AggregateTokenizer, folder: Path, *, pad_id: int, bos_id: int, eos_id: int
) -> None:
    """Write ``tokenizer.json`` with the ids of ``tokenizer``, and its settings.

    A ``pad_id`` past the vocabulary is the blank of CTC or of a transducer.

    Raises:
        ValueError: ``tokenizer`` has several models, whose pieces one vocabulary cannot hold.
        ImportError: transformers is not installed, or is too old.
    """
    if len(tokenizer.models) > 1:
        raise ValueError(f"it has a model for each of {', '.join(tokenizer.models)}")
    from sentencepiece import sentencepiece_model_pb2
    from transformers import __version__
    from transformers.convert_slow_tokenizer import SpmConverter

    if not hasattr(SpmConverter, "build_tokenizer_from_spm_proto"):
        raise ImportError(f"transformers must be at least 5.23, but is {__version__}")
    (model,) = tokenizer.models.values()
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    names = tokenizer.pieces()
    specials = names[: len(names) - len(proto.pieces)]
    pieces = [type(proto.pieces[0])(piece=name, score=0.0, type=_CONTROL) for name in specials]
    pieces += proto.pieces
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    proto.trainer_spec.unk_id += len(specials)
    is_bpe = proto.trainer_spec.model_type == 2
    vocabulary = [(piece.piece, piece.score) for piece in pieces]
    converted = SpmConverter.build_tokenizer_from_spm_proto(
        proto, {name: n for n, (name, _) in enumerate(vocabulary)} if is_bpe else vocabulary
    )
    if pad_id == len(names):
        names.append(_BLANK)
        specials.append(_BLANK)
    converted.add_special_tokens(specials)
    # Its `save` raises bare exceptions where a disk is full.
    (folder / TOKENIZER_FILE).write_text(converted.to_str(pretty=True), "utf-8")
    settings = {
        # Of CTC, it leaves out blanks and repeated tokens.
        "tokenizer_class": "ParakeetTokenizer" if _BLANK in names else "PreTrainedTokenizerFast",
        "unk_token": proto.trainer_spec.unk_piece,
        **{
            f"{kind}_token": names[number]
            for kind, number in {"pad": pad_id, "bos": bos_id, "eos": eos_id}.items()
            if number < len(names)
        },
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / SETTINGS_FILE, settings)
