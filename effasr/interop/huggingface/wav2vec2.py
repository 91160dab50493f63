"""``Wav2Vec2ForCTC`` and its kin: wav2vec2-base-960h, XLS-R, MMS, HuBERT, and omniASR.

The blank is the padding token, whose number moves behind the others. The weight norm of the
convolution for positions is multiplied out; it is written as a norm that changes nothing. Of MMS
the adapters of one language are read. A model that was only pretrained, such as XLS-R, gets a head
of one token and the blank, in whose place a fine-tuning puts that of its tokenizer. The blank of
omniASR is the token that begins a sentence; as tokens keep their numbers, its class is a new one
and the token's own never occurs.

Moonshine has an encoder of this kind before a decoder. Pairs of channels that rotate are neighbours
there, and halves of the rotated channels here.
"""

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.checks import check
from effasr.data.features.config import FeatureConfig
from effasr.interop.huggingface.files import Content, ModelClass, SpecialTokens, read_weights
from effasr.interop.tables import (
    Renames,
    Section,
    export_weights,
    integer,
    number,
    one_of,
    only,
    refuse,
    switch,
)
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.wav2vec2_encoder import KERNELS, STRIDES, Wav2Vec2EncoderConfig
from effasr_kernels import Rotary

_log = logging.getLogger(__name__)

_LAYERS = len(KERNELS)


def _channels(where: str, value: Any) -> int:
    rule = f"be one number {_LAYERS} times, as all convolutions have as many channels here"
    check(isinstance(value, list) and value == value[:1] * _LAYERS, where, rule, value)
    return integer(where, value[0])


_SIZES = {
    "width": ("hidden_size", 768, integer),
    "layers": ("num_hidden_layers", 12, integer),
    "heads": ("num_attention_heads", 12, integer),
    "feed_forward": ("intermediate_size", 3072, integer),
    "channels": ("conv_dim", [512] * _LAYERS, _channels),
    "convolution_bias": ("conv_bias", False, switch),
    "position_kernel": ("num_conv_pos_embeddings", 128, integer),
    "position_groups": ("num_conv_pos_embedding_groups", 16, integer),
    "residual_dropout": ("hidden_dropout", 0.1, number),
    "activation_dropout": ("activation_dropout", 0.1, number),
    "attention_dropout": ("attention_dropout", 0.1, number),
}
_CONSTANTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "conv_kernel": list(KERNELS),
    "conv_stride": list(STRIDES),
}
_ENCODER = Section(
    {
        **_SIZES,
        "convolution_norm": ("feat_extract_norm", "group", one_of("group", "layer")),
        "pre_norm": ("do_stable_layer_norm", False, switch),
        "adapter": ("adapter_attn_dim", None),
        "input_dropout": ("hidden_dropout", 0.1, number),
    },
    constants={**_CONSTANTS, "feat_extract_activation": "gelu", "add_adapter": False},
    # transformers has the embedding of masked frames only where this is not 0.
    written={"mask_time_prob": 0.05, "layerdrop": 0.0, "final_dropout": 0.0},
    training={"feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0},
)
_OMNI = "omniasr_ctc"
_OMNI_ENCODER = Section(
    _SIZES,
    constants=_CONSTANTS,
    written={"layerdrop": 0.0, "model_type": "omniasr_audio"},
    training={"layerdrop": 0.0},
)
_OMNI_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "conv_bias": True,
    "attention_dropout": 0.0,
}
_WAVLM = Section(
    {
        "distance_buckets": ("num_buckets", 320, integer),
        "longest_distance": ("max_bucket_distance", 800, integer),
    }
)
_HUBERT = Section(constants={"conv_pos_batch_norm": False, "feat_proj_layer_norm": True})
_FEATURES = Section(
    {"sample_rate": ("sampling_rate", 16_000), "normalize": ("do_normalize", True, switch)},
    constants={"feature_size": 1},
)

_QKV = tuple(f".attention.{x}_proj." for x in "qkv")
_POSITIONS = "encoder.pos_conv_embed.conv."
_NORM_PARTS = (
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ("weight_g", "weight_v"),
)
"""Length and direction of the weight of the convolution for positions, now and before."""

_HEADS = {_OMNI: "ctc_head."}
_HEAD, _MASK = "lm_head.", "masked_spec_embed"
_NEVER = -1e4
"""Bias of a class that never occurs."""

_PRETRAINING = "quantizer.", "project_q.", "project_hid."


_LAYER_NAMES = (
    (".norm_self_att.", ".layer_norm."),
    (".norm_feed_forward.", ".final_layer_norm."),
    (".norm_adapter.", ".adapter_layer.norm."),
    (".norm.", ".layer_norm."),
    (".self_attn.qkv_proj.", _QKV),
    (".self_attn.o_proj.", ".attention.out_proj."),
    (".self_attn.gate_scale", ".attention.gru_rel_pos_const"),
    (".self_attn.gate.", ".attention.gru_rel_pos_linear."),
    (".feed_forward.linear1.", ".feed_forward.intermediate_dense."),
    (".feed_forward.linear2.", ".feed_forward.output_dense."),
    (".adapter.linear", ".adapter_layer.linear_"),
)
_OMNI_NAMES = (
    ("encoder.stem.convolutions.", "encoder.stem.conv_layers."),
    ("encoder.stem.", "encoder.subsampling."),
    ("encoder.positions.", "encoder.encode_positions."),
    ("encoder.norm.", "encoder.layer_norm."),
    ("encoder.", "model.audio_tower."),
)


def _names(family: str) -> Renames:
    if family == _OMNI:
        return {"encoder.": (*_OMNI_NAMES, *_LAYER_NAMES), "ctc_head.": ()}
    return {
        "encoder.": (
            ("encoder.mask_embedding", f"{family}.{_MASK}"),
            ("encoder.stem.convolutions.", f"{family}.feature_extractor.conv_layers."),
            ("encoder.stem.norm.", f"{family}.feature_projection.layer_norm."),
            ("encoder.stem.", f"{family}.feature_projection."),
            ("encoder.positions.conv.weight", f"{family}.{_POSITIONS}{_NORM_PARTS[0][1]}"),
            ("encoder.positions.", f"{family}.encoder.pos_conv_embed."),
            ("encoder.input_norm.", f"{family}.encoder.layer_norm."),
            ("encoder.norm.", f"{family}.encoder.layer_norm."),
            ("encoder.layers.", f"{family}.encoder.layers."),
            *_LAYER_NAMES,
            ("encoder.distances.", f"{family}.encoder.layers.0.attention.rel_attn_embed."),
        ),
        "ctc_head.": (("ctc_head.", _HEAD),),
    }


def _read(family: str, content: Content) -> tuple[ModelConfig, int]:
    mapping, weights = content.config, content.weights
    is_omni, head_name = family == _OMNI, _HEADS.get(family, _HEAD)
    unused: list[str] = []
    if is_omni:
        audio = _OMNI_DEFAULTS | (mapping.get("audio_config") or {})
        fields, _ = _OMNI_ENCODER.read("config.audio_config", audio, unused)
        fields |= {"convolution_norm": "layer", "pre_norm": True}
    else:
        fields, _ = _ENCODER.read("config", mapping, unused)
        _HUBERT.read("config", mapping)
        fields |= _WAVLM.read("config", mapping)[0]
        if mapping.get("apply_spec_augment", True) and mapping.get("mask_time_prob", 0.05):
            unused.append("apply_spec_augment (`model.spec_augment` is ours)")
        if not fields["pre_norm"]:
            fields["adapter"] = None  # transformers has none in such layers
    if unused:
        _log.warning("Options of training are not used here: %s.", ", ".join(unused))
    encoder = Wav2Vec2EncoderConfig(family=family, **fields)  # pyright: ignore[reportArgumentType]
    features, _ = _FEATURES.read("preprocessor_config", content.preprocessor)
    classes = integer("config.vocab_size", mapping.get("vocab_size", 10_288 if is_omni else 32))
    option = "blank_token_id" if is_omni else "pad_token_id"
    blank = integer(f"config.{option}", mapping.get(option, 0))
    rule = f"be in the vocabulary of {classes}, as it is the blank"
    check(0 <= blank < (1 if is_omni else classes), option, "be 0" if is_omni else rule, blank)
    for name in list(weights):
        value = weights.pop(name)
        if not name.startswith(_PRETRAINING):
            # A model that is saved without any head has no prefix.
            has_prefix = is_omni or name.startswith((family, _HEAD))
            weights[name if has_prefix else f"{family}.{name}"] = value
    if not is_omni:
        if not any(name.startswith(_HEAD) for name in weights):
            classes, blank = 2, 0
            weights[f"{_HEAD}weight"] = torch.zeros(2, encoder.width)
            weights[f"{_HEAD}bias"] = torch.zeros(2)
        _multiply_out(weights, f"{family}.{_POSITIONS}")
        weights.setdefault(f"{family}.{_MASK}", torch.zeros(encoder.width))
    order = [*range(blank), *range(blank + 1, classes), blank]
    for name in ("weight", "bias"):
        head = weights.get(f"{head_name}{name}")
        if head is None or len(head) != classes:
            raise ValueError(
                f"`{head_name}{name}` must have the {classes} rows of `vocab_size`, but "
                f"{'is missing' if head is None else f'has {len(head)}'}: copy the folder again."
            )
        rows, bias = head[order], name == "bias"
        never = rows.new_full((int(is_omni), *rows.shape[1:]), _NEVER if bias else 0.0)
        rows = torch.cat([never, rows])
        weights[f"{head_name}{name}"] = rows if bias else rows[..., None]
    config = ModelConfig(
        features=FeatureConfig(
            kind="waveform", hop=320, window=400, epsilon=_epsilon(family), **features
        ),
        encoder=encoder,
        decoder=None,
        ctc=True,
    )
    return config, classes - (not is_omni)


def _epsilon(family: str) -> float:
    return 1e-5 if family == _OMNI else 1e-7


def _multiply_out(weights: dict[str, Tensor], positions: str) -> None:
    for parts in _NORM_PARTS:
        length, direction = (weights.pop(positions + part, None) for part in parts)
        if length is not None and direction is not None:
            direction = direction.double()
            norm = direction.norm(dim=(0, 1), keepdim=True)
            weights[positions + _NORM_PARTS[0][1]] = length.double() * direction / norm


def with_language(content: Content, directory: Path, language: str) -> Content:
    """Put the adapters and the head of a language of MMS in place of those of the model."""
    files = [f"adapter.{language}.safetensors", f"adapter.{language}.bin"]
    if not any((directory / name).is_file() for name in files):
        languages = sorted({path.name.split(".")[1] for path in directory.glob("adapter.*.*")})
        known = f"be {' or '.join(languages)}" if languages else "be left out"
        rule = f"{known} for {directory}, whose adapters are there"
        remedy = f"`hf download MODEL {files[0]} --local-dir {directory}` fetches others"
        check(False, "--language", rule, language, remedy)
    weights = {**content.weights, **read_weights(directory, files)}
    config = {**content.config, "vocab_size": len(weights[f"{_HEAD}bias"])}
    return replace(content, config=config, weights=weights)


def with_blank(content: Content, blank: int) -> Content:
    """Take the tokenizer's blank, by which transformers decodes, for that of the configuration."""
    stated = content.config.get("pad_token_id", 0)
    if stated != blank:
        _log.warning(
            "`pad_token_id` = %s of config.json is not the blank: it is %d, that of the tokenizer, "
            "as in transformers' pipeline.",
            stated,
            blank,
        )
    return replace(content, config={**content.config, "pad_token_id": blank})


def _write(family: str, model: ASRModel, tokens: SpecialTokens) -> Content:
    encoder, head, blank = model.config.encoder, model.ctc_head, tokens.blank_id
    features, is_omni = model.config.features, family == _OMNI
    assert isinstance(encoder, Wav2Vec2EncoderConfig)
    refuse(
        "transformers",
        {
            "decoder or transducer after wav2vec 2.0": head is None,
            f"features.epsilon={features.epsilon} (only {_epsilon(family)})": (
                features.epsilon != _epsilon(family)
            ),
        },
    )
    assert head is not None
    check(0 <= blank <= model.vocab_size, "blank_id", "be a class of the model", blank)
    last = model.vocab_size
    # Another tokenizer has no token of the blank, and so no class that never occurs.
    first = int(is_omni and head.bias is not None and float(head.bias[0].detach()) < _NEVER / 2)
    order = [*range(first, blank + first), last, *range(blank + first, last)]
    fields: dict[str, Any] = {"model_type": family, "vocab_size": len(order)}
    channels = {"conv_dim": [encoder.channels] * _LAYERS}
    if is_omni:
        fields["audio_config"] = _OMNI_ENCODER.write(encoder, **channels)
        fields |= {"blank_token_id": blank, "pad_token_id": tokens.pad_id if first else blank}
    else:
        fields |= _ENCODER.write(encoder, **channels) | {"pad_token_id": blank}
        fields |= {"hubert": _HUBERT, "wavlm": _WAVLM}.get(family, Section()).write(encoder)
    preprocessor = {
        "feature_extractor_type": f"{'OmniASR' if is_omni else 'Wav2Vec2'}FeatureExtractor",
        **_FEATURES.write(features),
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": encoder.convolution_norm == "layer",
    }
    weights = {}
    if not is_omni:
        weight = model.encoder.get_parameter("positions.conv.weight").detach().double().cpu()
        length = weight.norm(dim=(0, 1), keepdim=True).float()
        weights[f"{family}.{_POSITIONS}{_NORM_PARTS[0][0]}"] = length
    for name, value in head.named_parameters():
        weights[f"{_HEADS.get(family, _HEAD)}{name}"] = value.detach().float().cpu()[order]
    return Content(fields, preprocessor, weights=weights)


def _moonshine_sizes(part: str) -> dict[str, Any]:
    return {
        "width": ("hidden_size", 288, integer),
        "layers": (f"{part}_num_hidden_layers", 6, integer),
        "heads": (f"{part}_num_attention_heads", 8, integer),
        "feed_forward": ("intermediate_size", 1152, integer),
        "attention_dropout": ("attention_dropout", 0.0, number),
    }


_MOONSHINE_ENCODER = Section(
    _moonshine_sizes("encoder"),
    constants={"encoder_hidden_act": "gelu", "decoder_hidden_act": "silu", "attention_bias": False},
)
_MOONSHINE_DECODER = Section(
    {
        **_moonshine_sizes("decoder"),
        "max_positions": ("max_position_embeddings", 512, integer),
        "tie_embeddings": ("tie_word_embeddings", True, switch),
    }
)
_ROTARY = Section(
    {"rotary_fraction": ("partial_rotary_factor", 0.9, number)},
    constants={"rope_type": "default", "rope_theta": 10_000.0},
)
_MOONSHINE_OPTIONS: dict[str, Any] = {
    "positions": "rotary",
    "activation": "swiglu",
    **dict.fromkeys(("embedding_norm", "bias", "output_bias"), False),
}
_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.weight")
_MOONSHINE_NAMES = (
    ("encoder.stem.convolutions.0.norm.", "encoder.groupnorm."),
    *((f"encoder.stem.convolutions.{n}.conv.", f"encoder.conv{n + 1}.") for n in range(3)),
    ("encoder.norm.", "encoder.layer_norm."),
    ("encoder.", "model.encoder."),
    ("decoder.untied_weight", "proj_out.weight"),
    ("decoder.", "model.decoder."),
    (".norm_self_att.", ".input_layernorm."),
    (".norm_feed_forward.", ".post_attention_layernorm."),
    (".feed_forward.linear", ".mlp.fc"),
    (".mlp.linear", ".mlp.fc"),
    (".self_attn.qkv_proj.", tuple(f".self_attn.{x}_proj." for x in "qkv")),
    (".encoder_attn.kv_proj.", tuple(f".encoder_attn.{x}_proj." for x in "kv")),
)
MOONSHINE: Renames = {"encoder.": _MOONSHINE_NAMES, "decoder.": _MOONSHINE_NAMES}


def _read_moonshine(content: Content) -> tuple[ModelConfig, int]:
    mapping, weights = content.config, content.weights
    fields, _ = _MOONSHINE_ENCODER.read("config", mapping)
    decoder, _ = _MOONSHINE_DECODER.read("config", mapping)
    heads = only(fields["heads"], None)
    names = (f"decoder_num_{x}heads" for x in ("attention_", "key_value_"))
    fixed = {name: heads for name in ("encoder_num_key_value_heads", *names)}
    Section(fixed=fixed).read("config", mapping)
    # Older files have it outside.
    rotary, _ = _ROTARY.read("config", {**mapping, **(mapping.get("rope_parameters") or {})})
    encoder = Wav2Vec2EncoderConfig(
        **(fields | rotary), family="moonshine", convolution_bias=True, pre_norm=True
    )
    channels, fraction = encoder.width // encoder.heads, encoder.rotary_fraction
    rule = f"rotate an even number of the {channels} channels of a head"
    check(int(channels * fraction) % 2 == 0, "config.partial_rotary_factor", rule, fraction)
    if decoder["tie_embeddings"]:
        weights.pop("proj_out.weight", None)
    _permute(weights, encoder, inverse=False)
    preprocessor = {"do_normalize": False, **content.preprocessor}
    features, _ = _FEATURES.read("preprocessor_config", preprocessor)
    suppressed = tuple(content.generation.get("suppress_tokens") or ())
    config = ModelConfig(
        features=FeatureConfig(kind="waveform", hop=384, window=895, **features),
        encoder=encoder,
        decoder=DecoderConfig(**decoder, **rotary, **_MOONSHINE_OPTIONS, suppress=suppressed),
    )
    return config, integer("config.vocab_size", mapping.get("vocab_size", 32_768))


def _permute(weights: dict[str, Tensor], encoder: Wav2Vec2EncoderConfig, *, inverse: bool) -> None:
    """Bring channels that rotate together from neighbours to the halves of a head, or back."""
    channels = encoder.width // encoder.heads
    rotated = Rotary(fraction=encoder.rotary_fraction).rotated(channels)
    order = torch.arange(channels)
    order[:rotated] = torch.arange(rotated).view(-1, 2).T.flatten()
    order = order.argsort() if inverse else order
    for name in filter(_ROTATED.fullmatch, weights):
        weights[name] = weights[name].unflatten(0, (-1, channels))[:, order].flatten(0, 1)


def _write_moonshine(model: ASRModel, tokens: SpecialTokens) -> Content:
    encoder, decoder = model.config.encoder, model.config.decoder
    assert isinstance(encoder, Wav2Vec2EncoderConfig)
    refuse("transformers", {"CTC head alone after a Moonshine's encoder": decoder is None})
    assert decoder is not None
    reasons = {
        f"decoder.{name}={getattr(decoder, name)}": getattr(decoder, name) != value
        for name, value in _MOONSHINE_OPTIONS.items()
    }
    for name in ("width", "heads", "feed_forward", "rotary_fraction", "attention_dropout"):
        ours, theirs = getattr(encoder, name), getattr(decoder, name)
        reasons[f"encoder.{name}={ours} with decoder.{name}={theirs}"] = ours != theirs
    refuse("transformers", reasons)
    ids = tokens.fields(model.vocab_size)
    fields = {
        "model_type": "moonshine",
        **_MOONSHINE_ENCODER.write(encoder),
        **_MOONSHINE_DECODER.write(decoder),
        "rope_parameters": _ROTARY.write(encoder),
        "vocab_size": model.vocab_size,
        # transformers would not train the embedding of a padding token, which may be the end.
        **ids | {"pad_token_id": None},
    }
    generation: dict[str, Any] = {**ids, "max_length": decoder.max_positions}
    if suppressed := [*decoder.suppress, *tokens.unused_classes(model.vocab_size)]:
        generation["suppress_tokens"] = suppressed
    state = {name: x for name, x in model.state_dict().items() if ".qkv_proj." in name}
    weights = export_weights(state, MOONSHINE)
    _permute(weights, encoder, inverse=True)
    preprocessor: dict[str, Any] = {"feature_extractor_type": "Wav2Vec2FeatureExtractor"}
    preprocessor |= {**_FEATURES.write(model.config.features), "return_attention_mask": True}
    return Content(fields, preprocessor, generation, weights)


CLASSES = {
    family: ModelClass(name, "ctc", _names(family), partial(_read, family), partial(_write, family))
    for family, name in {
        "wav2vec2": "Wav2Vec2ForCTC",
        "hubert": "HubertForCTC",
        _OMNI: "OmniASRForCTC",
        "wavlm": "WavLMForCTC",
    }.items()
}
_NAME = "MoonshineForConditionalGeneration"
CLASSES["moonshine"] = ModelClass(_NAME, "decoder", MOONSHINE, _read_moonshine, _write_moonshine)
