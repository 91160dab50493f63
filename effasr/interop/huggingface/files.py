"""Files of transformers' checkpoints: configurations and weights, read, checked and written."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.model.asr import ASRModel, ModelConfig

_log = logging.getLogger(__name__)

# Tables that are computed, and a copy of the tied embedding.
_IGNORED = ("preprocessor.featurizer.", ".inv_freq", ".positional_embedding")


def read_config(directory: Path, *model_types: str) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no JSON, or of none of these types.
    """
    mapping = _read_json(directory / "config.json")
    if mapping.get("model_type") not in model_types:
        raise ValueError(
            f"`model_type` must be {' or '.join(model_types)}, but is {mapping.get('model_type')} "
            f"in {directory / 'config.json'}."
        )
    return mapping


def read_preprocessor(directory: Path) -> dict[str, Any]:
    """The settings of the feature extractor; empty where a model comes without."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (directory / name).is_file():
            mapping = _read_json(directory / name)
            return mapping.get("feature_extractor", mapping)
    return {}


def read_generation(directory: Path) -> dict[str, Any]:
    """What generation must know; empty where a model comes without."""
    path = directory / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read ``model.safetensors``, or its shards with their index.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged.
    """
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


def checked(
    config: ModelConfig,
    vocab_size: int,
    state: dict[str, Tensor],
    directory: Path,
    *,
    described: str = "config.json",
) -> dict[str, Tensor]:
    """The state, if it is that of a model of this configuration.

    Raises:
        ValueError: It is not; the message names the first difference.
    """
    with torch.device("meta"):
        expected = {
            name: value.shape for name, value in ASRModel(config, vocab_size).state_dict().items()
        }
    found = {name: value.shape for name, value in state.items()}
    wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"the weights in {directory} must be those that {described} asks for, but {len(wrong)} "
            f"are missing, unknown or of another shape: the first is {first}, expected "
            f"{_shown(expected.get(first))}, found {_shown(found.get(first))}."
        )
    return state


def _shown(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else str(tuple(shape))


def warn_about_layerdrop(encoder: Mapping[str, Any]) -> None:
    """Say that it is not used here, if a configuration asks for it."""
    if encoder.get("layerdrop"):
        _log.warning("`layerdrop` = %s is not used in training here.", encoder["layerdrop"])


def warn_about_training_options(
    config: ModelConfig, *, transducer: bool = False, dropouts: bool = True
) -> None:
    """Name what training uses and transformers has not.

    Args:
        config: Of the model that is exported.
        transducer: Whether its transducer is exported.
        dropouts: Whether those of a Canary or a Parakeet are lost.
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
    if dropped:
        _log.warning("Options of training are not exported: %s.", ", ".join(dropped))


def write(
    directory: str | Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    features: dict[str, Any],
) -> Path:
    """Write configuration, weights and settings of the features; the folder is made if need be."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    write_json(directory / "preprocessor_config.json", features)
    return directory


def write_json(path: Path, mapping: dict[str, Any]) -> None:
    """Write a JSON file as transformers formats its own."""
    path.write_text(json.dumps(mapping, indent=2, sort_keys=True) + "\n", encoding="utf-8")
