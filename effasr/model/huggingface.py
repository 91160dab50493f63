"""Checkpoints of transformers' Canary and Parakeet CTC models, read and written without it.

The models are the same function: logits, losses and gradients agree. Reading and writing need
only safetensors; transformers >= 5.23 loads what is written here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from effasr.data.augment import AugmentConfig
from effasr.model.asr import ASRModel, ModelConfig
from effasr.model.huggingface_config import (
    decoder_mapping,
    encoder_mapping,
    feature_mapping,
    read_decoder,
    read_encoder,
    read_features,
)
from effasr.model.huggingface_weights import from_transformers, to_transformers

_log = logging.getLogger(__name__)

# Tables that are computed, and a copy of the tied embedding.
_IGNORED = ("preprocessor.featurizer.", ".inv_freq", ".positional_embedding")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Tokens that transformers' generation must know; the defaults are canary-1b-v2's.

    Attributes:
        pad_id: Fills batches.
        bos_id: Begins a text.
        eos_id: Ends it.
        decoder_start_id: The first token of a prompt.
    """

    pad_id: int = 2
    bos_id: int = 4
    eos_id: int = 3
    decoder_start_id: int = 7


def import_canary(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory of ``CanaryForConditionalGeneration``, such as nvidia/canary-1b-v2's.

    Args:
        directory: Holds ``config.json``, ``model.safetensors`` or its shards with their index, and
            perhaps ``preprocessor_config.json`` or ``processor_config.json``.

    Returns:
        Configuration, vocabulary size and state for `ASRModel`; the weights are float32.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It is another kind of model, or has an option or weights that are unknown here.
    """
    directory = Path(directory)
    mapping = _read_config(directory, "canary")
    # transformers' own defaults for a Canary model that says nothing about its encoder.
    fallback = {"num_hidden_layers": 32, "num_mel_bins": 128, "scale_input": False}
    encoder = mapping.get("encoder_config") or fallback
    decoder = mapping.get("decoder_config") or {}
    tied = mapping.get("tie_word_embeddings", True)
    config = ModelConfig(
        features=read_features(_read_preprocessor(directory), encoder.get("num_mel_bins", 80)),
        encoder=read_encoder(encoder),
        decoder=read_decoder(decoder, tie_embeddings=tied),
    )
    _warn_about_layerdrop(encoder)
    weights = _read_weights(directory)
    if tied:
        weights.pop("proj_out.weight", None)
    vocab_size = mapping.get("vocab_size", 16384)
    return config, vocab_size, _checked(config, vocab_size, from_transformers(weights), directory)


def import_parakeet_ctc(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory of ``ParakeetForCTC``; see `import_canary`.

    The vocabulary size returned does not count the blank, which must be the last class.
    """
    directory = Path(directory)
    mapping = _read_config(directory, "parakeet_ctc")
    encoder = mapping.get("encoder_config") or {}
    classes, blank = mapping.get("vocab_size", 1025), mapping.get("pad_token_id", 1024)
    if blank != classes - 1:
        raise ValueError(
            f"`pad_token_id` must be the last class, {classes - 1}, as it is the blank, "
            f"but is {blank}."
        )
    config = ModelConfig(
        features=read_features(_read_preprocessor(directory), encoder.get("num_mel_bins", 80)),
        encoder=read_encoder(encoder),
        decoder=None,
        ctc=True,
    )
    _warn_about_layerdrop(encoder)
    state = from_transformers(_read_weights(directory))
    return config, classes - 1, _checked(config, classes - 1, state, directory)


def export_canary(
    model: ASRModel, directory: str | Path, tokens: SpecialTokens | None = None
) -> None:
    """Write a directory that ``CanaryForConditionalGeneration.from_pretrained`` loads.

    A CTC head, SpecAugment, and dropouts that transformers has not are left out with a warning:
    they do not change what the exported model computes.

    Args:
        model: With a decoder.
        directory: Made if need be; files of the same names are replaced.
        tokens: The tokenizer's; canary-1b-v2's by default.

    Raises:
        ValueError: transformers cannot express the model; the message says why.
    """
    tokens = SpecialTokens() if tokens is None else tokens
    ids = {
        "pad_token_id": tokens.pad_id,
        "bos_token_id": tokens.bos_id,
        "eos_token_id": tokens.eos_id,
    }
    for name, token in {**ids, "decoder_start_token_id": tokens.decoder_start_id}.items():
        if not 0 <= token < model.vocab_size:
            raise ValueError(
                f"`{name}` must be in the vocabulary of {model.vocab_size}, but is {token}: "
                "pass the tokenizer's special tokens."
            )
    decoder = {**decoder_mapping(model.config, model.vocab_size), **ids}
    generation = {**ids, "decoder_start_token_id": tokens.decoder_start_id}
    assert model.config.decoder is not None  # checked by decoder_mapping
    config = {
        "architectures": ["CanaryForConditionalGeneration"],
        "model_type": "canary",
        "encoder_config": encoder_mapping(model.config),
        "decoder_config": decoder,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.config.decoder.tie_embeddings,
        "is_encoder_decoder": True,
        "dtype": "float32",
        **generation,
    }
    state = {name: value for name, value in model.state_dict().items() if "ctc_head" not in name}
    if model.config.ctc:
        _log.warning("The CTC head is not exported: transformers' Canary has none.")
    _warn_about_training_options(model.config)
    weights = to_transformers(state)
    # transformers' output layer always has a bias.
    weights.setdefault("proj_out.bias", torch.zeros(model.vocab_size))
    directory = _write(directory, config, weights, model.config)
    _write_json(directory / "generation_config.json", generation)


def export_parakeet_ctc(model: ASRModel, directory: str | Path) -> None:
    """Write a directory that ``ParakeetForCTC.from_pretrained`` loads; see `export_canary`.

    Raises:
        ValueError: The model has no CTC head, or transformers cannot express it.
    """
    if not model.config.ctc:
        raise ValueError("`ctc` must be true for a Parakeet CTC model, but this one has no head.")
    config = {
        "architectures": ["ParakeetForCTC"],
        "model_type": "parakeet_ctc",
        "encoder_config": encoder_mapping(model.config),
        "vocab_size": model.vocab_size + 1,
        "pad_token_id": model.vocab_size,
        "dtype": "float32",
    }
    if model.config.decoder is not None:
        _log.warning("The decoder is not exported: transformers' Parakeet CTC has none.")
    _warn_about_training_options(model.config)
    parts = ("encoder.", "ctc_head.")
    state = {name: value for name, value in model.state_dict().items() if name.startswith(parts)}
    _write(directory, config, to_transformers(state), model.config)


def _read_config(directory: Path, model_type: str) -> dict[str, Any]:
    mapping = _read_json(directory / "config.json")
    if mapping.get("model_type") != model_type:
        raise ValueError(
            f"`model_type` must be {model_type}, but is {mapping.get('model_type')} in "
            f"{directory / 'config.json'}."
        )
    return mapping


def _read_preprocessor(directory: Path) -> dict[str, Any]:
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (directory / name).is_file():
            mapping = _read_json(directory / name)
            return mapping.get("feature_extractor", mapping)
    return {}


def _read_weights(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(_read_json(index)["weight_map"].values()))
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name}: there is no such file.")
        try:
            weights |= load_file(directory / name)
        except SafetensorError as error:
            raise ValueError(f"{directory / name} is damaged: {error}: copy it again.") from error
    return {
        name: value for name, value in weights.items() if not any(part in name for part in _IGNORED)
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error


def _checked(
    config: ModelConfig, vocab_size: int, state: dict[str, Tensor], directory: Path
) -> dict[str, Tensor]:
    with torch.device("meta"):
        expected = {
            name: value.shape for name, value in ASRModel(config, vocab_size).state_dict().items()
        }
    found = {name: value.shape for name, value in state.items()}
    wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"the weights in {directory} must be those that config.json asks for, but {len(wrong)} "
            f"are missing, unknown or of another shape: the first is {first}, expected "
            f"{_shown(expected.get(first))}, found {_shown(found.get(first))}."
        )
    return state


def _shown(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(tuple(shape))


def _warn_about_layerdrop(encoder: Mapping[str, Any]) -> None:
    if encoder.get("layerdrop"):
        _log.warning("`layerdrop` = %s is not used in training here.", encoder["layerdrop"])


def _warn_about_training_options(config: ModelConfig) -> None:
    dropped = [
        f"{part}.{name} = {getattr(options, name)}"
        for part, options, names in (
            ("encoder", config.encoder, ("residual_dropout",)),
            (
                "decoder",
                config.decoder,
                ("input_dropout", "residual_dropout", "activation_dropout"),
            ),
        )
        for name in names
        if getattr(options, name, 0.0)
    ]
    if config.augment != AugmentConfig():
        dropped.append("augment")
    if dropped:
        _log.warning("Options of training are not exported: %s.", ", ".join(dropped))


def _write(
    directory: str | Path, config: dict[str, Any], weights: dict[str, Tensor], model: ModelConfig
) -> Path:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "preprocessor_config.json", feature_mapping(model.features))
    return directory


def _write_json(path: Path, mapping: dict[str, Any]) -> None:
    path.write_text(json.dumps(mapping, indent=2, sort_keys=True) + "\n", encoding="utf-8")
