"""Builds language models of transformers from their ``config.json``.

The modules are those of the installed transformers. Code that a folder may contain is never run.
"""

import json
import logging
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from effasr.checks import LIMITS
from effasr.data.tokenizer.chat import ENCODER_DECODERS
from effasr.model.language_model.packed_attention import CONTEXT, PackedContext, register
from effasr.untrusted.documents import parse_json, read_json_object
from effasr_kernels import PackedLayout

CONFIG_FILE = "config.json"

_MATRICES = (
    ("hidden_size", "vocab_size"),
    ("hidden_size", "num_attention_heads", "head_dim"),
    ("hidden_size", "intermediate_size", "num_hidden_layers"),
)
"""Fields of a configuration whose product is at most the number of weights."""


def read_architecture(directory: str | Path, *, causal: bool = False) -> str:
    """The ``config.json`` of a language model as one line of JSON."""
    path = Path(directory) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"`language_model.path` must be the folder of a language model, but {directory} has no "
            f"{CONFIG_FILE}: download the model and name its folder."
        )
    mapping = read_json_object(path)
    if mapping.get("quantization_config") is not None:
        raise ValueError(
            f"{path}: weights must not be quantized, but `quantization_config` is given: take the "
            "model in bfloat16 or float32."
        )
    text = json.dumps(mapping, sort_keys=True)
    check_sizes(model_config(text, str(path), causal=causal), path)
    return text


def check_sizes(config: Any, path: Path) -> None:
    """Check that matrices of the model fit the weights in the folder, before memory is taken."""
    for name in ("num_hidden_layers", "num_layers", "n_layer"):
        layers, most = getattr(config, name, 0), LIMITS["layers"]
        if isinstance(layers, int) and layers > most:
            raise ValueError(f"{path}: `{name}` must be at most {most}, but is {layers}.")
    files = list(path.parent.glob("*.safetensors"))
    if not files:
        # Its weights are to be random.
        return
    # Not less than a byte for a value.
    most = sum(file.stat().st_size for file in files)
    for names in _MATRICES:
        sizes = [getattr(config, name, None) for name in names]
        # Some families have a size for each layer, or none.
        if math.prod(size for size in sizes if isinstance(size, int)) > most:
            fields = ", ".join(f"`{name}` {size}" for name, size in zip(names, sizes, strict=True))
            raise ValueError(
                f"{path}: must have the sizes of the weights beside it, which have {most} bytes, "
                f"but has {fields}: copy the folder again."
            )


def model_config(
    architecture: str, origin: str = "language_model.architecture", *, causal: bool = False
) -> Any:
    """The configuration object of transformers for a ``config.json``.

    With ``causal``, encoder-decoder models are refused.
    """
    transformers = import_transformers()
    mapping = parse_json(architecture, origin)
    kind = mapping.pop("model_type", None) if isinstance(mapping, dict) else None
    supported = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_supported = isinstance(kind, str) and (kind in supported or kind in ENCODER_DECODERS)
    # Some of them, such as bart, have a causal form as well, which is not the model of the folder.
    if not is_supported or (causal and kind in ENCODER_DECODERS):
        others = "" if causal else f", or behind an encoder {', '.join(ENCODER_DECODERS)}"
        raise ValueError(
            f"{origin}: `model_type` must be a causal language model of transformers "
            f"{transformers.__version__}, such as llama, qwen2, qwen3, gemma or gemma3_text"
            f"{others}, but is {str(kind)[:60]!r}: models that need code of their folder are not "
            "supported."
        )
    # Private keys choose implementations, which are ours to choose.
    fields = {key: value for key, value in mapping.items() if not key.startswith("_")}
    for key in ("auto_map", "attn_implementation", "use_kernels"):
        fields.pop(key, None)
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:  # A configuration raises what its own checks do.
        problem = " ".join(str(error).split())[:200]
        raise ValueError(f"{origin}: not a configuration of {kind}: {problem}.") from error


def import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "`model.language_model` needs the package `transformers`: "
            "pip install effasr[huggingface]."
        ) from error
    return transformers


@cache
def is_encoder_decoder(architecture: str) -> bool:
    return model_config(architecture).model_type in ENCODER_DECODERS


def build_model(architecture: str) -> Any:
    """Transformers' model in float32 with initialized weights; packed attention if it is causal."""
    transformers, config = import_transformers(), model_config(architecture)
    config.use_cache = False
    kind, attention = transformers.AutoModelForCausalLM, register()
    if is_encoder_decoder(architecture):
        kind, attention = transformers.AutoModelForSeq2SeqLM, "sdpa"
    try:
        return kind.from_config(
            config,
            trust_remote_code=False,
            attn_implementation=attention,
            dtype=torch.float32,
        )
    except Exception as error:  # Sizes that do not fit each other fail anywhere in a constructor.
        problem = " ".join(str(error).split())[:200]
        raise ValueError(f"`language_model.architecture`: cannot be built: {problem}.") from error


def max_rows(architecture: str) -> int | None:
    """Most rows of a conversation, by positions and sliding windows; None for no limit."""
    config = model_config(architecture)
    limits = [getattr(config, "max_position_embeddings", None)]
    kinds = getattr(config, "layer_types", None)
    slides = any("sliding" in kind for kind in kinds) if kinds else True
    if slides and getattr(config, "use_sliding_window", True):
        limits.append(getattr(config, "sliding_window", None))
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    width: int  # Channels of a row
    vocab_size: int  # Classes of the output
    layers: int
    attention: int  # Channels of all query heads of a layer
    heads: int  # Query heads of a layer
    key_heads: int  # Heads of keys and values of a layer
    head_dim: int
    linear: int  # Weights of all matrices but the embeddings and the output


@cache
def model_sizes(architecture: str) -> ModelSizes:
    with torch.device("meta"):
        model = build_model(architecture)
    config, output = model.config, model.get_output_embeddings()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    embedding = model.get_input_embeddings()
    tables = {id(x) for module in (embedding, output) for x in module.parameters()}
    tables |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = sum(x.numel() for x in model.parameters() if x.ndim == 2 and id(x) not in tables)
    if is_encoder_decoder(architecture):
        # A row passes one of two stacks, which have about as many weights.
        linear //= 2
    return ModelSizes(
        width=embedding.weight.shape[1],
        vocab_size=output.weight.shape[0],
        layers=config.num_hidden_layers,
        attention=heads * head_dim,
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        linear=linear,
    )


_LENGTHS = (5, 3)
_WAITS = (DataDependentOutputException, DynamicOutputShapeException)


@cache
def host_read(architecture: str) -> str | None:
    """Where a forward over packed rows asks the device for a value; None if it does not.

    Dynamic rotary positions, for example, are chosen by the longest position that occurs: the host
    waits for the device there, and a CUDA graph cannot record it. The forward runs on tensors
    without values, so it takes no memory, and whatever reads a value fails. A forward that fails
    for another reason, as some mixtures of experts do, counts as one that reads.
    """
    if is_encoder_decoder(architecture):
        return "padded batches of encoder and decoder have a shape each"
    with FakeTensorMode(), torch.no_grad(), _without_log():
        causal = build_model(architecture).train()
        model = getattr(causal, causal.base_model_prefix)
        layout = PackedLayout.from_lengths(_LENGTHS)
        width = causal.get_input_embeddings().weight.shape[1]
        try:
            model(
                inputs_embeds=torch.empty(1, sum(_LENGTHS), width),
                position_ids=torch.zeros(1, sum(_LENGTHS), dtype=torch.int64),
                use_cache=False,
                **{CONTEXT: PackedContext(layout)},
            )
        except _WAITS as error:
            return _place(error)
        except Exception as error:  # Modules of any family fail in any way without values.
            problem = " ".join(str(error).split())[:120]
            return f"{_place(error)}: {problem}"
    return None


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging a stack for each operator that fails on tensors without values."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _place(error: Exception) -> str:
    """The innermost line of transformers, and the operator that has no value."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "transformers" in x.filename]
    where = f"{Path(frames[-1].filename).name} line {frames[-1].lineno}, " if frames else ""
    operator = getattr(error, "func", None)
    return f"{where}{operator if operator is not None else type(error).__name__}"
