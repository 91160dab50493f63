"""NeMo's models, from and to ``.nemo`` files."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.data.features.log_mel import LogMel
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import NeMoTokenizer, Tokenizer
from effasr.interop.nemo.archive import CONFIG, NemoArchive, read_archive, write_archive
from effasr.interop.nemo.config import (
    HYBRID,
    MULTITASK,
    check_expressible,
    model_class,
    model_yaml,
    nemo_class,
    read_model,
)
from effasr.interop.nemo.tables import (
    AFTER_DROPOUT,
    from_nemo_order,
    position_table,
    renames,
    to_nemo_order,
)
from effasr.interop.nemo.tokenizer import NemoTokens, nemo_tokens, read_tokenizer
from effasr.interop.tables import (
    check_weights,
    export_weights,
    import_weights,
    norm_as_layer,
    warn_about_options,
    warn_about_parts,
    weight_shapes,
)
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.untrusted.documents import WRONG_VALUES

_log = logging.getLogger(__name__)

_MAX_SYMBOLS = 10
"""Labels per frame: the default of decoding here."""

_BANDS, _WINDOW = "preprocessor.featurizer.fb", "preprocessor.featurizer.window"
_POSITIONS = "transf_decoder._embedding.position_embedding.pos_enc"
_TIED = "transf_decoder._embedding.token_embedding.weight"
_OUTPUT = "log_softmax.mlp.layer0.weight"
_START = "transducer.predictor.embedding.weight"
# A weight that is never used, and a table that older versions stored.
_IGNORED = ("transf_decoder._embedding.token_type_embedding.weight", "encoder.pos_enc.pe")


@dataclass(frozen=True, slots=True)
class NemoModel:
    config: ModelConfig  # Architecture of the model
    vocab_size: int
    state: dict[str, Tensor]  # Float32 weights for `ASRModel.from_state_dict`
    tokenizer: NeMoTokenizer  # Tokenizer of the model
    prompt: Prompt  # Default prompt of the model


def import_nemo(path: str | Path) -> NemoModel:
    """Read a ``.nemo`` file or its folder; a warning lists training options not used here."""
    path = Path(path)
    archive = read_archive(path)
    try:
        return _read(archive)
    except ValueError as error:
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise ValueError(f"{where}{error}") from error
    except WRONG_VALUES as error:
        raise ValueError(
            f"{path}: a value of its configuration or a weight is of a wrong kind "
            f"({type(error).__name__}: {error}): copy the file again."
        ) from error


def _read(archive: NemoArchive) -> NemoModel:
    name = model_class(archive.config)
    config, unused = read_model(archive.config)
    is_canary = name == MULTITASK
    prompt_format = str(archive.config.get("prompt_format")) if is_canary else None
    tokenizer = read_tokenizer(archive, prompt_format)
    weights = {name.replace(*AFTER_DROPOUT): value for name, value in archive.weights.items()}
    vocab_size = tokenizer.vocab_size
    if is_canary and _TIED in weights:
        # NeMo rounds the number of classes up.
        vocab_size = max(len(weights[_TIED]), vocab_size)
    shapes = weight_shapes(config, vocab_size)
    state, remaining = import_weights(
        weights, shapes, renames(hybrid=name == HYBRID), from_nemo_order
    )
    _check_tables(config, remaining, weights.get(_TIED))
    if _START in state and state[_START][-1].any():
        raise ValueError(
            "`decoder.prediction.embed.weight` must be zero in its last row, the blank's, as NeMo "
            "starts a text from zeros, but is not."
        )
    computed = (_BANDS, _WINDOW, _POSITIONS, _OUTPUT, *_IGNORED)
    unknown = {key: value for key, value in remaining.items() if key not in computed}
    check_weights(state | unknown, shapes, archive.path, CONFIG)
    if unused:
        _log.warning("Options of training that are not used here: %s.", ", ".join(unused))
    most = ((archive.config.get("decoding") or {}).get("greedy") or {}).get("max_symbols")
    if most not in (None, _MAX_SYMBOLS):
        _log.warning(
            "`decoding.greedy.max_symbols` = %s is not part of a model here: decode with "
            "`max_symbols`.",
            most,
        )
    return NemoModel(config, vocab_size, state, tokenizer, _prompt(archive.config, tokenizer))


def _check_tables(config: ModelConfig, weights: Mapping[str, Tensor], tied: Tensor | None) -> None:
    """Check that NeMo's saved tables equal those that are computed, or shared, here."""
    features = LogMel(config.features)
    expected = {_BANDS: features.filterbank.T[None], _WINDOW: features.window}
    if config.decoder is not None and _POSITIONS in weights:
        expected[_POSITIONS] = position_table(len(weights[_POSITIONS]), config.decoder.width)
    if tied is not None:
        expected[_OUTPUT] = tied.float()
    for name, table in expected.items():
        if name not in weights:
            continue
        saved, tolerance = weights[name], 4 * torch.finfo(weights[name].dtype).eps
        if saved.shape != table.shape or not torch.allclose(saved.float(), table, tolerance, 1e-6):
            cause = "an output layer of its own" if name == _OUTPUT else "other features"
            raise ValueError(
                f"`{name}` must be what the configuration says, but is not: the file was made with "
                f"{cause}, or changed."
            )


def _prompt(config: Mapping[str, Any], tokenizer: NeMoTokenizer) -> Prompt:
    """NeMo's default prompt; else English, else the tokenizer's first language."""
    language = "en"
    if tokenizer.languages and language not in tokenizer.languages:
        language = tokenizer.languages[0]
    slots: Mapping[str, Any] = {}
    for turn in config.get("prompt_defaults") or ():
        if turn.get("role") == "user":
            slots = turn.get("slots") or {}
    source, target = (
        str(slots.get(key) or language).removeprefix("<|").removesuffix("|>")
        for key in ("source_lang", "target_lang")
    )
    if source not in tokenizer.sources or target not in tokenizer.languages:
        source = target = language
    return Prompt(
        source,
        target,
        "transcribe" if source == target else "translate",
        str(slots.get("pnc", "pnc")) in ("yes", "Yes", "true", "True", "1", "pnc", "<|pnc|>"),
    )


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
    """Write a ``.nemo`` file of the first output that the model has; return its class.

    That is the decoder, else the transducer, with a CTC head if there is one, else the CTC head.
    Other parts, and training options that NeMo does not have, are left out with a warning: they do
    not change what the exported model computes.
    """
    check_expressible(model.config)
    model = norm_as_layer(model)
    config = model.config
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
    names = renames(hybrid=name == HYBRID)
    weights = export_weights(state, names, to_nemo_order) | _tables(config)
    if name == MULTITASK:
        embedding = weights["transf_decoder._embedding.token_embedding.weight"]
        weights["log_softmax.mlp.layer0.weight"] = embedding
    yaml = model_yaml(config, tokens, classes)
    if tokens.prompt_format is not None and prompt is not None:
        # Languages are not tokens in this model, because NeMo chooses the tokenizer by them.
        slots = {
            "source_lang": prompt.source,
            "target_lang": prompt.target,
            "pnc": "<|pnc|>" if prompt.punctuation else "<|nopnc|>",
        }
        if tokens.prompt_format == "canary":
            slots["task"] = f"<|{prompt.task}|>"
        else:
            slots |= {"decodercontext": "", "emotion": "<|emo:undefined|>", "itn": "<|noitn|>"}
            slots |= {"timestamp": "<|notimestamp|>", "diarize": "<|nodiarize|>"}
        yaml["prompt_defaults"] = [{"role": "user", "slots": slots}]
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
    state: dict[str, Tensor], tokens: NemoTokens, num_tokens: int, ours: int, classes: int
) -> None:
    """Reorder the classes of a decoder as NeMo's; the first ``known`` of ours have a token."""
    ids: list[int | None] = [*tokens.ids, *range(num_tokens, ours)][:classes]
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
    """The rows with these numbers; rows of None are filled."""
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
