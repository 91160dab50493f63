"""``WhisperForConditionalGeneration``, such as openai/whisper-small.

Utterances are followed by silence up to the 30 s that such models were trained with:
``features.minimum_s``. The tokens that generation suppresses are the decoder's ``suppress`` and
``begin_suppress``; its fields of timestamps are kept for an export.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from effasr.data.features.config import FeatureConfig
from effasr.interop.huggingface.files import Content, ModelClass, SpecialTokens
from effasr.interop.tables import Renames, Section, number, refuse
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr.nn.positions import whisper_sinusoids

_log = logging.getLogger(__name__)

_CONSTANTS = {"activation_function": "gelu", "scale_embedding": False}
_DROPOUTS = {
    "input_dropout": ("dropout", 0.0, number),
    "residual_dropout": ("dropout", 0.0, number),
    "attention_dropout": ("attention_dropout", 0.0, number),
    "activation_dropout": ("activation_dropout", 0.0, number),
}
_ENCODER = Section(
    {
        "width": ("d_model", 384),
        "layers": ("encoder_layers", 4),
        "heads": ("encoder_attention_heads", 6),
        "feed_forward": ("encoder_ffn_dim", 1_536),
        "max_frames": ("max_source_positions", 1_500),
        **_DROPOUTS,
    },
    constants=_CONSTANTS,
)
_DECODER = Section(
    {
        "width": ("d_model", 384),
        "layers": ("decoder_layers", 4),
        "heads": ("decoder_attention_heads", 6),
        "feed_forward": ("decoder_ffn_dim", 1_536),
        "max_positions": ("max_target_positions", 448),
        "tie_embeddings": ("tie_word_embeddings", True),
        **_DROPOUTS,
    },
    constants=_CONSTANTS,
)
# transformers itself refuses features of another length.
_FEATURES = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
_UNUSED = {
    "encoder_layerdrop": "`encoder_layerdrop`",
    "decoder_layerdrop": "`decoder_layerdrop`",
    "apply_spec_augment": "SpecAugment as transformers has it (`model.spec_augment` is ours)",
}
_POSITIONS = "model.encoder.embed_positions.weight"
_POSITION_ERROR = 2e-4
"""Rounding error of float32 sinusoids of angles up to 1500."""

_TIMESTAMPS = 1501
"""From 0 to 30 s, each 20 ms."""

_SELF, _CROSS = ".self_attn.", ".encoder_attn."
# Whisper's projections of keys have no bias.
_ATTENTION_NAMES = (
    (f"{_SELF}qkv_proj.weight", tuple(f"{_SELF}{x}_proj.weight" for x in "qkv")),
    (f"{_SELF}qkv_proj.bias", tuple(f"{_SELF}{x}_proj.bias" for x in "qv")),
    (f"{_CROSS}kv_proj.weight", tuple(f"{_CROSS}{x}_proj.weight" for x in "kv")),
    (f"{_CROSS}kv_proj.bias", f"{_CROSS}v_proj.bias"),
    (".o_proj.", ".out_proj."),
    (".norm.", ".layer_norm."),
)
WHISPER: Renames = {
    "encoder.": (
        ("encoder.", "model.encoder."),
        (".stem.conv1.", ".conv1."),
        (".stem.conv2.", ".conv2."),
        (".norm_self_att.", ".self_attn_layer_norm."),
        (".norm_feed_forward.", ".final_layer_norm."),
        (".feed_forward.linear1.", ".fc1."),
        (".feed_forward.linear2.", ".fc2."),
        *_ATTENTION_NAMES,
    ),
    "decoder.": (
        ("decoder.untied_weight", "proj_out.weight"),
        ("decoder.", "model.decoder."),
        (".input_layernorm.", ".self_attn_layer_norm."),
        (".post_attention_layernorm.", ".encoder_attn_layer_norm."),
        (".final_layernorm.", ".final_layer_norm."),
        (".mlp.linear1.", ".fc1."),
        (".mlp.linear2.", ".fc2."),
        *_ATTENTION_NAMES,
    ),
}


def _read(content: Content) -> tuple[ModelConfig, int]:
    mapping, weights = content.config, content.weights
    for name, text in _UNUSED.items():
        if mapping.get(name):
            _log.warning("%s is not used in training here.", text)
    learned = _is_learned(weights.get(_POSITIONS))
    if learned:
        _log.warning(
            "The encoder's position embeddings are not Whisper's sinusoids, but were learnt, as "
            "some versions of transformers fine-tune them; they are trained here as well "
            "(training.freeze=[encoder.embed_positions] keeps them)."
        )
    else:
        weights.pop(_POSITIONS, None)
    if mapping.get("tie_word_embeddings", True):
        weights.pop("proj_out.weight", None)
    # Older checkpoints have the generation settings in config.json.
    generation = content.generation or mapping
    positions = "learned" if learned else "sinusoidal"
    fields, _ = _ENCODER.read("config", mapping)
    encoder = WhisperEncoderConfig(**fields, positions=positions)
    timestamp = generation.get("max_initial_timestamp_index")
    fields, _ = _DECODER.read("config", mapping)
    decoder = DecoderConfig(
        **fields,
        positions="learned",
        activation="gelu",
        embedding_norm=False,
        key_bias=False,
        output_bias=False,
        suppress=tuple(generation.get("suppress_tokens") or ()),
        begin_suppress=tuple(generation.get("begin_suppress_tokens") or ()),
        max_initial_timestamp=timestamp if isinstance(timestamp, int) else None,
    )
    bins = mapping.get("num_mel_bins", 80)
    seconds = encoder.max_frames / 50
    expected = {**_FEATURES, "feature_size": bins, "chunk_length": seconds}
    Section(constants=expected).read("preprocessor_config", content.preprocessor)
    config = ModelConfig(
        features=FeatureConfig(
            kind="whisper",
            sample_rate=16_000,
            subsampling=2,
            minimum_s=seconds,
            mel_bins=bins,
            n_fft=400,
            window=400,
            hop=160,
            preemphasis=0.0,
            normalize=False,
        ),
        encoder=encoder,
        decoder=_with_alignment_heads(decoder, generation.get("alignment_heads")),
    )
    return config, mapping.get("vocab_size", 51_865)


def _is_learned(table: Tensor | None) -> bool:
    if table is None:
        return False
    error = max(_POSITION_ERROR, 2 * torch.finfo(table.dtype).eps)
    expected = whisper_sinusoids(torch.arange(len(table)), table.shape[1])
    return bool((table.float() - expected).abs().max() > error)


def _with_alignment_heads(decoder: DecoderConfig, heads: Any) -> DecoderConfig:
    """Add alignment heads, or warn where they are another model's, such as a larger one's."""
    try:
        return replace(decoder, alignment_heads=tuple((int(x), int(y)) for x, y in heads or ()))
    except (TypeError, ValueError, OverflowError):
        _log.warning(
            "`alignment_heads` of generation_config.json is not exported again, as it does not "
            "name layers and heads of the decoder: transformers will have no word timestamps."
        )
        return decoder


def _write(model: ASRModel, tokens: SpecialTokens) -> Content:
    """The files; there is a warning for a model that was trained without silence."""
    encoder, decoder = model.config.encoder, model.config.decoder
    if decoder is None or not isinstance(encoder, WhisperEncoderConfig):
        raise ValueError(
            "`decoder` must be given for a Whisper model, but is null: transformers has no CTC "
            "model with an encoder of kind transformer. Export ONNX graphs instead."
        )
    _check(model.config, encoder, decoder)
    # Nothing reads the start of a text; the value is that of published models.
    ids = {**tokens.fields(model.vocab_size), "bos_token_id": tokens.eos_id}
    preprocessor = _write_features(model.config.features, encoder)
    if model.config.features.framing.minimum < encoder.max_frames:
        _log.warning(
            "The model was trained with `features.minimum_s` = %g, but transformers pads every "
            "utterance to %g s, which may cost accuracy: evaluate what is exported.",
            model.config.features.minimum_s,
            preprocessor["chunk_length"],
        )
    _warn_about_dropouts(encoder, decoder)
    fields = {
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "num_mel_bins": model.config.features.mel_bins,
        "num_hidden_layers": encoder.layers,
        **_ENCODER.write(encoder),
        # If both have a field, the decoder's value is exported.
        **_DECODER.write(decoder),
        "vocab_size": model.vocab_size,
        **ids,
    }
    generation = {
        "max_length": decoder.max_positions,
        "suppress_tokens": [*decoder.suppress, *_unused_classes(tokens, model.vocab_size)],
        "begin_suppress_tokens": list(decoder.begin_suppress),
        "return_timestamps": False,
        **ids,
        **tokens.generation,
    }
    if decoder.alignment_heads:
        generation["alignment_heads"] = decoder.alignment_heads
    if decoder.max_initial_timestamp is not None:
        generation["max_initial_timestamp_index"] = decoder.max_initial_timestamp
    table = whisper_sinusoids(torch.arange(encoder.max_frames), encoder.width)
    computed = {_POSITIONS: table} if encoder.positions == "sinusoidal" else {}
    return Content(fields, preprocessor, generation, computed)


def _unused_classes(tokens: SpecialTokens, vocab_size: int) -> list[int]:
    """The classes that no token has; timestamps, which some tokenizers do not list, have one."""
    last = tokens.generation.get("no_timestamps_token_id", vocab_size)
    timestamps = range(last + 1, last + 1 + _TIMESTAMPS)
    return [number for number in tokens.unused_classes(vocab_size) if number not in timestamps]


def _check(config: ModelConfig, encoder: WhisperEncoderConfig, decoder: DecoderConfig) -> None:
    refuse(
        "transformers",
        {
            f"decoder.width={decoder.width}, not encoder.width={encoder.width}": (
                decoder.width != encoder.width
            ),
            f"decoder.head_dim={decoder.head_dim}": (
                decoder.head_width * decoder.heads != decoder.width
            ),
            f"decoder.positions={decoder.positions}": decoder.positions != "learned",
            f"decoder.activation={decoder.activation}": decoder.activation != "gelu",
            "decoder.embedding_norm=true": decoder.embedding_norm,
            "decoder.output_bias=true": decoder.output_bias,
            "encoder.bias=false or decoder.bias=false": not (encoder.bias and decoder.bias),
            "encoder.key_bias=true or decoder.key_bias=true": (
                encoder.key_bias or decoder.key_bias
            ),
            f"features.kind={config.features.kind}": config.features.kind != "whisper",
        },
    )


def _write_features(features: FeatureConfig, encoder: WhisperEncoderConfig) -> dict[str, Any]:
    samples = encoder.max_frames * features.framing.samples
    seconds, remainder = divmod(samples, features.sample_rate)
    reasons = {f"encoder.max_frames={encoder.max_frames}, not whole seconds": remainder != 0}
    for name, value in {"sample_rate": 16_000, "hop": 160, "n_fft": 400}.items():
        actual = getattr(features, name)
        reasons[f"features.{name}={actual} (only {value})"] = actual != value
    refuse("transformers", reasons)
    return {
        **_FEATURES,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
        "feature_size": features.mel_bins,
        "chunk_length": seconds,
        "n_samples": samples,
        "nb_max_frames": samples // features.hop,
        "processor_class": "WhisperProcessor",
    }


def _warn_about_dropouts(encoder: WhisperEncoderConfig, decoder: DecoderConfig) -> None:
    names = "residual_dropout", "activation_dropout", "attention_dropout"
    differ = [name for name in names if getattr(encoder, name) != getattr(decoder, name)]
    for name, part in (("encoder", encoder), ("decoder", decoder)):
        if part.input_dropout != part.residual_dropout:
            differ.append(f"{name}.input_dropout")
    if differ:
        _log.warning(
            "transformers has one dropout where encoder and decoder differ here, in %s: that of "
            "the decoder's modules is exported.",
            ", ".join(differ),
        )


CLASSES = {
    "whisper": ModelClass("WhisperForConditionalGeneration", "decoder", WHISPER, _read, _write)
}
