"""Whisper models of CTranslate2, as faster-whisper reads them.

They are read without a package: ``model.bin`` has arrays by name, which are those of transformers
under other names, with the projections of attention joined. They are written by the package
``ctranslate2``, from what is exported for transformers.
"""

import importlib.util
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from effasr.data.tokenizer import Tokenizer, WhisperTokenizer
from effasr.interop.huggingface.files import Content
from effasr.model.asr import ASRModel
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.files import open_regular

MODEL = "model.bin"
_VOCABULARY_FILES = "tokenizer.json", "preprocessor_config.json"

_SPECIFICATION = "WhisperSpec"
_VERSIONS = range(5, 7)  # with types and aliases of variables
# bfloat16, which numpy has not, is read as uint16.
_TYPES = {0: "<f4", 2: "<i2", 3: "<i4", 4: "<f2", 5: "<u2"}
_INT8 = 1

_MODULES = {
    "layer_norm": "layer_norm",
    "position_encodings": "embed_positions",
    "embeddings": "embed_tokens",
    "conv1": "conv1",
    "conv2": "conv2",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_0": "self_attn.qkv",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.kv",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_PARAMETERS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def is_ctranslate2(directory: Path) -> bool:
    path = directory / MODEL
    if not path.is_file():
        return False
    with open_regular(path) as file:
        head = file.read(64)
    return len(head) > 6 and head[6:].startswith(b"WhisperSpec\0")


def read_ctranslate2(directory: Path) -> Content:
    """Return what the folder of a Whisper holds, in the names of transformers."""
    path = directory / MODEL
    with open_regular(path) as file:
        variables = _read_variables(file, path)
    mapping = read_json_object(directory / "config.json")
    weights = _weights(variables, path)
    vocab_size, width = weights["model.decoder.embed_tokens.weight"].shape
    sides = {
        side: {
            "layers": _count_layers(variables, side),
            "attention_heads": int(variables[f"{side}/num_heads"]),
            "ffn_dim": len(variables[f"{side}/layer_0/ffn/linear_0/weight"]),
        }
        for side in ("encoder", "decoder")
    }
    bins = weights["model.encoder.conv1.weight"].shape[1]
    frames = len(weights["model.encoder.embed_positions.weight"])
    config: dict[str, Any] = {
        "model_type": "whisper",
        "d_model": width,
        "vocab_size": vocab_size,
        "num_mel_bins": bins,
        "max_source_positions": frames,
        "max_target_positions": len(weights["model.decoder.embed_positions.weight"]),
        **{f"{side}_{name}": n for side, fields in sides.items() for name, n in fields.items()},
    }
    generation = {
        "suppress_tokens": mapping.get("suppress_ids"),
        "begin_suppress_tokens": mapping.get("suppress_ids_begin"),
        "alignment_heads": mapping.get("alignment_heads"),
        "max_initial_timestamp_index": 50,  # that of every Whisper, for which there is no field
    }
    preprocessor = {"feature_size": bins, "chunk_length": frames / 50}
    return Content(config, preprocessor, generation, weights)


def _read_variables(file: BinaryIO, path: Path) -> dict[str, np.ndarray]:
    remaining = os.fstat(file.fileno()).st_size

    def read(count: int) -> bytes:
        nonlocal remaining
        remaining -= count
        data = file.read(count) if remaining >= 0 else b""
        if len(data) < count:
            raise ValueError(f"{path} is damaged: it ends within a variable: copy it again.")
        return data

    def number(kind: str) -> int:
        return int(struct.unpack(f"<{kind}", read(struct.calcsize(kind)))[0])

    def text() -> str:
        return read(number("H"))[:-1].decode("utf-8", "replace")

    version = number("I")
    if version not in _VERSIONS:
        raise ValueError(
            f"{path} must be of version {_VERSIONS[0]} to {_VERSIONS[-1]} of CTranslate2's format, "
            f"but is of {version}: convert the model again with a recent ctranslate2."
        )
    text()
    number("I")
    variables: dict[str, np.ndarray] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, data = number("B"), read(number("I"))
        if name.endswith("/weight") and kind == _INT8:
            raise ValueError(
                f"{path} must have weights of float32 or float16, but they are quantized to int8, "
                "which loses accuracy: take the model that it was converted from, or convert that "
                "with `--quantization float16`."
            )
        variables[name] = np.frombuffer(data, _TYPES.get(kind, "<i1")).reshape(shape)
    return variables


def _weights(variables: dict[str, np.ndarray], path: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, values in variables.items():
        side, _, inner = name.partition("/")
        module, _, parameter = inner.rpartition("/")
        layer, _, below = module.partition("/")
        prefix = f"model.{side}."
        if layer.startswith("layer_") and below:
            prefix, module = f"{prefix}layers.{layer.removeprefix('layer_')}.", below
        if module not in _MODULES or side not in ("encoder", "decoder"):
            continue
        target, kind = prefix + _MODULES[module], _PARAMETERS.get(parameter, parameter)
        tensor = torch.from_numpy(values.copy())
        if tensor.dtype == torch.uint16:
            tensor = tensor.view(torch.bfloat16)
        parts = target.rpartition(".")[2]
        if parts not in ("qkv", "kv"):
            weights[f"{target}.{kind}"] = tensor
            continue
        for part, value in zip(parts, tensor.chunk(len(parts)), strict=True):
            if part == "k" and kind == "bias":
                # CTranslate2 joins a bias of zeros, as Whisper's keys have none.
                if value.any():
                    raise ValueError(f"{path}: `{name}` must be 0 for keys, but is not.")
                continue
            weights[f"{target.removesuffix(parts)}{part}_proj.{kind}"] = value.clone()
    return weights


def _count_layers(variables: dict[str, np.ndarray], side: str) -> int:
    pattern = f"{side}/layer_"
    names = {name.split("/")[1] for name in variables if name.startswith(pattern)}
    return len(names - {"layer_norm"})


def check_ctranslate2(model: ASRModel, tokenizer: Tokenizer) -> None:
    """Check, before anything is written, that a model can be exported."""
    if model.config.decoder is None or not isinstance(model.config.encoder, WhisperEncoderConfig):
        raise ValueError(
            "`--format ctranslate2` must have a Whisper, but this model has an encoder of kind "
            f"{model.config.encoder.kind}: choose `--format huggingface`, onnx or sherpa-onnx."
        )
    if not isinstance(tokenizer, WhisperTokenizer):
        raise ValueError(
            "`--format ctranslate2` must have the tokenizer of a Whisper, whose tokens of "
            "languages and tasks faster-whisper writes, but this model has a "
            f"{type(tokenizer).__name__}: choose `--format huggingface` or onnx."
        )
    for package in ("ctranslate2", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"`--format ctranslate2` needs the package {package}: pip install "
                "'effasr[ctranslate2]'."
            )


def write_ctranslate2(source: Path, directory: Path, quantization: str = "float16") -> None:
    """Convert the folder of a Whisper of transformers with the package ``ctranslate2``."""
    from ctranslate2.converters import TransformersConverter

    files = [name for name in _VOCABULARY_FILES if (source / name).is_file()]
    converter = TransformersConverter(str(source), copy_files=files)
    with TemporaryDirectory(dir=directory.parent) as folder:
        # It makes its folder anew, where another one must stay.
        for path in Path(converter.convert(f"{folder}/model", quantization=quantization)).iterdir():
            path.rename(directory / path.name)
