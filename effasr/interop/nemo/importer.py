"""Import of NeMo's models from ``.nemo`` files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.data.features.log_mel import LogMel
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import NeMoTokenizer
from effasr.interop.nemo.archive import CONFIG, NemoArchive, read_archive
from effasr.interop.nemo.config import HYBRID, MULTITASK, model_class, read_model
from effasr.interop.nemo.tokenizer import read_tokenizer
from effasr.interop.nemo.weights import (
    AFTER_DROPOUT,
    from_nemo_order,
    position_table,
    renames,
)
from effasr.interop.weights import check_weights, import_weights, weight_shapes
from effasr.model.config import ModelConfig
from effasr.untrusted.documents import WRONG_VALUES

_log = logging.getLogger(__name__)

_MAX_SYMBOLS = 10
"""Labels per frame: the default of decoding here."""

_BANDS, _WINDOW = "preprocessor.featurizer.fb", "preprocessor.featurizer.window"
_POSITIONS = "transf_decoder._embedding.position_embedding.pos_enc"
_TIED = "transf_decoder._embedding.token_embedding.weight"
_OUTPUT = "log_softmax.mlp.layer0.weight"
_START = "transducer.predictor.embedding.weight"
# A weight that is never used, and a table that older versions stored.
_IGNORED = ("transf_decoder._embedding.token_type_embedding.weight", "encoder.pos_enc.pe")


@dataclass(frozen=True, slots=True)
class NemoModel:
    """A converted model of NeMo.

    Attributes:
        config: Architecture of the model.
        vocab_size: Classes without the blank; a Canary may have more than its tokenizer has tokens.
        state: Float32 weights for `ASRModel.from_state_dict`.
        tokenizer: Tokenizer of the model.
        prompt: Default prompt of the model.
    """

    config: ModelConfig
    vocab_size: int
    state: dict[str, Tensor]
    tokenizer: NeMoTokenizer
    prompt: Prompt


def import_nemo(path: str | Path) -> NemoModel:
    """Read a ``.nemo`` file, or a folder with its content.

    The classes are `effasr.interop.nemo.config.CLASSES`: FastConformer CTC models, transducers
    (RNN-T and TDT), hybrids of both, and Canary. A warning lists training options that are not used
    here.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, of another class, or has an option or weights that are not
            supported here.
    """
    path = Path(path)
    archive = read_archive(path)
    try:
        return _read(archive)
    except ValueError as error:
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise ValueError(f"{where}{error}") from error
    except WRONG_VALUES as error:
        raise ValueError(
            f"{path}: a value of its configuration or a weight is of a wrong kind "
            f"({type(error).__name__}: {error}): copy the file again."
        ) from error


def _read(archive: NemoArchive) -> NemoModel:
    name = model_class(archive.config)
    config, unused = read_model(archive.config)
    is_canary = name == MULTITASK
    prompt_format = str(archive.config.get("prompt_format")) if is_canary else None
    tokenizer = read_tokenizer(archive, prompt_format)
    weights = {name.replace(*AFTER_DROPOUT): value for name, value in archive.weights.items()}
    vocab_size = tokenizer.vocab_size
    if is_canary and _TIED in weights:
        # NeMo rounds the number of classes up.
        vocab_size = max(len(weights[_TIED]), vocab_size)
    shapes = weight_shapes(config, vocab_size)
    state, rest = import_weights(weights, shapes, renames(hybrid=name == HYBRID), from_nemo_order)
    _check_tables(config, rest, weights.get(_TIED))
    if _START in state and state[_START][-1].any():
        raise ValueError(
            "`decoder.prediction.embed.weight` must be zero in its last row, the blank's, as NeMo "
            "starts a text from zeros, but is not."
        )
    known = (_BANDS, _WINDOW, _POSITIONS, _OUTPUT, *_IGNORED)
    unknown = {key: value for key, value in rest.items() if key not in known}
    check_weights(state | unknown, shapes, archive.path, CONFIG)
    _warn(archive.config, unused)
    return NemoModel(config, vocab_size, state, tokenizer, _prompt(archive.config, tokenizer))


def _check_tables(config: ModelConfig, rest: Mapping[str, Tensor], tied: Tensor | None) -> None:
    """Check that NeMo's saved tables equal those that are computed, or shared, here.

    Args:
        config: The architecture.
        rest: NeMo's weights that are none of ours.
        tied: The token embedding.
    """
    features = LogMel(config.features)
    expected = {_BANDS: features.filterbank.T[None], _WINDOW: features.window}
    if config.decoder is not None and _POSITIONS in rest:
        expected[_POSITIONS] = position_table(len(rest[_POSITIONS]), config.decoder.width)
    if tied is not None:
        expected[_OUTPUT] = tied.float()
    for name, wanted in expected.items():
        if name not in rest:
            continue
        found, tolerance = rest[name], 4 * torch.finfo(rest[name].dtype).eps
        if found.shape != wanted.shape or not torch.allclose(
            found.float(), wanted, tolerance, 1e-6
        ):
            what = "an output layer of its own" if name == _OUTPUT else "other features"
            raise ValueError(
                f"`{name}` must be what the configuration says, but is not: the file was made with "
                f"{what}, or changed."
            )


def _prompt(config: Mapping[str, Any], tokenizer: NeMoTokenizer) -> Prompt:
    """NeMo's default prompt; else English, else the tokenizer's first language."""
    language = "en"
    if tokenizer.languages and language not in tokenizer.languages:
        language = tokenizer.languages[0]
    slots: Mapping[str, Any] = {}
    for turn in config.get("prompt_defaults") or ():
        if turn.get("role") == "user":
            slots = turn.get("slots") or {}
    source, target = (
        str(slots.get(key) or language).removeprefix("<|").removesuffix("|>")
        for key in ("source_lang", "target_lang")
    )
    if source not in tokenizer.sources or target not in tokenizer.languages:
        source = target = language
    return Prompt(
        source,
        target,
        "transcribe" if source == target else "translate",
        str(slots.get("pnc", "pnc")) in ("yes", "Yes", "true", "True", "1", "pnc", "<|pnc|>"),
    )


def _warn(config: Mapping[str, Any], unused: list[str]) -> None:
    if unused:
        _log.warning("Options of training that are not used here: %s.", ", ".join(unused))
    most = ((config.get("decoding") or {}).get("greedy") or {}).get("max_symbols")
    if most not in (None, _MAX_SYMBOLS):
        _log.warning(
            "`decoding.greedy.max_symbols` = %s is not part of a model here: decode with "
            "`max_symbols`.",
            most,
        )
