"""NeMo's model configurations: read to this project's, and written of them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from effasr.checks import check
from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.interop.nemo import tables
from effasr.interop.nemo.tokenizer import NemoTokens
from effasr.interop.tables import integer, number, one_of, refuse, refuse_experts, switch
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr_kernels import Context

CTC, TRANSDUCER = "EncDecCTCModelBPE", "EncDecRNNTBPEModel"
HYBRID, MULTITASK = "EncDecHybridRNNTCTCBPEModel", "EncDecMultiTaskModel"
CLASSES = (CTC, TRANSDUCER, HYBRID, MULTITASK)
"""NeMo's models that are supported here."""


def model_class(config: Mapping[str, Any]) -> str:
    """The class of a configuration, if it is supported here."""
    name = str(config.get("target")).rsplit(".", 1)[-1]
    if name not in CLASSES:
        raise ValueError(
            f"`target` must be one of {', '.join(CLASSES)}, but is {config.get('target')}: these "
            "are NeMo's FastConformer models with a SentencePiece tokenizer. Of a class that "
            "derives from one of these and computes the same, write its name as `target` into "
            "model_config.yaml."
        )
    if config.get("adapters"):
        raise ValueError(
            f"`adapters` must be empty, but has {', '.join(map(str, config['adapters']))}: save "
            "the model without them."
        )
    return name


def read_model(config: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """The architecture of ``model_config.yaml``, and the training options not used here."""
    name, unused = model_class(config), []
    features = _read_features(config.get("preprocessor"), unused)
    encoder = _read_encoder(config.get("encoder"), features, unused)
    if name == CTC:
        tables.CTC.read("decoder", config.get("decoder"), unused)
    if name == HYBRID:
        aux = config.get("aux_ctc")
        section = aux.get("decoder") if isinstance(aux, Mapping) else None
        tables.CTC.read("aux_ctc.decoder", section, unused)
    is_transducer = name in (TRANSDUCER, HYBRID)
    model = ModelConfig(
        features=features,
        spec_augment=_read_augment(config.get("spec_augment"), unused),
        encoder=encoder,
        decoder=_read_decoder(config, encoder.width, unused) if name == MULTITASK else None,
        ctc=name in (CTC, HYBRID),
        transducer=_read_transducer(config, unused) if is_transducer else None,
    )
    return model, unused


def _read_features(mapping: Any, unused: list[str]) -> FeatureConfig:
    fields, options = tables.PREPROCESSOR.read("preprocessor", mapping, unused)
    rate, top = fields["sample_rate"], mapping.get("highfreq")
    if top not in (None, 0) and top != rate / 2:
        raise ValueError(f"`preprocessor.highfreq` must be {rate // 2} or null, but is {top}.")
    # NeMo truncates seconds to samples in the same way.
    window, hop = (
        int(options[seconds] * rate) if options[seconds] else integer(samples, options[samples])
        for seconds, samples in (
            ("window_size", "n_window_size"),
            ("window_stride", "n_window_stride"),
        )
    )
    normalize = options["normalize"]
    if normalize not in ("per_feature", "NA", None, False):
        raise ValueError(
            f"`preprocessor.normalize` must be per_feature or NA, but is {normalize!r}."
        )
    return FeatureConfig(
        **fields,
        n_fft=options["n_fft"] or 2 ** math.ceil(math.log2(window)),
        window=window,
        hop=hop,
        normalize=normalize == "per_feature",
    )


def _read_encoder(mapping: Any, features: FeatureConfig, unused: list[str]) -> FastConformerConfig:
    fields, options = tables.ENCODER.read("encoder", mapping, unused)
    width, taps = fields["width"], fields["conv_kernel"]
    _check_same("encoder.feat_in", options["feat_in"], features.mel_bins, "preprocessor.features")
    if options["feat_out"] not in (None, -1, 0, width):
        raise ValueError(
            f"`encoder.feat_out` must be -1 or d_model = {width}, but is {options['feat_out']}."
        )
    if options["reduction"] and options["reduction_factor"] not in (None, 1):
        raise ValueError(
            f"`encoder.reduction` must be null, but is {options['reduction']} by "
            f"{options['reduction_factor']}."
        )
    if not switch("encoder.untie_biases", options["untie_biases"]):
        # The weights of each layer contain a copy of the biases.
        unused.append("encoder.untie_biases = False")
    if fields["subsampling_channels"] == -1:
        fields["subsampling_channels"] = width
    factor = integer("encoder.ff_expansion_factor", options["ff_expansion_factor"])
    return FastConformerConfig(
        **fields,
        feed_forward=width * factor,
        context=read_contexts(options["att_context_size"], options["att_context_style"]),
        causal_convolution=read_convolution(options["conv_context_size"], taps),
        convolution_bias=fields["bias"],
        activation_dropout=fields["residual_dropout"],
    )


def _read_transducer(config: Mapping[str, Any], unused: list[str]) -> TransducerConfig:
    _, predictor = tables.PREDICTOR.read("decoder", config.get("decoder"), unused)
    fields, prednet = tables.PREDNET.read("decoder.prednet", predictor["prednet"], unused)
    _, joint = tables.JOINT.read("joint", config.get("joint"), unused)
    width, jointnet = tables.JOINTNET.read("joint.jointnet", joint["jointnet"], unused)
    if prednet["rnn_hidden_size"] not in (None, -1, fields["width"]):
        raise ValueError(
            f"`decoder.prednet.rnn_hidden_size` must be pred_hidden = {fields['width']}, but is "
            f"{prednet['rnn_hidden_size']}."
        )
    is_activation = one_of("relu", "tanh")
    activation = is_activation("joint.jointnet.activation", str(jointnet["activation"]).lower())
    durations, options = _read_loss(config, unused)
    _check_same(
        "joint.num_extra_outputs",
        joint["num_extra_outputs"] or 0,
        len(durations or ()),
        "the number of durations of the loss",
    )
    return TransducerConfig(
        **fields,
        **width,
        predictor="lstm",
        activation=activation,
        fastemit=number("fastemit_lambda", options.get("fastemit_lambda")),
        durations=durations,
        sigma=number("sigma", options.get("sigma")) if durations else 0.0,
    )


def _read_loss(
    config: Mapping[str, Any], unused: list[str]
) -> tuple[tuple[int, ...] | None, Mapping[str, Any]]:
    """The durations of a TDT, None for an RNN-T, and the options of the loss."""
    loss, decoding = config.get("loss") or {}, config.get("decoding") or {}
    name = loss.get("loss_name") or "default"
    if decoding.get("big_blank_durations") or name.startswith("multiblank"):
        raise ValueError(
            "`loss.loss_name` must be that of an RNN-T or a TDT, but is one with big blanks, "
            f"{name}."
        )
    if name not in tables.TDT_LOSSES:
        if name not in tables.RNNT_LOSSES:
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


def _read_decoder(config: Mapping[str, Any], width: int, unused: list[str]) -> DecoderConfig:
    between = config.get("transf_encoder")
    if isinstance(between, Mapping) and between.get("num_layers", 0) > 0:
        raise ValueError(
            f"`transf_encoder.num_layers` must be 0, but is {between['num_layers']}: there is no "
            "second encoder here."
        )
    _, outer = tables.DECODER.read("transf_decoder", config.get("transf_decoder"), unused)
    where = "transf_decoder.config_dict"
    fields, options = tables.DECODER_LAYERS.read(where, outer["config_dict"], unused)
    tables.HEAD.read("head", config.get("head"), unused)
    dropout = number(f"{where}.ffn_dropout", options["ffn_dropout"])
    if dropout != fields["residual_dropout"]:
        unused.append(f"{where}.ffn_dropout = {dropout}")
    hidden = config.get("model_defaults") or {}
    for key, value, reason in (
        ("asr_enc_hidden", width, "encoder.d_model"),
        ("lm_dec_hidden", fields["width"], f"{where}.hidden_size"),
    ):
        _check_same(f"model_defaults.{key}", hidden.get(key), value, reason)
    return DecoderConfig(**fields)


def _read_augment(mapping: Any, unused: list[str]) -> SpecAugmentConfig:
    if mapping is None:
        return SpecAugmentConfig()
    fields, _ = tables.AUGMENT.read("spec_augment", mapping, unused)
    if fields["time_masks"] and not isinstance(fields["time_width"], float):
        # The width is a number of frames, independent of the utterance.
        unused.append(
            f"spec_augment.time_masks = {fields['time_masks']} of {fields['time_width']} frames"
        )
        fields["time_masks"] = 0
    # The width of no masks may be anything.
    for kind in ("freq", "time"):
        if not fields[f"{kind}_masks"]:
            del fields[f"{kind}_width"]
    return SpecAugmentConfig(**fields)


def _check_same(where: str, value: Any, expected: int, reason: str) -> None:
    check(value == expected, where, f"be {reason} = {expected}", value)


# With ``att_context_style: chunked_limited``, ``att_context_size: [L, R]`` are chunks of R + 1
# frames that see L frames before them, whole chunks; with ``regular`` a frame sees L frames before
# it and R after it. -1 is no limit, and several sizes are drawn in training.
_STYLES = "regular", "chunked_limited"


def read_contexts(size: Any, style: Any) -> tuple[Context, ...]:
    """The contexts of ``encoder.att_context_size`` and ``encoder.att_context_style``."""
    check(style in _STYLES, "encoder.att_context_style", f"be {' or '.join(_STYLES)}", style)
    sizes: Any = [[-1, -1]] if size is None else size
    if isinstance(sizes, Sequence) and not any(isinstance(x, Sequence) for x in sizes):
        sizes = [sizes]
    if not isinstance(sizes, Sequence) or not sizes or not all(map(_is_size, sizes)):
        raise ValueError(
            "`encoder.att_context_size` must be two numbers of at least -1, which is unlimited, or "
            f"a list of such, but is {size!r}."
        )
    if list(map(list, sizes)) == [[-1, -1]]:
        return ()
    return tuple(_read_context(left, right, style) for left, right in sizes)


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, Sequence)
        and len(size) == 2
        and all(type(side) is int and side >= -1 for side in size)
    )


def _read_context(left: int, right: int, style: str) -> Context:
    before = None if left < 0 else left
    if style == "regular" or right < 0:
        return Context(before, None if right < 0 else right, 1)
    if before is not None and before % (right + 1):
        raise ValueError(
            f"`encoder.att_context_size` must have whole chunks of {right + 1} frames on the left, "
            f"but has {left}, which NeMo refuses as well."
        )
    return Context(before, 0, right + 1)


def write_contexts(contexts: Sequence[Context]) -> dict[str, Any] | None:
    """``att_context_size`` and ``att_context_style``; None if NeMo cannot express them."""
    if not contexts:
        return {"att_context_size": [-1, -1], "att_context_style": "regular"}
    number = lambda side: -1 if side is None else side
    if all(x.right == 0 and not (x.left or 0) % x.chunk for x in contexts):
        style, sizes = "chunked_limited", [[number(x.left), x.chunk - 1] for x in contexts]
    elif all(x.chunk == 1 for x in contexts):
        style, sizes = "regular", [[number(x.left), number(x.right)] for x in contexts]
    else:
        return None
    size = sizes if len(sizes) > 1 else sizes[0]
    return {"att_context_size": size, "att_context_style": style}


def read_convolution(size: Any, taps: int) -> bool:
    """Whether ``encoder.conv_context_size`` is causal."""
    half = (taps - 1) // 2
    if size in ("causal", [taps - 1, 0]):
        return True
    rule = f"be null or [{half}, {half}], as many frames on both sides, or causal"
    check(size in (None, half, [half, half]), "encoder.conv_context_size", rule, size)
    return False


_TARGETS = {
    CTC: "ctc_bpe_models",
    TRANSDUCER: "rnnt_bpe_models",
    HYBRID: "hybrid_rnnt_ctc_bpe_models",
    MULTITASK: "aed_multitask_models",
}
# Fields that are exported; all other fields of a decoder must have their defaults.
_DECODER_FIELDS = (
    *("width", "layers", "heads", "head_dim", "feed_forward", "max_positions", "bias"),
    *("output_bias", "tie_embeddings"),
    *("input_dropout", "residual_dropout", "activation_dropout", "attention_dropout"),
)


def nemo_class(config: ModelConfig) -> str:
    """The class of NeMo for the first output of a model; see `export_nemo`."""
    if config.decoder is not None:
        return MULTITASK
    if config.transducer is not None:
        return HYBRID if config.ctc else TRANSDUCER
    return CTC


def check_expressible(config: ModelConfig) -> None:
    """Check that NeMo can express the first output of a model; the message lists all reasons."""
    refuse_experts(config, "NeMo")
    encoder, decoder = config.encoder, config.decoder
    if not isinstance(encoder, FastConformerConfig):
        raise ValueError(
            f"`encoder.kind` must be that of a FastConformer for a .nemo file, but is "
            f"{encoder.kind}: export with --format huggingface."
        )
    reasons = {
        f"encoder.position={encoder.position} (only relative)": encoder.position != "relative",
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
    """The whole of ``model_config.yaml``, with training options as in NeMo's examples."""
    name, encoder = nemo_class(config), config.encoder
    assert isinstance(encoder, FastConformerConfig)  # checked by check_expressible
    yaml: dict[str, Any] = {
        "sample_rate": config.features.sample_rate,
        "log_prediction": True,
        **_write_data(config.features.sample_rate, lhotse=name == MULTITASK),
        "tokenizer": tokens.section,
        "preprocessor": tables.PREPROCESSOR.write(
            config.features,
            normalize="per_feature" if config.features.normalize else "NA",
            window_size=_seconds(config.features.window, config.features.sample_rate),
            window_stride=_seconds(config.features.hop, config.features.sample_rate),
            n_fft=config.features.n_fft,
        ),
    }
    if config.spec_augment != SpecAugmentConfig():
        yaml["spec_augment"] = tables.AUGMENT.write(config.spec_augment)
    yaml["encoder"] = tables.ENCODER.write(
        encoder,
        feat_in=config.features.mel_bins,
        use_bias=encoder.bias or encoder.convolution_bias,
        ff_expansion_factor=encoder.feed_forward // encoder.width,
        **(write_contexts(encoder.context) or {}),
        conv_context_size="causal" if encoder.causal_convolution else None,
    )
    if name == MULTITASK:
        assert config.decoder is not None
        yaml |= _write_multitask(config.decoder, encoder.width, tokens, classes)
    else:
        yaml |= _write_labels(config, name, encoder.width, tokens.vocabulary)
    optim: dict[str, Any] = {"name": "adamw", "lr": 1e-4, "betas": [0.9, 0.98]}
    optim |= {"weight_decay": 1e-3}
    optim["sched"] = {"name": "CosineAnnealing", "warmup_steps": 500, "min_lr": 1e-6}
    return {
        **yaml,
        "optim": optim,
        "target": f"nemo.collections.asr.models.{_TARGETS[name]}.{name}",
    }


def _write_data(rate: int, *, lhotse: bool) -> dict[str, Any]:
    """The sections in which NeMo's users name recordings."""
    common: dict[str, Any] = {"manifest_filepath": None, "sample_rate": rate, "batch_size": 8}
    common |= {"use_lhotse": True} if lhotse else {}
    common |= {"num_workers": 4, "pin_memory": True}
    training = {**common, "shuffle": True, "max_duration": 40, "min_duration": 0.1}
    return {
        "train_ds": training,
        "validation_ds": {**common, "shuffle": False},
        "test_ds": {**common, "shuffle": False},
    }


def _seconds(samples: int, rate: int) -> float:
    """Seconds that NeMo truncates to this many samples."""
    seconds = samples / rate
    return seconds if int(seconds * rate) == samples else (samples + 0.5) / rate


def _write_labels(
    config: ModelConfig, name: str, width: int, pieces: Sequence[str]
) -> dict[str, Any]:
    """The sections after the encoder of a CTC model or a transducer."""
    head = tables.CTC.write(feat_in=width, num_classes=len(pieces), vocabulary=list(pieces))
    if name == CTC:
        return {"labels": list(pieces), "decoder": head, "decoding": {"strategy": "greedy"}}
    assert config.transducer is not None
    yaml = _write_transducer(config.transducer, width, pieces)
    if name == HYBRID:
        yaml["aux_ctc"] = {
            "ctc_loss_weight": 0.3,
            "use_cer": False,
            "ctc_reduction": "mean_batch",
            "decoder": head,
            "decoding": {"strategy": "greedy"},
        }
    return yaml


def _write_transducer(
    options: TransducerConfig, width: int, pieces: Sequence[str]
) -> dict[str, Any]:
    durations = None if options.durations is None else list(options.durations)
    defaults = {
        "enc_hidden": width,
        "pred_hidden": options.width,
        "joint_hidden": options.joint,
    }
    jointnet = tables.JOINTNET.write(
        options,
        activation=options.activation,
        encoder_hidden=width,
        pred_hidden=options.width,
    )
    joint = tables.JOINT.write(jointnet=jointnet, num_classes=len(pieces), vocabulary=list(pieces))
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
        "decoder": tables.PREDICTOR.write(
            prednet=tables.PREDNET.write(options), vocab_size=len(pieces)
        ),
        "joint": joint,
        "decoding": decoding,
        "loss": loss,
    }


def _write_multitask(
    decoder: DecoderConfig, width: int, tokens: NemoTokens, classes: int
) -> dict[str, Any]:
    layers = tables.DECODER_LAYERS.write(
        decoder, ffn_dropout=decoder.residual_dropout, vocab_size=classes
    )
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
        "transf_decoder": tables.DECODER.write(config_dict=layers),
        "head": tables.HEAD.write(hidden_size=decoder.width, num_classes=classes),
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
