"""NeMo's ``model_config.yaml`` of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.interop.export_checks import refuse, refuse_experts
from effasr.interop.nemo import sections
from effasr.interop.nemo.config import CTC, HYBRID, MULTITASK, TRANSDUCER
from effasr.interop.nemo.contexts import write_contexts
from effasr.interop.nemo.tokenizer import NemoTokens
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig

_TARGETS = {
    CTC: "ctc_bpe_models",
    TRANSDUCER: "rnnt_bpe_models",
    HYBRID: "hybrid_rnnt_ctc_bpe_models",
    MULTITASK: "aed_multitask_models",
}
_ASR = "nemo.collections.asr."
_PLACES = 5000
"""Initial length of NeMo's position table, which grows."""

# Fields that are exported; all other fields of a decoder must have their defaults.
_DECODER_FIELDS = (
    *("width", "layers", "heads", "head_dim", "feed_forward", "max_positions", "bias"),
    *("output_bias", "tie_embeddings"),
    *("input_dropout", "residual_dropout", "activation_dropout", "attention_dropout"),
)


def nemo_class(config: ModelConfig) -> str:
    """Return the class of NeMo for the first output of a model; see `export_nemo`."""
    if config.decoder is not None:
        return MULTITASK
    if config.transducer is not None:
        return HYBRID if config.ctc else TRANSDUCER
    return CTC


def check_expressible(config: ModelConfig) -> None:
    """Check that NeMo can express the first output of a model.

    Raises:
        ValueError: It cannot; the message lists all reasons.
    """
    refuse_experts(config, "NeMo")
    encoder, decoder = config.encoder, config.decoder
    if not isinstance(encoder, FastConformerConfig):
        raise ValueError(
            f"`encoder.kind` must be that of a FastConformer for a .nemo file, but is "
            f"{encoder.kind}: export with --format huggingface."
        )
    reasons = {
        f"encoder.position={encoder.position} (only relative)": encoder.position != "relative",
        "encoder.subsampling_norm": encoder.subsampling_norm,
        "encoder.context with `right` and chunks, or with parts of chunks on the left": (
            write_contexts(encoder.context) is None
        ),
        f"encoder.input_positions={encoder.input_positions} (only 0)": encoder.input_positions != 0,
        f"encoder.feed_forward={encoder.feed_forward}, not a multiple of the width": (
            encoder.feed_forward % encoder.width != 0
        ),
        f"features.kind={config.features.kind} (only parakeet)": config.features.kind != "parakeet",
    }
    if decoder is not None:
        reasons |= _decoder_reasons(decoder)
    elif config.transducer is not None:
        predictor = config.transducer.predictor
        reasons[f"transducer.predictor={predictor} (only lstm)"] = predictor != "lstm"
    refuse("NeMo", reasons)


def _decoder_reasons(decoder: DecoderConfig) -> dict[str, bool]:
    reasons = {
        f"decoder.head_dim={decoder.head_dim}, not decoder.width / decoder.heads": (
            decoder.head_width * decoder.heads != decoder.width
        ),
        "decoder.tie_embeddings=False": not decoder.tie_embeddings,
    }
    for field in dataclasses.fields(decoder):
        value = getattr(decoder, field.name)
        if field.name not in _DECODER_FIELDS and value != field.default:
            reasons[f"decoder.{field.name}={value} (only {field.default})"] = True
    return reasons


def model_yaml(config: ModelConfig, tokens: NemoTokens, classes: int) -> dict[str, Any]:
    """Return the whole of ``model_config.yaml``, with training options as in NeMo's examples.

    Args:
        config: One that `check_expressible` accepts.
        tokens: The tokenizer.
        classes: Number of classes of the decoder's output.
    """
    name, encoder = nemo_class(config), config.encoder
    assert isinstance(encoder, FastConformerConfig)  # checked by check_expressible
    yaml: dict[str, Any] = {
        "sample_rate": config.features.sample_rate,
        "log_prediction": True,
        **_data(config.features.sample_rate, lhotse=name == MULTITASK),
        "tokenizer": tokens.section,
        "preprocessor": _preprocessor(config.features),
    }
    if config.spec_augment != SpecAugmentConfig():
        yaml["spec_augment"] = {
            "_target_": f"{_ASR}modules.SpectrogramAugmentation",
            **dataclasses.asdict(config.spec_augment),
        }
    yaml["encoder"] = _encoder(encoder, config.features.mel_bins)
    if name == MULTITASK:
        assert config.decoder is not None
        yaml |= _multitask(config.decoder, encoder.width, tokens, classes)
    else:
        yaml |= _labels(config, name, encoder.width, tokens.vocabulary)
    optim: dict[str, Any] = {"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.98]}
    optim |= {"weight_decay": 1e-3}
    optim["sched"] = {"name": "CosineAnnealing", "warmup_steps": 500, "min_lr": 1e-6}
    return {
        **yaml,
        "optim": optim,
        "target": f"{_ASR}models.{_TARGETS[name]}.{name}",
    }


def _data(rate: int, *, lhotse: bool) -> dict[str, Any]:
    """Return the sections in which NeMo's users name recordings."""
    common: dict[str, Any] = {"manifest_filepath": None, "sample_rate": rate, "batch_size": 8}
    common |= {"use_lhotse": True} if lhotse else {}
    common |= {"num_workers": 4, "pin_memory": True}
    training = {**common, "shuffle": True, "max_duration": 40, "min_duration": 0.1}
    return {
        "train_ds": training,
        "validation_ds": {**common, "shuffle": False},
        "test_ds": {**common, "shuffle": False},
    }


def _preprocessor(features: FeatureConfig) -> dict[str, Any]:
    return {
        "_target_": f"{_ASR}modules.AudioToMelSpectrogramPreprocessor",
        **sections.PREPROCESSOR.write(features),
        "normalize": "per_feature" if features.normalize else "NA",
        "window_size": _seconds(features.window, features.sample_rate),
        "window_stride": _seconds(features.hop, features.sample_rate),
        "window": "hann",
        "n_fft": features.n_fft,
        "log": True,
        "frame_splicing": 1,
        "dither": 1e-5,
        "pad_to": 0,
        "pad_value": 0.0,
    }


def _seconds(samples: int, rate: int) -> float:
    """Return seconds that NeMo truncates to this many samples."""
    seconds = samples / rate
    return seconds if int(seconds * rate) == samples else (samples + 0.5) / rate


def _encoder(encoder: FastConformerConfig, bands: int) -> dict[str, Any]:
    return {
        "_target_": f"{_ASR}modules.ConformerEncoder",
        **sections.ENCODER.write(encoder),
        "feat_in": bands,
        "feat_out": -1,
        "use_bias": encoder.bias or encoder.convolution_bias,
        "subsampling": "dw_striding",
        "reduction": None,
        "reduction_position": None,
        "reduction_factor": 1,
        "ff_expansion_factor": encoder.feed_forward // encoder.width,
        "self_attention_model": "rel_pos",
        **(write_contexts(encoder.context) or {}),
        "untie_biases": True,
        "pos_emb_max_len": _PLACES,
        "conv_norm_type": encoder.conv_norm,
        "conv_context_size": "causal" if encoder.causal_convolution else None,
        "stochastic_depth_drop_prob": 0.0,
        "stochastic_depth_mode": "linear",
        "stochastic_depth_start_layer": 1,
    }


def _labels(config: ModelConfig, name: str, width: int, pieces: Sequence[str]) -> dict[str, Any]:
    """Return the sections after the encoder of a CTC model or a transducer."""
    head = {
        "_target_": f"{_ASR}modules.ConvASRDecoder",
        "feat_in": width,
        "num_classes": len(pieces),
        "vocabulary": list(pieces),
    }
    if name == CTC:
        return {"labels": list(pieces), "decoder": head, "decoding": {"strategy": "greedy"}}
    assert config.transducer is not None
    yaml = _transducer(config.transducer, width, pieces)
    if name == HYBRID:
        yaml["aux_ctc"] = {
            "ctc_loss_weight": 0.3,
            "use_cer": False,
            "ctc_reduction": "mean_batch",
            "decoder": head,
            "decoding": {"strategy": "greedy"},
        }
    return yaml


def _transducer(options: TransducerConfig, width: int, pieces: Sequence[str]) -> dict[str, Any]:
    durations = None if options.durations is None else list(options.durations)
    defaults = {
        "enc_hidden": width,
        "pred_hidden": options.width,
        "joint_hidden": options.joint,
    }
    joint: dict[str, Any] = {
        "_target_": f"{_ASR}modules.RNNTJoint",
        "log_softmax": None,
        "preserve_memory": False,
        "fuse_loss_wer": True,
        "fused_batch_size": 4,
        "jointnet": {
            "joint_hidden": options.joint,
            "activation": options.activation,
            "dropout": 0.0,
            "encoder_hidden": width,
            "pred_hidden": options.width,
        },
        "num_classes": len(pieces),
        "vocabulary": list(pieces),
    }
    decoding: dict[str, Any] = {
        "strategy": "greedy_batch",
        "greedy": {"max_symbols": 10},
        "beam": {"beam_size": 2, "return_best_hypothesis": False, "score_norm": True},
    }
    loss: dict[str, Any] = {
        "loss_name": "warprnnt_numba",
        "warprnnt_numba_kwargs": {"fastemit_lambda": options.fastemit, "clamp": -1.0},
    }
    if durations is not None:
        defaults |= {"tdt_durations": durations, "num_tdt_durations": len(durations)}
        joint["num_extra_outputs"] = len(durations)
        decoding |= {"model_type": "tdt", "durations": durations}
        common = {"fastemit_lambda": options.fastemit, "clamp": -1.0, "omega": 0.0}
        kwargs = {**common, "durations": durations, "sigma": options.sigma}
        loss = {"loss_name": "tdt", "tdt_kwargs": kwargs}
    return {
        "compute_eval_loss": False,
        "model_defaults": defaults,
        "labels": list(pieces),
        "decoder": {
            "_target_": f"{_ASR}modules.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {
                **sections.PREDNET.write(options),
                "t_max": None,
            },
            "vocab_size": len(pieces),
        },
        "joint": joint,
        "decoding": decoding,
        "loss": loss,
    }


def _multitask(
    decoder: DecoderConfig, width: int, tokens: NemoTokens, classes: int
) -> dict[str, Any]:
    layers = {
        **sections.DECODER_LAYERS.write(decoder),
        "num_token_types": 0,
        "learn_positional_encodings": False,
        "hidden_act": "relu",
        "pre_ln": True,
        "ffn_dropout": decoder.residual_dropout,
        "vocab_size": classes,
    }
    prompt = {"canary": 5, "canary2": 9}
    assert tokens.prompt_format is not None  # checked by nemo_tokens
    losses = "nemo.collections.common.losses.smoothed_cross_entropy."
    return {
        "label_smoothing": 0.0,
        "prompt_format": tokens.prompt_format,
        "context_len_for_AR_decoding": prompt[tokens.prompt_format],
        "model_defaults": {
            "asr_enc_hidden": width,
            "lm_enc_hidden": decoder.width,
            "lm_dec_hidden": decoder.width,
        },
        "transf_decoder": {
            "_target_": f"{_ASR}modules.transformer.get_nemo_transformer",
            "model_name": None,
            "pretrained": False,
            "encoder": None,
            "pre_ln_final_layer_norm": True,
            "config_dict": layers,
        },
        "head": {
            "_target_": f"{_ASR}parts.submodules.token_classifier.TokenClassifier",
            "num_layers": 1,
            "activation": "relu",
            "log_softmax": True,
            "hidden_size": decoder.width,
            "num_classes": classes,
            "dropout": 0.0,
            "use_transformer_init": True,
        },
        "decoding": {
            "strategy": "beam",
            "return_best_hypothesis": True,
            "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 50},
        },
        "loss": {
            "_target_": f"{losses}SmoothedCrossEntropyLoss",
            "label_smoothing": 0.0,
            "pad_id": None,
        },
    }
