"""Conversion of NeMo's model configurations to this project's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.interop.nemo import sections
from effasr.interop.nemo.contexts import read_contexts, read_convolution
from effasr.interop.nemo.options import integer, number, switch
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig

CTC, TRANSDUCER = "EncDecCTCModelBPE", "EncDecRNNTBPEModel"
HYBRID, MULTITASK = "EncDecHybridRNNTCTCBPEModel", "EncDecMultiTaskModel"
CLASSES = (CTC, TRANSDUCER, HYBRID, MULTITASK)
"""NeMo's models that are supported here."""


def model_class(config: Mapping[str, Any]) -> str:
    """Return the class of a configuration.

    Raises:
        ValueError: It is not supported here.
    """
    name = str(config.get("target")).rsplit(".", 1)[-1]
    if name not in CLASSES:
        raise ValueError(
            f"`target` must be one of {', '.join(CLASSES)}, but is {config.get('target')}: these "
            "are NeMo's FastConformer models with a SentencePiece tokenizer."
        )
    if config.get("adapters"):
        raise ValueError(
            f"`adapters` must be empty, but has {', '.join(map(str, config['adapters']))}: save "
            "the model without them."
        )
    return name


def read_model(config: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """Read ``model_config.yaml``.

    Returns:
        The architecture, and the training options that are not used here.

    Raises:
        ValueError: It has an option that is not supported here; the message names it.
    """
    name, unused = model_class(config), []
    features = _features(config.get("preprocessor"), unused)
    encoder = _encoder(config.get("encoder"), features, unused)
    if name == CTC:
        sections.CTC.read("decoder", config.get("decoder"), unused)
    if name == HYBRID:
        aux = config.get("aux_ctc")
        section = aux.get("decoder") if isinstance(aux, Mapping) else None
        sections.CTC.read("aux_ctc.decoder", section, unused)
    is_transducer = name in (TRANSDUCER, HYBRID)
    read = ModelConfig(
        features=features,
        spec_augment=_augment(config.get("spec_augment"), unused),
        encoder=encoder,
        decoder=_decoder(config, encoder.width, unused) if name == MULTITASK else None,
        ctc=name in (CTC, HYBRID),
        transducer=_transducer(config, unused) if is_transducer else None,
    )
    return read, unused


def _features(mapping: Any, unused: list[str]) -> FeatureConfig:
    values = sections.PREPROCESSOR.read("preprocessor", mapping, unused)
    fields = sections.PREPROCESSOR.convert("preprocessor", values)
    rate = fields["sample_rate"]
    top = mapping.get("highfreq")
    if top not in (None, 0) and top != rate / 2:
        raise ValueError(f"`preprocessor.highfreq` must be {rate // 2} or null, but is {top}.")
    # NeMo truncates seconds to samples in the same way.
    window, hop = (
        int(values[seconds] * rate) if values[seconds] else integer(samples, values[samples])
        for seconds, samples in (
            ("window_size", "n_window_size"),
            ("window_stride", "n_window_stride"),
        )
    )
    normalize = values["normalize"]
    if normalize not in ("per_feature", "NA", None, False):
        raise ValueError(
            f"`preprocessor.normalize` must be per_feature or NA, but is {normalize!r}."
        )
    return FeatureConfig(
        **fields,
        n_fft=values["n_fft"] or 2 ** math.ceil(math.log2(window)),
        window=window,
        hop=hop,
        normalize=normalize == "per_feature",
    )


def _encoder(mapping: Any, features: FeatureConfig, unused: list[str]) -> FastConformerConfig:
    values = sections.ENCODER.read("encoder", mapping, unused)
    fields = sections.ENCODER.convert("encoder", values)
    width, taps = fields["width"], fields["conv_kernel"]
    _same("encoder.feat_in", values["feat_in"], features.mel_bins, "preprocessor.features")
    if values["feat_out"] not in (None, -1, 0, width):
        raise ValueError(
            f"`encoder.feat_out` must be -1 or d_model = {width}, but is {values['feat_out']}."
        )
    if values["reduction"] and values["reduction_factor"] not in (None, 1):
        raise ValueError(
            f"`encoder.reduction` must be null, but is {values['reduction']} by "
            f"{values['reduction_factor']}."
        )
    norm = values["conv_norm_type"]
    if norm not in ("batch_norm", "layer_norm"):
        raise ValueError(
            f"`encoder.conv_norm_type` must be batch_norm or layer_norm, but is {norm}."
        )
    if not switch("encoder.untie_biases", values["untie_biases"]):
        # The weights of each layer contain a copy of the biases.
        unused.append("encoder.untie_biases = False")
    if fields["subsampling_channels"] == -1:
        fields["subsampling_channels"] = width
    return FastConformerConfig(
        **fields,
        feed_forward=width * integer("encoder.ff_expansion_factor", values["ff_expansion_factor"]),
        conv_norm=norm,
        context=read_contexts(values["att_context_size"], values["att_context_style"]),
        causal_convolution=read_convolution(values["conv_context_size"], taps),
        convolution_bias=fields["bias"],
        activation_dropout=fields["residual_dropout"],
    )


def _transducer(config: Mapping[str, Any], unused: list[str]) -> TransducerConfig:
    predictor = sections.PREDICTOR.read("decoder", config.get("decoder"), unused)
    prednet = sections.PREDNET.read("decoder.prednet", predictor["prednet"], unused)
    joint = sections.JOINT.read("joint", config.get("joint"), unused)
    jointnet = sections.JOINTNET.read("joint.jointnet", joint["jointnet"], unused)
    fields = sections.PREDNET.convert("decoder.prednet", prednet)
    width = fields["width"]
    if prednet["rnn_hidden_size"] not in (None, -1, width):
        raise ValueError(
            f"`decoder.prednet.rnn_hidden_size` must be pred_hidden = {width}, but is "
            f"{prednet['rnn_hidden_size']}."
        )
    activation = str(jointnet["activation"]).lower()
    if activation not in ("relu", "tanh"):
        raise ValueError(f"`joint.jointnet.activation` must be relu or tanh, but is {activation}.")
    durations, options = _loss(config, unused)
    _same(
        "joint.num_extra_outputs",
        joint["num_extra_outputs"] or 0,
        len(durations or ()),
        "the number of durations of the loss",
    )
    return TransducerConfig(
        **fields,
        predictor="lstm",
        joint=integer("joint.jointnet.joint_hidden", jointnet["joint_hidden"]),
        activation=activation,
        fastemit=number("fastemit_lambda", options.get("fastemit_lambda")),
        durations=durations,
        sigma=number("sigma", options.get("sigma")) if durations else 0.0,
    )


def _loss(
    config: Mapping[str, Any], unused: list[str]
) -> tuple[tuple[int, ...] | None, Mapping[str, Any]]:
    """Return the durations of a TDT, None for an RNN-T, and the options of the loss."""
    loss, decoding = config.get("loss") or {}, config.get("decoding") or {}
    name = loss.get("loss_name") or "default"
    if decoding.get("big_blank_durations") or name.startswith("multiblank"):
        raise ValueError(
            "`loss.loss_name` must be that of an RNN-T or a TDT, but is one with big blanks, "
            f"{name}."
        )
    if name not in sections.TDT_LOSSES:
        if name not in sections.RNNT_LOSSES:
            # The model is the same; only the training objective differs.
            unused.append(f"loss.loss_name = {name}")
        resolved = "warprnnt_numba" if name == "default" else name
        return None, loss.get(f"{resolved}_kwargs") or {}
    options = loss.get(f"{name}_kwargs") or {}
    if options.get("omega"):
        unused.append(f"loss.{name}_kwargs.omega = {options['omega']}")
    defaults = config.get("model_defaults") or {}
    durations = (
        options.get("durations") or decoding.get("durations") or defaults.get("tdt_durations")
    )
    if not isinstance(durations, list):
        raise ValueError(
            f"`loss.{name}_kwargs.durations` must list the durations of a TDT, but is {durations}."
        )
    return tuple(integer("durations", duration) for duration in durations), options


def _decoder(config: Mapping[str, Any], width: int, unused: list[str]) -> DecoderConfig:
    between = config.get("transf_encoder")
    if isinstance(between, Mapping) and between.get("num_layers", 0) > 0:
        raise ValueError(
            f"`transf_encoder.num_layers` must be 0, but is {between['num_layers']}: there is no "
            "second encoder here."
        )
    outer = sections.DECODER.read("transf_decoder", config.get("transf_decoder"), unused)
    where = "transf_decoder.config_dict"
    values = sections.DECODER_LAYERS.read(where, outer["config_dict"], unused)
    sections.HEAD.read("head", config.get("head"), unused)
    fields = sections.DECODER_LAYERS.convert(where, values)
    dropout = number(f"{where}.ffn_dropout", values["ffn_dropout"])
    if dropout != fields["residual_dropout"]:
        unused.append(f"{where}.ffn_dropout = {dropout}")
    hidden = config.get("model_defaults") or {}
    _same("model_defaults.asr_enc_hidden", hidden.get("asr_enc_hidden"), width, "encoder.d_model")
    _same(
        "model_defaults.lm_dec_hidden",
        hidden.get("lm_dec_hidden"),
        fields["width"],
        f"{where}.hidden_size",
    )
    return DecoderConfig(**fields)


def _augment(mapping: Any, unused: list[str]) -> SpecAugmentConfig:
    if mapping is None:
        return SpecAugmentConfig()
    values = sections.AUGMENT.read("spec_augment", mapping, unused)
    counts = {
        key: integer(f"spec_augment.{key}", values[key])
        for key in ("freq_masks", "time_masks", "freq_width")
    }
    share = values["time_width"]
    if counts["time_masks"] and not isinstance(share, float):
        # The width is a number of frames, independent of the utterance.
        unused.append(f"spec_augment.time_masks = {counts['time_masks']} of {share} frames")
        counts["time_masks"] = 0
    if not counts["freq_masks"]:
        counts.pop("freq_width")
    if not counts["time_masks"]:
        return SpecAugmentConfig(**counts)
    return SpecAugmentConfig(**counts, time_width=share)


def _same(where: str, value: Any, expected: int, what: str) -> None:
    if value != expected:
        raise ValueError(f"`{where}` must be {what} = {expected}, but is {value}.")
