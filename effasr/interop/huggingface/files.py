"""Files of transformers' checkpoints: configurations and weights, read, checked and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.interop.export_checks import warn_about_options
from effasr.interop.huggingface.special_tokens import SpecialTokens
from effasr.interop.weights import Renames, check_weights, import_weights, weight_shapes
from effasr.model.config import ModelConfig
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.files import plain_name

# Tables that effasr computes itself.
_IGNORED = ("preprocessor.featurizer.", ".inv_freq", ".positional_embedding")


def read_config(directory: Path, *model_types: str) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not valid JSON, or has another type.
    """
    mapping = read_json_object(directory / "config.json")
    if mapping.get("model_type") not in model_types:
        raise ValueError(
            f"`model_type` must be {' or '.join(model_types)}, but is {mapping.get('model_type')} "
            f"in {directory / 'config.json'}."
        )
    return mapping


def read_preprocessor(directory: Path) -> dict[str, Any]:
    """Return the settings of the feature extractor; empty if there is no such file."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (directory / name).is_file():
            mapping = read_json_object(directory / name)
            found = mapping.get("feature_extractor", mapping)
            if not isinstance(found, dict):
                raise ValueError(f"`feature_extractor` in {directory / name} must be a mapping.")
            return found
    return {}


def read_generation(directory: Path) -> dict[str, Any]:
    """Return the settings of generation; empty if there is no such file."""
    path = directory / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read ``model.safetensors``, or its shards with their index.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged.
    """
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        listed = read_json_object(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"`weight_map` in {index} must be a mapping of weights to files.")
        where = f"a file of `weight_map` in {index}"
        names = sorted({plain_name(name, where) for name in listed.values()})
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory / name}: there is no such file.")
        try:
            weights |= load_file(directory / name)
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"{directory / name} is damaged: {error}: copy it again.") from error
    return {
        name: value for name, value in weights.items() if not any(part in name for part in _IGNORED)
    }


def read_state(
    config: ModelConfig,
    vocab_size: int,
    weights: Mapping[str, Tensor],
    renames: Renames,
    directory: Path,
) -> dict[str, Tensor]:
    """Convert weights to the state of an `ASRModel`.

    Raises:
        ValueError: A weight is missing, unknown or of another shape.
    """
    shapes = weight_shapes(config, vocab_size)
    state, unknown = import_weights(weights, shapes, renames)
    check_weights(state | unknown, shapes, directory)
    return state


def special_ids(tokens: SpecialTokens, vocab_size: int) -> dict[str, int]:
    """Return the fields of special tokens in a configuration.

    Raises:
        ValueError: One is not in the vocabulary.
    """
    ids = {
        "pad_token_id": tokens.pad_id,
        "bos_token_id": tokens.bos_id,
        "eos_token_id": tokens.eos_id,
        "decoder_start_token_id": tokens.decoder_start_id,
    }
    for name, token in ids.items():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"`{name}` must be in the vocabulary of {vocab_size}, but is {token}: pass the "
                "tokenizer's special tokens."
            )
    return ids


def warn_about_training_options(
    config: ModelConfig, *, transducer: bool = False, dropouts: bool = True
) -> None:
    """Warn about training options that transformers does not have.

    Args:
        config: Configuration of the exported model.
        transducer: Whether its transducer is exported.
        dropouts: Whether to name dropouts that Canary and Parakeet models do not have.
    """
    dropped = [
        f"{part}.{name} = {getattr(options, name)}"
        for part, options, names in (
            ("encoder", config.encoder, ("residual_dropout",)),
            (
                "decoder",
                config.decoder,
                ("input_dropout", "residual_dropout", "activation_dropout"),
            ),
            (
                "transducer",
                config.transducer if transducer else None,
                ("dropout", "fastemit", "sigma"),
            ),
        )
        for name in names
        if dropouts and getattr(options, name, 0.0)
    ]
    if config.spec_augment != SpecAugmentConfig():
        dropped.append("spec_augment")
    warn_about_options(dropped)


def write(
    directory: str | Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    features: dict[str, Any],
) -> Path:
    """Write configuration, weights and feature settings; the folder is created if needed."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    write_json(directory / "preprocessor_config.json", features)
    return directory


def write_json(path: Path, mapping: dict[str, Any]) -> None:
    """Write a JSON file as transformers formats its own."""
    path.write_text(json.dumps(mapping, indent=2, sort_keys=True) + "\n", encoding="utf-8")
