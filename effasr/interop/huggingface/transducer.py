"""Checkpoints of transformers' Parakeet transducers: ``ParakeetForRNNT`` and ``ParakeetForTDT``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from effasr.interop.huggingface.config import (
    encoder_mapping,
    feature_mapping,
    read_encoder,
    read_features,
    read_transducer,
    transducer_mapping,
)
from effasr.interop.huggingface.files import (
    checked,
    read_config,
    read_preprocessor,
    read_weights,
    warn_about_layerdrop,
    warn_about_training_options,
    write,
    write_json,
)
from effasr.interop.huggingface.weights import from_transformers, to_transformers
from effasr.model.asr import ASRModel, ModelConfig

_log = logging.getLogger(__name__)

_MAX_SYMBOLS = 10
"""Labels of a frame: the default of transformers, and of decoding here."""


def import_parakeet_transducer(
    directory: str | Path,
) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory of ``ParakeetForRNNT`` or ``ParakeetForTDT``.

    Args:
        directory: Holds ``config.json``, ``model.safetensors`` or its shards with their index, and
            perhaps ``preprocessor_config.json`` or ``processor_config.json``.

    Returns:
        Configuration, vocabulary size and state for `ASRModel`; the weights are float32. The
        vocabulary does not count the blank, which must be the last class.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It is another kind of model, or has an option or weights that are unknown here.
    """
    directory = Path(directory)
    mapping = read_config(directory, "parakeet_rnnt", "parakeet_tdt")
    encoder = mapping.get("encoder_config") or {}
    classes, blank = mapping.get("vocab_size", 8193), mapping.get("blank_token_id", 8192)
    if blank != classes - 1:
        raise ValueError(
            f"`blank_token_id` must be the last class, {classes - 1}, but is {blank}: move its "
            "rows of `decoder.embedding` and `joint.head` there."
        )
    config = ModelConfig(
        features=read_features(read_preprocessor(directory), encoder.get("num_mel_bins", 80)),
        encoder=read_encoder(encoder),
        decoder=None,
        transducer=read_transducer(mapping),
    )
    warn_about_layerdrop(encoder)
    most = mapping.get("max_symbols_per_step", _MAX_SYMBOLS)
    # transformers does not look at it where there are durations.
    if most != _MAX_SYMBOLS and mapping["model_type"] == "parakeet_rnnt":
        _log.warning(
            "`max_symbols_per_step` = %s is not part of a model here: decode with `max_symbols`.",
            most,
        )
    state = from_transformers(read_weights(directory))
    return config, classes - 1, checked(config, classes - 1, state, directory)


def export_parakeet_transducer(model: ASRModel, directory: str | Path, *, pad_id: int = 2) -> str:
    """Write a directory that ``ParakeetForRNNT`` or ``ParakeetForTDT`` loads.

    A decoder, a CTC head, SpecAugment, and options of training that transformers has not are left
    out with a warning: they do not change what the exported model computes.

    Args:
        model: With a transducer; one with durations is a TDT.
        directory: Made if need be; files of the same names are replaced.
        pad_id: Fills the labels of a TDT; no text may have it. An RNN-T fills them with the blank.

    Returns:
        The class that loads it.

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
    # transformers counts the labels of an RNN-T that are not the blank, of a TDT that are no pad.
    ids = {
        "pad_token_id": blank if durations is None else pad_id,
        "decoder_start_token_id": blank,
    }
    config = {
        "architectures": [name],
        "model_type": "parakeet_rnnt" if durations is None else "parakeet_tdt",
        "encoder_config": encoder_mapping(model.config),
        **layers,
        "vocab_size": blank + 1,
        "blank_token_id": blank,
        "max_symbols_per_step": _MAX_SYMBOLS,
        "is_encoder_decoder": True,
        "dtype": "float32",
        "pad_token_id": ids["pad_token_id"],
    }
    _warn(model.config, name)
    parts = ("encoder.", "transducer.")
    state = {name: value for name, value in model.state_dict().items() if name.startswith(parts)}
    features = feature_mapping(model.config.features)
    directory = write(directory, config, to_transformers(state), features)
    generation: dict[str, Any] = dict(ids)
    if durations is not None:
        # Generation takes the likeliest of all rows: no duration is a token.
        generation["suppress_tokens"] = list(range(blank + 1, blank + 1 + len(durations)))
    write_json(directory / "generation_config.json", generation)
    return name


def _warn(config: ModelConfig, name: str) -> None:
    if config.decoder is not None:
        _log.warning("The decoder is not exported: transformers' %s has none.", name)
    if config.ctc:
        _log.warning("The CTC head is not exported: transformers' %s has none.", name)
    durations = config.transducer.durations if config.transducer is not None else None
    if durations is not None and durations != tuple(range(len(durations))):
        _log.warning(
            "transformers' generate will skip the wrong numbers of frames: it takes the places of "
            "the durations %s for their values.",
            list(durations),
        )
    warn_about_training_options(config, transducer=True)
