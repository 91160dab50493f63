"""Weights of causal language models in transformers' folders."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from effasr.data.tokenizer import Tokenizer
from effasr.interop.huggingface.files import read_weights, write_json
from effasr.model.language_model.model import LanguageModel
from effasr.untrusted.documents import parse_json


def read_language_model(directory: str | Path, model: LanguageModel) -> None:
    """Load the safetensors of a folder into a model of the folder's architecture.

    Raises:
        ValueError: A file is missing or damaged, or has other weights than the model.
    """
    try:
        weights = read_weights(Path(directory))
    except FileNotFoundError as error:
        raise ValueError(
            f"{error} The weights of a language model are read from safetensors alone; set "
            "model.language_model.weights=random to draw them."
        ) from error
    own, names = model.state_dict(), dict(model.causal_names())
    if not any(name.startswith(f"{model.base_name}.") for name in weights):
        # A folder of the base model, which has no name for it.
        prefix = f"{model.base_name}."
        known = set(names.values())
        weights = {n if n in known else prefix + n: value for n, value in weights.items()}
    missing = [theirs for theirs in names.values() if theirs not in weights]
    unknown = weights.keys() - set(names.values())
    if model.lm_head is None:
        # Some folders have the tied weight twice.
        unknown -= {f"{model.output_name}.weight"}
    if missing or unknown:
        first = f"lacks {missing[0]}" if missing else f"has {min(unknown)}, which is unknown"
        raise ValueError(
            f"{directory}: its weights must be those of its config.json, but differ in "
            f"{len(missing) + len(unknown)} names: it {first}: copy the folder again."
        )
    for ours, theirs in names.items():
        if weights[theirs].shape != own[ours].shape:
            raise ValueError(
                f"{directory}: {theirs} must have the shape {tuple(own[ours].shape)} of its "
                f"config.json, but has {tuple(weights[theirs].shape)}: copy the folder again."
            )
    with torch.no_grad():
        for ours, theirs in names.items():
            own[ours].copy_(weights[theirs])


def write_language_model(
    model: LanguageModel, directory: str | Path, tokenizer: Tokenizer | None = None
) -> None:
    """Write a folder that transformers' ``AutoModelForCausalLM`` loads; adapters must be merged.

    Args:
        model: The model, whose encoder and adapter are left out.
        directory: Created if needed; files of the same names are replaced.
        tokenizer: Its tokenizer, whose files are written, too.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    weights = {
        theirs: state[ours].detach().cpu().clone(memory_format=torch.contiguous_format)
        for ours, theirs in model.causal_names()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert model.config.architecture is not None
    mapping = parse_json(model.config.architecture, "language_model.architecture")
    # The weights are written in float32.
    mapping.pop("torch_dtype", None)
    write_json(folder / "config.json", {**mapping, "dtype": "float32"})
    if tokenizer is not None:
        tokenizer.save(folder)
