"""Files of transformers' checkpoints: configurations and weights, read, checked and written."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from effasr.checks import check
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.files import plain_name
from effasr.untrusted.mistaken import wrong_file
from effasr.untrusted.tensors import named_tensors

if TYPE_CHECKING:
    from effasr.interop.tables import Renames
    from effasr.model.asr import ASRModel
    from effasr.model.config import ModelConfig

SAFETENSORS = ("model.safetensors",)
WEIGHT_FILES = (*SAFETENSORS, "pytorch_model.bin")
# Tables that effasr computes itself.
_IGNORED = ("preprocessor.featurizer.", ".inv_freq", ".positional_embedding")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Token ids for transformers' generation; the defaults are canary-1b-v2's."""

    pad_id: int = 2
    bos_id: int = 4
    eos_id: int = 3
    decoder_start_id: int = 7
    blank_id: int = 0  # Place of the blank among the classes of a wav2vec 2.0
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
            rule = f"be in the vocabulary of {vocab_size}"
            check(0 <= token < vocab_size, name, rule, token, "pass the tokenizer's special tokens")
        return ids


@dataclass(frozen=True, slots=True)
class Content:
    """What the files of a checkpoint hold; to write, only weights that have no name in effasr."""

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelClass:
    """Reads and writes a class: the output that it has, its weights, and its configuration."""

    name: str
    part: str  # Field of ModelConfig
    weights: "Renames"
    read: "Callable[[Content], tuple[ModelConfig, int]]"  # May remove weights that are computed
    write: "Callable[[ASRModel, SpecialTokens], Content]"

    @property
    def short_name(self) -> str:
        """Such as Whisper or ParakeetForTDT."""
        return self.name.removesuffix("ForConditionalGeneration")


def read_config(directory: Path, *model_types: str) -> dict[str, Any]:
    """Read ``config.json`` of one of these types."""
    mapping = read_json_object(directory / "config.json")
    if mapping.get("model_type") == "moonshine_streaming":
        other = "its features and its encoder are others: import a Moonshine that does not stream"
        raise ValueError(f"{directory}: a streaming Moonshine is not read, as {other}.")
    if mapping.get("model_type") not in model_types:
        raise ValueError(
            f"`model_type` must be {' or '.join(model_types)}, but is {mapping.get('model_type')} "
            f"in {directory / 'config.json'}."
        )
    names = mapping.get("architectures")
    for name in names if isinstance(names, list) else ():
        if str(name).endswith(("Classification", "XVector")):
            raise ValueError(
                f"`architectures` must be of a model that transcribes, but is {name} in "
                f"{directory / 'config.json'}: import the model that it was fine-tuned from."
            )
    return mapping


def read_preprocessor(directory: Path) -> dict[str, Any]:
    """The settings of the processor and of its feature extractor; empty if there is no file."""
    settings: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (directory / name).is_file():
            mapping = read_json_object(directory / name)
            extractor = mapping.get("feature_extractor", {})
            if not isinstance(extractor, dict):
                raise ValueError(f"`feature_extractor` in {directory / name} must be a mapping.")
            settings |= mapping | extractor
    return settings


def read_generation(directory: Path) -> dict[str, Any]:
    """The settings of generation; empty if there is no such file."""
    path = directory / "generation_config.json"
    return read_json_object(path) if path.is_file() else {}


_FORCED = "forced_decoder_ids"


def read_prompt_settings(directory: Path) -> dict[str, Any]:
    """The settings of generation, else those of an older configuration and of the tokenizer."""
    config = read_json_object(directory / "config.json")
    settings = read_generation(directory) or config
    if not any(settings.get(x) for x in ("language", "task", _FORCED)):
        settings = {**settings, _FORCED: config.get(_FORCED)}
    saved = directory / "tokenizer_config.json"
    tokenizer = read_json_object(saved) if saved.is_file() else {}
    names = {name: tokenizer[name] for name in ("language", "task") if name in tokenizer}
    return names | {name: value for name, value in settings.items() if value is not None}


OF_CHARACTERS = "wav2vec2", "hubert", "wavlm"
"""Classes whose tokenizer is a vocabulary of characters."""

_BASES = {51_864: "openai/whisper-tiny.en", 51_866: "openai/whisper-large-v3"}


def check_tokenizer(directory: Path) -> None:
    """Check that there is a tokenizer, which checkpoints of transformers' Trainer may lack."""
    mapping = read_json_object(directory / "config.json")
    alone = mapping.get("model_type") in OF_CHARACTERS
    parts = ("vocab.json",) if alone else ("vocab.json", "merges.txt")
    if (directory / "tokenizer.json").is_file() or all((directory / x).is_file() for x in parts):
        return
    if alone:
        return  # One that was only pretrained has none.
    missing = f"{directory / 'tokenizer.json'}: there is no such file."
    for folder in (directory.parent, *sorted(directory.parent.glob("checkpoint-*"))):
        if (folder / "tokenizer.json").is_file():
            raise ValueError(f"{missing} Copy that of {folder}, if it is of the same model.")
    base = str(mapping.get("_name_or_path"))
    if mapping.get("model_type") == "whisper" and not base.startswith("openai/whisper-"):
        # All sizes have one tokenizer, but for English-only models and the third version.
        base = _BASES.get(mapping.get("vocab_size", 0), "openai/whisper-tiny")
    raise ValueError(
        f"{missing} Copy it from the model that was fine-tuned: `hf download "
        f"{base if '/' in base else 'MODEL'} tokenizer.json --local-dir {directory}`."
    )


def read_weights(directory: Path, allowed: Sequence[str] = WEIGHT_FILES) -> dict[str, Tensor]:
    """Read the first of the files that is there, or its shards with their index."""
    whole = next((name for name in allowed if _has(directory, name)), allowed[0])
    index, names = directory / f"{whole}.index.json", [whole]
    if index.is_file():
        files = read_json_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise ValueError(f"`weight_map` in {index} must be a mapping of weights to files.")
        where = f"a file of `weight_map` in {index}"
        names = sorted({plain_name(name, where) for name in files.values()})
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (directory / name).is_file():
            missing = f"{directory / name}: there is no such file."
            raise FileNotFoundError(missing + _remedy(directory))
        weights |= _read(directory / name)
    # Wrappers of a model in training are part of the names that it has in them.
    for wrapper in ("module.", "_orig_mod.", "module."):
        if all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    return {
        name: value for name, value in weights.items() if not any(part in name for part in _IGNORED)
    }


def _has(directory: Path, name: str) -> bool:
    return (directory / name).is_file() or (directory / f"{name}.index.json").is_file()


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".bin":
        return named_tensors(path, str(path))
    try:
        return load_file(path)
    except (SafetensorError, RuntimeError) as error:
        raise wrong_file(path, "a file of safetensors", error, "is damaged") from error


def _remedy(directory: Path) -> str:
    """Return what to do about weights of another program."""
    for name in ("tf_model.h5", "flax_model.msgpack"):
        if (directory / name).is_file():
            option = "from_tf" if name.startswith("tf") else "from_flax"
            return (
                f" Of {name}, transformers writes it: from_pretrained(FOLDER, {option}=True), then "
                "save_pretrained(FOLDER)."
            )
    return ""


def write_json(path: Path, mapping: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers formats its own."""
    path.write_text(json.dumps(mapping, indent=2, sort_keys=True) + "\n", encoding="utf-8")
