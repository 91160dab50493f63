"""Export of models as ``.nemo`` files, which NeMo restores."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from effasr.data.features.log_mel import LogMel
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.interop.export_checks import warn_about_options, warn_about_parts
from effasr.interop.nemo.archive import write_archive
from effasr.interop.nemo.config import HYBRID, MULTITASK
from effasr.interop.nemo.model_yaml import check_expressible, model_yaml, nemo_class
from effasr.interop.nemo.tokenizer import NemoTokens, nemo_tokens
from effasr.interop.nemo.weights import position_table, renames, to_nemo_order
from effasr.interop.weights import export_weights
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig

_ROUNDED_TO = 8
"""NeMo rounds the classes of a Canary up to a multiple of this."""

_NEVER = -1e4
"""Bias of a class without token: probability 0, and finite in float16."""

_BIASED = re.compile(
    r"encoder\.layers\.\d+\.(feed_forward[12]\.linear[12]|self_attn\.(qkv|o)_proj"
    r"|conv\.(pointwise[12]|depthwise))\.weight"
    r"|decoder\.layers\.\d+\.(self_attn\.(qkv|o)_proj|encoder_attn\.(q|kv|o)_proj)\.weight"
)


def export_nemo(
    model: ASRModel, tokenizer: Tokenizer, path: str | Path, prompt: Prompt | None = None
) -> str:
    """Write a ``.nemo`` file of the first output that the model has.

    That is the decoder, else the transducer, with a CTC head if there is one, else the CTC head.
    Other parts, and training options that NeMo does not have, are left out with a warning: they do
    not change what the exported model computes.

    Args:
        model: The model.
        tokenizer: Tokenizer of a ``.nemo`` file or of `effasr tokenizer`.
        path: The file; an existing one is replaced.
        prompt: Default prompt of a Canary.

    Returns:
        The class that restores it.

    Raises:
        ValueError: NeMo cannot express the model or its tokenizer; the message says why.
    """
    config = model.config
    check_expressible(config)
    name = nemo_class(config)
    tokens = nemo_tokens(tokenizer, prompts=name == MULTITASK)
    state = _parts(model, name)
    _add_biases(state, config)
    if name == MULTITASK:
        classes = -(-len(tokens.ids) // _ROUNDED_TO) * _ROUNDED_TO
        _put_classes(state, tokens, tokenizer.vocab_size, model.vocab_size, classes)
    else:
        classes = len(tokens.ids)
        _put_labels(state, tokens, model.vocab_size)
    _warn(config, name)
    names = renames(hybrid=name == HYBRID)
    weights = export_weights(state, names, to_nemo_order) | _tables(config)
    if name == MULTITASK:
        embedding = weights["transf_decoder._embedding.token_embedding.weight"]
        weights["log_softmax.mlp.layer0.weight"] = embedding
    yaml = model_yaml(config, tokens, classes)
    if tokens.prompt_format is not None and prompt is not None:
        yaml["prompt_defaults"] = _defaults(prompt, tokens.prompt_format)
    write_archive(Path(path), yaml, weights, tokens.files)
    return name


def _parts(model: ASRModel, name: str) -> dict[str, Tensor]:
    prefixes = {
        MULTITASK: ("encoder.", "decoder.", "projection."),
        HYBRID: ("encoder.", "transducer.", "ctc_head."),
    }.get(name, ("encoder.", "ctc_head." if model.config.transducer is None else "transducer."))
    return {
        key: value.detach().cpu()
        for key, value in model.state_dict().items()
        if key.startswith(prefixes)
    }


def _add_biases(state: dict[str, Tensor], config: ModelConfig) -> None:
    """Add zero biases where NeMo has a bias and this model has none."""
    encoder, decoder = config.encoder, config.decoder
    assert isinstance(encoder, FastConformerConfig)  # checked by check_expressible
    for name in list(state):
        if not _BIASED.fullmatch(name):
            continue
        bias = f"{name.removesuffix('weight')}bias"
        in_encoder = name.startswith("encoder.")
        if bias not in state and (not in_encoder or encoder.bias or encoder.convolution_bias):
            state[bias] = state[name].new_zeros(len(state[name]))
    if decoder is not None and "decoder.embed_tokens.weight" in state:
        embedding = state["decoder.embed_tokens.weight"]
        state.setdefault("decoder.output_bias", embedding.new_zeros(len(embedding)))


def _put_classes(
    state: dict[str, Tensor], tokens: NemoTokens, known: int, ours: int, classes: int
) -> None:
    """Reorder the classes of a decoder as NeMo's.

    Args:
        state: Weights of the decoder.
        tokens: NeMo's tokens.
        known: Tokens of our tokenizer.
        ours: Classes of our model, the first ``known`` with a token.
        classes: Number of classes of NeMo's model.
    """
    spare = list(range(known, ours))
    ids: list[int | None] = [*tokens.ids, *spare][:classes]
    ids += [None] * (classes - len(ids))
    for name, fill in (("decoder.embed_tokens.weight", 0.0), ("decoder.output_bias", _NEVER)):
        state[name] = _rows(state[name], ids, fill)


def _put_labels(state: dict[str, Tensor], tokens: NemoTokens, blank: int) -> None:
    """Leave tokens of prompts out of the labels, and start texts from zeros, as NeMo does."""
    labels = [*tokens.ids, blank]
    for name in ("ctc_head.weight", "ctc_head.bias"):
        if name in state:
            state[name] = _rows(state[name], labels, _NEVER)
    if "transducer.output.weight" not in state:
        return
    durations = range(blank + 1, len(state["transducer.output.weight"]))
    for name in ("transducer.output.weight", "transducer.output.bias"):
        state[name] = _rows(state[name], [*labels, *durations], _NEVER)
    embedding = state["transducer.predictor.embedding.weight"]
    start = embedding[blank]
    if start.any():
        # The first layer computes W e + b = W (e - s) + (b + W s).
        embedding = embedding - start
        bias, weight = (f"transducer.predictor.lstm.{kind}_ih_l0" for kind in ("bias", "weight"))
        state[bias] = state[bias] + state[weight] @ start
    state["transducer.predictor.embedding.weight"] = _rows(embedding, labels, 0.0)


def _rows(tensor: Tensor, ids: list[int | None], fill: float) -> Tensor:
    """Return the rows with these numbers; rows of None are filled."""
    rows = tensor[torch.tensor([0 if index is None else index for index in ids])]
    missing = torch.tensor([index is None for index in ids])
    return rows.masked_fill(missing.view(-1, *[1] * (tensor.dim() - 1)), fill)


def _tables(config: ModelConfig) -> dict[str, Tensor]:
    """Computed tables that NeMo saves."""
    features = LogMel(config.features)
    tables = {
        "preprocessor.featurizer.window": features.window,
        "preprocessor.featurizer.fb": features.filterbank.T[None].contiguous(),
    }
    if config.decoder is not None:
        name = "transf_decoder._embedding.position_embedding.pos_enc"
        tables[name] = position_table(config.decoder.max_positions, config.decoder.width)
    return tables


def _defaults(prompt: Prompt, prompt_format: str) -> list[dict[str, object]]:
    """Default slots of NeMo's prompt."""
    # Languages are not tokens in this model, because NeMo chooses the tokenizer by them.
    slots = {
        "source_lang": prompt.source,
        "target_lang": prompt.target,
        "pnc": "<|pnc|>" if prompt.punctuation else "<|nopnc|>",
    }
    if prompt_format == "canary":
        slots["task"] = f"<|{prompt.task}|>"
    else:
        slots |= {"decodercontext": "", "emotion": "<|emo:undefined|>", "itn": "<|noitn|>"}
        slots |= {"timestamp": "<|notimestamp|>", "diarize": "<|nodiarize|>"}
    return [{"role": "user", "slots": slots}]


def _warn(config: ModelConfig, name: str) -> None:
    exported = ("decoder",) if name == MULTITASK else ("transducer", "ctc")
    warn_about_parts(config, exported, f"NeMo's {name}")
    encoder, decoder = config.encoder, config.decoder
    assert isinstance(encoder, FastConformerConfig)  # checked by check_expressible
    dropped = []
    if encoder.activation_dropout != encoder.residual_dropout:
        dropped.append(f"encoder.activation_dropout = {encoder.activation_dropout}")
    if decoder is not None and decoder.activation_dropout:
        dropped.append(f"decoder.activation_dropout = {decoder.activation_dropout}")
    warn_about_options(dropped)
