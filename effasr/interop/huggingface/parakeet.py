"""Checkpoints of transformers' ``ParakeetForCTC``, ``ParakeetForRNNT`` and ``ParakeetForTDT``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from effasr.interop.export_checks import warn_about_parts
from effasr.interop.huggingface.config import (
    encoder_mapping,
    feature_mapping,
    read_encoder,
    read_features,
    read_transducer,
    transducer_mapping,
)
from effasr.interop.huggingface.files import (
    read_config,
    read_preprocessor,
    read_state,
    read_weights,
    warn_about_training_options,
    write,
    write_json,
)
from effasr.interop.huggingface.weights import PARAKEET
from effasr.interop.weights import export_weights
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.transducer import TransducerConfig

_log = logging.getLogger(__name__)

_MAX_SYMBOLS = 10
"""Labels per frame: the default of transformers, and of decoding here."""


def import_parakeet_ctc(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read ``ParakeetForCTC``; see `effasr.interop.huggingface.checkpoint.import_model`."""
    mapping = read_config(Path(directory), "parakeet_ctc")
    classes, blank = mapping.get("vocab_size", 1025), mapping.get("pad_token_id", 1024)
    if blank != classes - 1:
        raise ValueError(
            f"`pad_token_id` must be the last class, {classes - 1}, as it is the blank, "
            f"but is {blank}."
        )
    return _import(Path(directory), mapping, classes - 1, None)


def import_parakeet_transducer(
    directory: str | Path,
) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a transducer; see `effasr.interop.huggingface.checkpoint.import_model`."""
    mapping = read_config(Path(directory), "parakeet_rnnt", "parakeet_tdt")
    classes, blank = mapping.get("vocab_size", 8193), mapping.get("blank_token_id", 8192)
    if blank != classes - 1:
        raise ValueError(
            f"`blank_token_id` must be the last class, {classes - 1}, but is {blank}: move its "
            "rows of `decoder.embedding` and `joint.head` there."
        )
    most = mapping.get("max_symbols_per_step", _MAX_SYMBOLS)
    # transformers ignores the field for a TDT.
    if most != _MAX_SYMBOLS and mapping["model_type"] == "parakeet_rnnt":
        _log.warning(
            "`max_symbols_per_step` = %s is not part of a model here: decode with `max_symbols`.",
            most,
        )
    return _import(Path(directory), mapping, classes - 1, read_transducer(mapping))


def _import(
    directory: Path,
    mapping: Mapping[str, Any],
    vocab_size: int,
    transducer: TransducerConfig | None,
) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    encoder = mapping.get("encoder_config") or {}
    config = ModelConfig(
        features=read_features(read_preprocessor(directory), encoder.get("num_mel_bins", 80)),
        encoder=read_encoder(encoder),
        decoder=None,
        ctc=transducer is None,
        transducer=transducer,
    )
    warn_about_layerdrop(encoder)
    weights = read_weights(directory)
    return config, vocab_size, read_state(config, vocab_size, weights, PARAKEET, directory)


def export_parakeet_ctc(model: ASRModel, directory: str | Path) -> str:
    """Write ``ParakeetForCTC``; see `effasr.interop.huggingface.checkpoint.export_model`.

    Raises:
        ValueError: The model has no CTC head, or transformers cannot express it.
    """
    if not model.config.ctc:
        raise ValueError("`ctc` must be true for a Parakeet CTC model, but this one has no head.")
    warn_about_parts(model.config, ("ctc",), "transformers' Parakeet CTC")
    warn_about_training_options(model.config)
    fields = {
        "model_type": "parakeet_ctc",
        "vocab_size": model.vocab_size + 1,
        "pad_token_id": model.vocab_size,
    }
    _export(model, directory, "ParakeetForCTC", fields, "ctc_head.")
    return "ParakeetForCTC"


def export_parakeet_transducer(model: ASRModel, directory: str | Path, *, pad_id: int = 2) -> str:
    """Write a transducer; see `effasr.interop.huggingface.checkpoint.export_model`.

    Args:
        model: Model with a transducer; one with durations is a TDT.
        directory: Created if needed; files of the same names are replaced.
        pad_id: Fills the labels of a TDT; no text may have it. An RNN-T fills them with the blank.

    Raises:
        ValueError: The model has no transducer, transformers cannot express it, or ``pad_id`` is
            not in its vocabulary.
    """
    layers = transducer_mapping(model.config)
    assert model.config.transducer is not None  # checked by transducer_mapping
    blank, durations = model.vocab_size, model.config.transducer.durations
    if durations is not None and not 0 <= pad_id < blank:
        raise ValueError(
            f"`pad_id` must be in the vocabulary of {blank}, but is {pad_id}: pass the tokenizer's."
        )
    name = "ParakeetForRNNT" if durations is None else "ParakeetForTDT"
    warn_about_parts(model.config, ("transducer",), f"transformers' {name}")
    if durations is not None and durations != tuple(range(len(durations))):
        _log.warning(
            "transformers' generate will skip the wrong numbers of frames: it takes the places of "
            "the durations %s for their values.",
            list(durations),
        )
    warn_about_training_options(model.config, transducer=True)
    # transformers counts as labels those that are not blank for an RNN-T, and those that are not
    # padding for a TDT.
    pad_id = blank if durations is None else pad_id
    fields = {
        "model_type": "parakeet_rnnt" if durations is None else "parakeet_tdt",
        **layers,
        "vocab_size": blank + 1,
        "blank_token_id": blank,
        "max_symbols_per_step": _MAX_SYMBOLS,
        "is_encoder_decoder": True,
        "pad_token_id": pad_id,
    }
    directory = _export(model, directory, name, fields, "transducer.")
    generation: dict[str, Any] = {"pad_token_id": pad_id, "decoder_start_token_id": blank}
    if durations is not None:
        # Generation takes the maximum over all rows, but the rows of durations are not tokens.
        generation["suppress_tokens"] = list(range(blank + 1, blank + 1 + len(durations)))
    write_json(directory / "generation_config.json", generation)
    return name


def _export(
    model: ASRModel, directory: str | Path, name: str, fields: dict[str, Any], head: str
) -> Path:
    """Write the files of an encoder with one head."""
    config = {
        "architectures": [name],
        "encoder_config": encoder_mapping(model.config),
        "dtype": "float32",
        **fields,
    }
    parts = ("encoder.", head)
    state = {key: value for key, value in model.state_dict().items() if key.startswith(parts)}
    features = feature_mapping(model.config.features)
    return write(directory, config, export_weights(state, PARAKEET), features)


def warn_about_layerdrop(encoder: Mapping[str, Any]) -> None:
    """Warn that training here does not use a configuration's layerdrop."""
    if encoder.get("layerdrop"):
        _log.warning("`layerdrop` = %s is not used in training here.", encoder["layerdrop"])
