"""Reading and writing of the tokenizer section of NeMo's configurations."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sentencepiece

from effasr.checks import check
from effasr.data.tokenizer import NeMoTokenizer, SentencePieceTokenizer, Tokenizer
from effasr.data.tokenizer.nemo import SPECIAL, UNIFIED
from effasr.interop.nemo.archive import NemoArchive, file_reference

_MODULE = "nemo.collections.common.tokenizers.canary_tokenizer."
_AGGREGATE, _UNIFIED = "CanaryTokenizer", "CanaryBPETokenizer"


def read_tokenizer(archive: NemoArchive, prompt_format: str | None) -> NeMoTokenizer:
    """The tokenizer of a model; ``prompt_format`` of a Canary, None without prompts."""
    section = archive.config.get("tokenizer")
    if not isinstance(section, Mapping):
        raise ValueError(f"`tokenizer` must be a mapping, but is {section!r}.")
    kind = str(section.get("type")).lower()
    custom = section.get("custom_tokenizer") or {}
    name = str(custom.get("_target_")).rsplit(".", 1)[-1] if custom else None
    expected = {"agg": _AGGREGATE, "bpe": _UNIFIED}.get(kind)
    if name not in ((None, expected) if prompt_format is None else (expected,)):
        raise ValueError(
            f"`tokenizer.custom_tokenizer._target_` must be {expected} where `tokenizer.type` is "
            f"{kind}, but is {custom.get('_target_')}."
        )
    if kind == "agg":
        languages = section.get("langs")
        if not isinstance(languages, Mapping) or not languages:
            raise ValueError(f"`tokenizer.langs` must be a mapping, but is {languages!r}.")
        models = {
            str(language): _read_model(archive, f"tokenizer.langs.{language}", part)
            for language, part in languages.items()
        }
    else:
        models = {UNIFIED: _read_model(archive, "tokenizer", section)}
    return NeMoTokenizer(models, prompt_format)


def _read_model(archive: NemoArchive, where: str, section: Any) -> bytes:
    kind = section.get("type") if isinstance(section, Mapping) else section
    rule = "be bpe, a SentencePiece model, or agg, several of them"
    check(str(kind).lower() == "bpe", f"{where}.type", rule, kind)
    path = section.get("model_path") or "tokenizer.model"
    return archive.file(f"{where}.model_path", path)


@dataclass(frozen=True, slots=True)
class NemoTokens:
    """A tokenizer in NeMo's form."""

    section: dict[str, Any]  # The configuration
    files: dict[str, bytes]  # Files that it names
    vocabulary: list[str]  # NeMo's tokens, in the order of their ids
    ids: list[int | None]  # Our id of each of them; None if there is none
    prompt_format: str | None  # Prompt format of a Canary; None without prompts


def nemo_tokens(tokenizer: Tokenizer, *, prompts: bool) -> NemoTokens:
    """Express a tokenizer by NeMo's classes, without prompt tokens unless ``prompts``."""
    if isinstance(tokenizer, NeMoTokenizer):
        return _own(tokenizer, prompts)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _ours(tokenizer, prompts)
    raise ValueError(
        f"`tokenizer` must be SentencePiece's for a .nemo file, but is a {type(tokenizer).__name__}"
        ", and NeMo cannot read a tokenizer.json: train with the tokenizer of a .nemo file or of "
        "`effasr tokenizer`, or export with --format huggingface."
    )


def _own(tokenizer: NeMoTokenizer, prompts: bool) -> NemoTokens:
    if prompts and tokenizer.prompt_format is None:
        raise ValueError(
            "`tokenizer` must have the tokens of a Canary's prompts, but is that of a CTC model "
            "or a transducer: NeMo cannot ask its EncDecMultiTaskModel without."
        )
    kind = _UNIFIED if tokenizer.is_unified else _AGGREGATE
    section, files = _section(tokenizer.models, kind if tokenizer.prompt_format else None)
    vocabulary = [piece for pieces in tokenizer.pieces_by_model for piece in pieces]
    ids: list[int | None] = list(range(len(vocabulary)))
    return NemoTokens(section, files, vocabulary, ids, tokenizer.prompt_format if prompts else None)


def _ours(tokenizer: SentencePieceTokenizer, prompts: bool) -> NemoTokens:
    """Languages keep their order; only the special tokens differ."""
    specials = set(tokenizer.specials.values())
    ids: list[int | None] = [x for x in range(tokenizer.vocab_size) if x not in specials]
    if not prompts and not (tokenizer.is_shared and tokenizer.added):
        models = tokenizer.models
        if len(models) == 1:
            models = {UNIFIED: next(iter(models.values()))}
        section, files = _section(models, None)
        return NemoTokens(section, files, _pieces(models), ids, None)
    if tokenizer.is_shared:
        raise ValueError(
            "`tokenizer` must have a model for each language, because NeMo finds the pieces of "
            "texts by their language, but its languages share one: export with --format "
            "huggingface."
        )
    models = {SPECIAL: _special_model(tokenizer.specials), **tokenizer.models}
    section, files = _section(models, _AGGREGATE)
    special: list[int | None] = [
        tokenizer.specials.get(piece) for piece in _pieces({SPECIAL: models[SPECIAL]})
    ]
    return NemoTokens(section, files, _pieces(models), special + ids, "canary")


def _special_model(tokens: Sequence[str] | Mapping[str, int]) -> bytes:
    """A SentencePiece model of these tokens as in NeMo: first <unk>, last a space."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tokens),
        model_writer=model,
        vocab_size=len(tokens) + 2,
        model_type="bpe",
        normalization_rule_name="identity",
        user_defined_symbols=list(tokens),
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return model.getvalue()


def _section(
    models: Mapping[str, bytes], custom: str | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    files: dict[str, bytes] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        pieces = _pieces({name: model})
        # NeMo copies these two files of a SentencePiece model without reading them.
        texts = {"vocab_path": "\n".join(pieces) + "\n", "spe_tokenizer_vocab": _listed(model)}
        parts[name] = {"dir": None, "type": "bpe"}
        for key, end, content in (
            ("model_path", "tokenizer.model", model),
            ("vocab_path", "vocab.txt", texts["vocab_path"].encode()),
            ("spe_tokenizer_vocab", "tokenizer.vocab", texts["spe_tokenizer_vocab"].encode()),
        ):
            # Different files have different names, and the same model always gives the same file.
            digest = hashlib.sha256(f"{name}\n{key}\n".encode() + content).hexdigest()[:32]
            files[f"{digest}_{end}"] = content
            parts[name][key] = file_reference(f"{digest}_{end}")
    if list(models) == [UNIFIED]:
        section, argument = parts[UNIFIED], "model_path"
    else:
        section, argument = {"dir": None, "type": "agg", "langs": parts}, "tokenizers"
    if custom:
        section["custom_tokenizer"] = {"_target_": _MODULE + custom, argument: None}
    return section, files


def _pieces(models: Mapping[str, bytes]) -> list[str]:
    return [
        processor.id_to_piece(index)
        for processor in map(_processor, models.values())
        for index in range(processor.vocab_size())
    ]


def _listed(model: bytes) -> str:
    """The pieces with their scores, as SentencePiece writes them next to a model."""
    processor = _processor(model)
    return "".join(
        f"{processor.id_to_piece(index)}\t{processor.get_score(index):g}\n"
        for index in range(processor.vocab_size())
    )


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)
