"""Files of transformers' checkpoints: configurations and weights, read, checked and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from effasr.untrusted.documents import read_json_object
from effasr.untrusted.files import plain_name

if TYPE_CHECKING:
    from effasr.interop.tables import Renames
    from effasr.model.asr import ASRModel
    from effasr.model.config import ModelConfig

# Tables that effasr computes itself.
_IGNORED = ("preprocessor.featurizer.", ".inv_freq", ".positional_embedding")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Token ids for transformers' generation; the defaults are canary-1b-v2's."""

    pad_id: int = 2
    bos_id: int = 4
    eos_id: int = 3
    decoder_start_id: int = 7
    # Tokens of the tokenizer; generation suppresses further classes. None for the model's classes.
    count: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)  # For generation_config.json

    def unused_classes(self, vocab_size: int) -> list[int]:
        """The classes of a model that no token has."""
        return list(range(vocab_size if self.count is None else self.count, vocab_size))

    def fields(self, vocab_size: int) -> dict[str, int]:
        """The fields of a configuration, after checks."""
        ids = {
            "pad_token_id": self.pad_id,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
            "decoder_start_token_id": self.decoder_start_id,
        }
        for name, token in ids.items():
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"`{name}` must be in the vocabulary of {vocab_size}, but is {token}: pass the "
                    "tokenizer's special tokens."
                )
        return ids


@dataclass(frozen=True, slots=True)
class Content:
    """What the files of a checkpoint hold; to write, only weights that have no name in effasr."""

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelClass:
    """Reads and writes a class: the output that it has, its weights, and its configuration."""

    name: str
    part: str  # Field of ModelConfig
    weights: Renames
    read: Callable[[Content], tuple[ModelConfig, int]]  # May remove weights that are computed
    write: Callable[[ASRModel, SpecialTokens], Content]

    @property
    def short_name(self) -> str:
        """Such as Whisper or ParakeetForTDT."""
        return self.name.removesuffix("ForConditionalGeneration")


def read_config(directory: Path, *model_types: str) -> dict[str, Any]:
    """Read ``config.json`` of one of these types."""
    mapping = read_json_object(directory / "config.json")
    if mapping.get("model_type") not in model_types:
        raise ValueError(
            f"`model_type` must be {' or '.join(model_types)}, but is {mapping.get('model_type')} "
            f"in {directory / 'config.json'}."
        )
    return mapping


def read_preprocessor(directory: Path) -> dict[str, Any]:
    """The settings of the feature extractor; empty if there is no such file."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (directory / name).is_file():
            mapping = read_json_object(directory / name)
            extractor = mapping.get("feature_extractor", mapping)
            if not isinstance(extractor, dict):
                raise ValueError(f"`feature_extractor` in {directory / name} must be a mapping.")
            return extractor
    return {}


def read_generation(directory: Path) -> dict[str, Any]:
    """The settings of generation; empty if there is no such file."""
    path = directory / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read ``model.safetensors``, or its shards with their index."""
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        files = read_json_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"`weight_map` in {index} must be a mapping of weights to files.")
        where = f"a file of `weight_map` in {index}"
        names = sorted({plain_name(name, where) for name in files.values()})
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


def write_json(path: Path, mapping: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers formats its own."""
    path.write_text(json.dumps(mapping, indent=2, sort_keys=True) + "\n", encoding="utf-8")
