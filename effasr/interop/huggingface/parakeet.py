"""Classes of transformers with a FastConformer: Canary, Cohere's, Parakeets and Nemotrons."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from effasr.checks import check
from effasr.data.features.config import FeatureConfig
from effasr.data.languages import AUTO
from effasr.interop.huggingface.files import Content, ModelClass, SpecialTokens
from effasr.interop.nemo.config import read_contexts, write_contexts
from effasr.interop.nemo.tables import renames as nemo_renames
from effasr.interop.tables import Renames, Section, integer, number, one_of, only, refuse
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.language_prompt import LanguagePromptConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.positions import decoder_sinusoids

_log = logging.getLogger(__name__)

_MAX_SYMBOLS = 10
"""Labels per frame: the default of transformers, and of decoding here."""

# The defaults are what transformers 5.23 fills in where a file leaves a field out.
_ENCODER = Section(
    {
        "width": ("hidden_size", 1024),
        "layers": ("num_hidden_layers", 24),
        "heads": ("num_attention_heads", 8),
        "feed_forward": ("intermediate_size", 4096),
        "conv_kernel": ("conv_kernel_size", 9),
        "subsampling": ("subsampling_factor", 8, one_of(4, 8)),
        "subsampling_channels": ("subsampling_conv_channels", 256),
        "scale_input": ("scale_input", True),
        "bias": ("attention_bias", True),
        "convolution_bias": ("convolution_bias", True),
        "input_dropout": ("dropout", 0.1, number),
        "activation_dropout": ("activation_dropout", 0.1, number),
        "attention_dropout": ("attention_dropout", 0.1, number),
        "position_dropout": ("dropout_positions", 0.0, number),
    },
    constants={
        "hidden_act": "silu",
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
    },
)
_DECODER = Section(
    {
        "width": ("hidden_size", 1024),
        "layers": ("num_hidden_layers", 8),
        "heads": ("num_attention_heads", 8),
        "head_dim": ("head_dim", 128),
        "feed_forward": ("intermediate_size", 4096),
        "max_positions": ("max_position_embeddings", 1024),
        "bias": ("attention_bias", True),
        "attention_dropout": ("attention_dropout", 0.0, number),
    },
    constants={"hidden_act": "relu"},
)
_TRANSDUCER = Section(
    {
        "width": ("decoder_hidden_size", 640),
        "layers": ("num_decoder_layers", 2),
        "activation": ("hidden_act", "relu", one_of("relu", "tanh")),
    }
)
_PROMPT = Section(
    {
        "count": ("num_prompts", 128, integer),
        "width": ("prompt_intermediate_size", 2048, integer),
    }
)
_FEATURES = Section(
    {
        "sample_rate": ("sampling_rate", 16_000),
        "n_fft": ("n_fft", 512),
        "window": ("win_length", 400),
        "hop": ("hop_length", 160),
        "preemphasis": ("preemphasis", 0.97, number),
    },
    fixed={"mel_filters_dtype": only("float32")},
)
_STREAMING = "nemotron_asr_streaming_encoder"
"""An encoder with causal convolutions that attends to chunks of frames and what is before them."""

# Where a Canary's file does not describe the encoder.
_CANARY_ENCODER = {"num_hidden_layers": 32, "num_mel_bins": 128, "scale_input": False}
# What Cohere's file may leave out of the encoder.
_COHERE_ENCODER = {
    "hidden_size": 1280,
    "num_hidden_layers": 48,
    "intermediate_size": 5120,
    "num_mel_bins": 128,
    "scale_input": False,
    **dict.fromkeys(("dropout", "activation_dropout", "attention_dropout"), 0.0),
}

_QKV = ".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."
_LAYER_NAMES = (
    (".conv.pointwise1.", ".conv.pointwise_conv1."),
    (".conv.pointwise2.", ".conv.pointwise_conv2."),
    (".conv.depthwise.", ".conv.depthwise_conv."),
    (".self_attn.qkv_proj.", _QKV),
)
_ENCODER_NAMES = (
    ("encoder.subsampling.conv.", "encoder.subsampling.layers.0."),
    ("encoder.subsampling.depthwise1.", "encoder.subsampling.layers.2."),
    ("encoder.subsampling.pointwise1.", "encoder.subsampling.layers.3."),
    ("encoder.subsampling.depthwise2.", "encoder.subsampling.layers.5."),
    ("encoder.subsampling.pointwise2.", "encoder.subsampling.layers.6."),
    *_LAYER_NAMES,
)
_STREAMING_NAMES = (
    ("encoder.subsampling.conv.", "encoder.subsampling.conv_in."),
    ("encoder.subsampling.depthwise1.", "encoder.subsampling.layers.0.depthwise_conv."),
    ("encoder.subsampling.pointwise1.", "encoder.subsampling.layers.0.pointwise_conv."),
    ("encoder.subsampling.depthwise2.", "encoder.subsampling.layers.1.depthwise_conv."),
    ("encoder.subsampling.pointwise2.", "encoder.subsampling.layers.1.pointwise_conv."),
    *_LAYER_NAMES,
)
CANARY: Renames = {
    "encoder.": (*_ENCODER_NAMES, ("encoder.", "model.encoder.")),
    "decoder.": (
        ("decoder.output_bias", "proj_out.bias"),
        ("decoder.untied_weight", "proj_out.weight"),
        ("decoder.", "model.decoder."),
        (".mlp.linear1.", ".mlp.fc1."),
        (".mlp.linear2.", ".mlp.fc2."),
        (".self_attn.qkv_proj.", _QKV),
        (".encoder_attn.kv_proj.", (".encoder_attn.k_proj.", ".encoder_attn.v_proj.")),
    ),
}
_NEMO = nemo_renames(hybrid=False)
_POSITIONS = "transf_decoder._embedding.position_embedding.pos_enc"
# transformers writes the names of the files that Cohere published, which are NeMo's.
COHERE: Renames = {
    **{prefix: _NEMO[prefix] for prefix in ("encoder.", "projection.")},
    "decoder.": (
        ("decoder.embed_positions.weight", _POSITIONS),
        ("decoder.untied_weight", "log_softmax.mlp.layer0.weight"),
        *_NEMO["decoder."],
    ),
}
PARAKEET_CTC: Renames = {"encoder.": _ENCODER_NAMES, "ctc_head.": ()}
PARAKEET_TRANSDUCER: Renames = {
    "encoder.": _ENCODER_NAMES,
    "transducer.": (
        ("transducer.encoder_projection.", "encoder_projector."),
        ("transducer.predictor_projection.", "decoder.decoder_projector."),
        ("transducer.predictor.embedding.", "decoder.embedding."),
        ("transducer.predictor.lstm.", "decoder.lstm."),
        ("transducer.output.", "joint.head."),
    ),
}
NEMOTRON_STREAMING: Renames = {**PARAKEET_TRANSDUCER, "encoder.": _STREAMING_NAMES}
NEMOTRON_PROMPTED: Renames = {
    **NEMOTRON_STREAMING,
    "language_prompt.": (("language_prompt.linear", "prompt_projector.linear_"),),
}


def _read_canary(content: Content) -> tuple[ModelConfig, int]:
    mapping = content.config
    decoder = _read_decoder(content, "decoder_config", mapping.get("decoder_config") or {}, True)
    encoder = mapping.get("encoder_config") or _CANARY_ENCODER
    return _read_model(content, encoder, decoder=decoder), mapping.get("vocab_size", 16384)


def _read_cohere(content: Content) -> tuple[ModelConfig, int]:
    mapping, weights = content.config, content.weights
    for name in [name for name in weights if name.startswith("model.")]:
        weights[name.removeprefix("model.")] = weights.pop(name)
    decoder = _read_decoder(content, "config", {"head_dim": None, **mapping}, False)
    encoder = _COHERE_ENCODER | (mapping.get("encoder_config") or {})
    config = _read_model(content, encoder, decoder=replace(decoder, positions="learned"))
    if decoder.width == config.encoder.width:
        raise ValueError(
            f"`hidden_size` must differ from that of the encoder, as the projection between them "
            f"has no counterpart here otherwise, but is {decoder.width}."
        )
    return config, mapping.get("vocab_size", 16384)


def _read_decoder(
    content: Content, where: str, options: Mapping[str, Any], is_tied: bool
) -> DecoderConfig:
    tied = content.config.get("tie_word_embeddings", is_tied)
    if tied:
        for name in ("proj_out.weight", "log_softmax.mlp.layer0.weight"):
            content.weights.pop(name, None)
    fields, _ = _DECODER.read(where, options)
    if options.get("num_key_value_heads") not in (None, fields["heads"]):
        raise ValueError(
            f"`{where}.num_key_value_heads` must be {fields['heads']}, as `num_attention_heads` "
            f"is, but is {options['num_key_value_heads']}: grouped queries are not supported."
        )
    return DecoderConfig(**fields, tie_embeddings=tied)


def _read_ctc(content: Content) -> tuple[ModelConfig, int]:
    classes = content.config.get("vocab_size", 1025)
    blank = content.config.get("pad_token_id", 1024)
    rule = f"be the last class, {classes - 1}, as it is the blank"
    check(blank == classes - 1, "pad_token_id", rule, blank)
    return _read_model(content, content.config.get("encoder_config"), ctc=True), classes - 1


def _read_transducer(content: Content) -> tuple[ModelConfig, int]:
    mapping = content.config
    classes, blank = mapping.get("vocab_size", 8193), mapping.get("blank_token_id", 8192)
    rule = f"be the last class, {classes - 1}"
    remedy = "move its rows of `decoder.embedding` and `joint.head` there"
    check(blank == classes - 1, "blank_token_id", rule, blank, remedy)
    is_tdt = mapping["model_type"] == "parakeet_tdt"
    most = mapping.get("max_symbols_per_step", _MAX_SYMBOLS)
    # transformers ignores the field for a TDT.
    if most != _MAX_SYMBOLS and not is_tdt:
        _log.warning(
            "`max_symbols_per_step` = %s is not part of a model here: decode with `max_symbols`.",
            most,
        )
    fields, _ = _TRANSDUCER.read("config", mapping)
    durations = tuple(mapping.get("durations", range(5))) if is_tdt else None
    transducer = TransducerConfig(**fields, joint=fields["width"], durations=durations)
    encoder = mapping.get("encoder_config") or {}
    is_prompted = mapping["model_type"] == "nemotron3_5_asr"
    if is_prompted or mapping["model_type"] == "nemotron_asr_streaming":
        encoder = {"model_type": _STREAMING, **encoder}
    prompt = _read_prompt(content) if is_prompted else None
    outputs = {"transducer": transducer, "language_prompt": prompt}
    return _read_model(content, encoder, **outputs), classes - 1


def _read_prompt(content: Content) -> LanguagePromptConfig:
    languages: Any = content.preprocessor.get("prompt_dictionary")
    rule, remedy = "map languages to numbers", "copy processor_config.json of the model, too"
    has_numbers = isinstance(languages, dict) and all(type(x) is int for x in languages.values())
    check(has_numbers, "processor_config.prompt_dictionary", rule, languages, remedy)
    fields, _ = _PROMPT.read("config", content.config)
    return LanguagePromptConfig(languages=languages, **fields)


def _read_model(content: Content, encoder: Mapping[str, Any] | None, **output: Any) -> ModelConfig:
    """The features and the encoder, with one output."""
    encoder = encoder or {}
    if encoder.get("layerdrop"):
        _log.warning("`layerdrop` = %s is not used in training here.", encoder["layerdrop"])
    bins = encoder.get("num_mel_bins", 80)
    if content.preprocessor.get("feature_size", bins) != bins:
        raise ValueError(
            f"`feature_size` must be num_mel_bins = {bins}, as in config.json, but is "
            f"{content.preprocessor['feature_size']} in the preprocessor's configuration."
        )
    features, _ = _FEATURES.read("preprocessor_config", content.preprocessor)
    fields, _ = _ENCODER.read("encoder_config", encoder)
    is_streaming = encoder.get("model_type") == _STREAMING
    if is_streaming:
        left = integer("encoder_config.sliding_window", encoder.get("sliding_window", 71)) - 1
        option = "default_num_lookahead_tokens"
        ahead = integer(f"encoder_config.{option}", encoder.get(option, 13))
        # transformers takes the whole chunks that fit.
        left -= left % (ahead + 1)
        context = read_contexts([left, ahead], "chunked_limited")
        fields |= {"context": context, **_STREAMING_FIELDS}
    return ModelConfig(
        features=FeatureConfig(**features, mel_bins=bins, normalize=not is_streaming),
        encoder=FastConformerConfig(**fields),
        **{"decoder": None, **output},
    )


_STREAMING_FIELDS = {
    "conv_norm": "layer_norm",
    "causal_convolution": True,
    "causal_subsampling": True,
}


def _write_canary(model: ASRModel, tokens: SpecialTokens) -> Content:
    """Of a Canary; of Cohere's model if the decoder has another width than the encoder."""
    decoder, is_cohere = model.config.decoder, model.projection is not None
    assert decoder is not None
    ids = tokens.fields(model.vocab_size)
    encoder = _write_encoder(model.config)
    refuse(
        "transformers",
        {
            f"decoder.width={decoder.width}, not a multiple of heads={decoder.heads}": (
                decoder.width % decoder.heads != 0
            ),
            f"decoder.positions={decoder.positions} with decoder.width=encoder.width (only "
            "sinusoidal)": decoder.positions != "sinusoidal" and not is_cohere,
            "decoder.positions=rotary": decoder.positions == "rotary",
            f"decoder.activation={decoder.activation} (only relu)": decoder.activation != "relu",
            "decoder.embedding_norm=False": not decoder.embedding_norm,
            "decoder.key_bias=False": decoder.bias and not decoder.key_bias,
        },
    )
    # transformers stops after 20 tokens by default.
    generation: dict[str, Any] = {**ids, "max_length": decoder.max_positions}
    if suppressed := [*decoder.suppress, *tokens.unused_classes(model.vocab_size)]:
        generation["suppress_tokens"] = suppressed
    if decoder.begin_suppress:
        generation["begin_suppress_tokens"] = list(decoder.begin_suppress)
    fields = {
        "num_key_value_heads": decoder.heads,
        **_DECODER.write(decoder),
        "head_dim": decoder.head_width,
    }
    if not is_cohere:
        fields |= {key: ids[key] for key in ids if key != "decoder_start_token_id"}
        fields |= {"model_type": "canary_decoder", "vocab_size": model.vocab_size}
        fields = {"decoder_config": fields}
    fields |= {
        "model_type": "cohere_asr" if is_cohere else "canary",
        "encoder_config": encoder,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": decoder.tie_embeddings,
        "is_encoder_decoder": True,
        **ids,
    }
    # transformers' output layer always has a bias, and Cohere's model always a table of positions.
    bias = "log_softmax.mlp.layer0.bias" if is_cohere else "proj_out.bias"
    weights = {} if decoder.output_bias else {bias: torch.zeros(model.vocab_size)}
    if is_cohere and decoder.positions == "sinusoidal":
        table = decoder_sinusoids(torch.arange(decoder.max_positions), decoder.width)
        weights[_POSITIONS] = table
    kind = "CohereAsr" if is_cohere else "Parakeet"
    return Content(fields, _write_features(model.config.features, kind), generation, weights)


def _write_ctc(model: ASRModel, tokens: SpecialTokens) -> Content:
    if not model.config.ctc:
        raise ValueError("`ctc` must be true for a Parakeet CTC model, but this one has no head.")
    fields = {
        "model_type": "parakeet_ctc",
        "encoder_config": _write_encoder(model.config),
        "vocab_size": model.vocab_size + 1,
        "pad_token_id": model.vocab_size,
    }
    return Content(fields, _write_features(model.config.features))


def _write_transducer(model: ASRModel, tokens: SpecialTokens) -> Content:
    transducer, blank = model.config.transducer, model.vocab_size
    assert transducer is not None
    predictor, durations = transducer.predictor, transducer.durations
    refuse(
        "transformers",
        {
            f"transducer.predictor={predictor} (only lstm)": predictor != "lstm",
            f"transducer.joint={transducer.joint}, not transducer.width={transducer.width}": (
                transducer.joint != transducer.width
            ),
        },
    )
    # transformers counts as labels those that are not blank for an RNN-T, and those that are not
    # padding for a TDT: no text may have that token.
    pad_id = blank if durations is None else tokens.pad_id
    rule = f"be in the vocabulary of {blank}"
    check(durations is None or 0 <= pad_id < blank, "pad_id", rule, pad_id, "pass the tokenizer's")
    is_streaming = is_streaming_transducer(model.config)
    prompt = model.config.language_prompt
    if is_streaming:
        model_type, encoder = "nemotron_asr_streaming", _write_streaming_encoder(model.config)
    else:
        model_type = "parakeet_rnnt" if durations is None else "parakeet_tdt"
        encoder = _write_encoder(model.config)
    fields = {
        "model_type": model_type,
        "encoder_config": encoder,
        **_TRANSDUCER.write(transducer),
        "vocab_size": blank + 1,
        "blank_token_id": blank,
        "max_symbols_per_step": _MAX_SYMBOLS,
        "is_encoder_decoder": True,
        "pad_token_id": pad_id,
    }
    processor: dict[str, Any] = {}
    if prompt is not None:
        languages = prompt.languages
        first = languages.get(AUTO, min(languages.values()))
        fields |= _PROMPT.write(prompt, model_type="nemotron3_5_asr", default_prompt_id=first)
        processor = {"prompt_dictionary": languages, "num_prompts": prompt.count}
        processor["processor_class"] = "Nemotron3_5AsrProcessor"
    generation: dict[str, Any] = {"pad_token_id": pad_id, "decoder_start_token_id": blank}
    if durations is not None:
        fields["durations"] = list(durations)
        # Generation takes the maximum over all rows, but the rows of durations are not tokens.
        generation["suppress_tokens"] = list(range(blank + 1, blank + 1 + len(durations)))
        if durations != tuple(range(len(durations))):
            _log.warning(
                "transformers' generate will skip the wrong numbers of frames: it takes the places "
                "of the durations %s for their values.",
                list(durations),
            )
    kind = "NemotronAsrStreaming" if is_streaming else "Parakeet"
    features = _write_features(model.config.features, kind)
    return Content(fields, features, generation, processor=processor)


def is_streaming_transducer(config: ModelConfig) -> bool:
    """Return whether a model is an RNN-T over an encoder such as Nemotron's."""
    encoder, transducer = config.encoder, config.transducer
    if not isinstance(encoder, FastConformerConfig) or transducer is None:
        return False
    fields = {name: getattr(encoder, name) for name in _STREAMING_FIELDS}
    return fields == _STREAMING_FIELDS and transducer.durations is None


def _write_streaming_encoder(config: ModelConfig) -> dict[str, Any]:
    encoder = config.encoder
    assert isinstance(encoder, FastConformerConfig)
    contexts = write_contexts(encoder.context) or {"att_context_style": ""}
    refuse(
        "transformers",
        {
            f"position={encoder.position} (only relative)": encoder.position != "relative",
            f"context={encoder.context} (only one, of chunks after a number of whole ones)": (
                len(encoder.context) != 1
                or encoder.context[0].left is None
                or contexts["att_context_style"] != "chunked_limited"
            ),
            f"input_positions={encoder.input_positions} (only 0)": encoder.input_positions != 0,
            "features.normalize=True": config.features.normalize,
        },
    )
    (context,) = encoder.context
    assert context.left is not None
    return {
        **_write_sizes(config, _STREAMING),
        "sliding_window": context.left + 1,
        "default_num_lookahead_tokens": context.chunk - 1,
    }


def _write_encoder(config: ModelConfig) -> dict[str, Any]:
    encoder = config.encoder
    assert isinstance(encoder, FastConformerConfig)
    refuse(
        "transformers",
        {
            f"position={encoder.position} (only relative)": encoder.position != "relative",
            f"conv_norm={encoder.conv_norm} (only batch_norm)": encoder.conv_norm != "batch_norm",
            "context": bool(encoder.context),
            "causal_convolution": encoder.causal_convolution,
            "causal_subsampling": encoder.causal_subsampling,
            f"input_positions={encoder.input_positions} (only 0)": encoder.input_positions != 0,
            "features.normalize=False": not config.features.normalize,
        },
    )
    return _write_sizes(config, "parakeet_encoder")


def _write_sizes(config: ModelConfig, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_key_value_heads": config.encoder.heads,
        "num_mel_bins": config.features.mel_bins,
        "layerdrop": 0.0,
        **_ENCODER.write(config.encoder),
    }


def _write_features(config: FeatureConfig, kind: str = "Parakeet") -> dict[str, Any]:
    return {
        "feature_extractor_type": f"{kind}FeatureExtractor",
        "feature_size": config.mel_bins,
        **_FEATURES.write(config),
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }


CLASSES = {
    "canary": ModelClass(
        "CanaryForConditionalGeneration", "decoder", CANARY, _read_canary, _write_canary
    ),
    "cohere_asr": ModelClass(
        "CohereAsrForConditionalGeneration", "decoder", COHERE, _read_cohere, _write_canary
    ),
    "parakeet_ctc": ModelClass("ParakeetForCTC", "ctc", PARAKEET_CTC, _read_ctc, _write_ctc),
    **{
        name: ModelClass(class_, "transducer", weights, _read_transducer, _write_transducer)
        for name, class_, weights in (
            ("nemotron_asr_streaming", "NemotronAsrStreamingForRNNT", NEMOTRON_STREAMING),
            ("nemotron3_5_asr", "Nemotron3_5AsrForRNNT", NEMOTRON_PROMPTED),
            ("parakeet_rnnt", "ParakeetForRNNT", PARAKEET_TRANSDUCER),
            ("parakeet_tdt", "ParakeetForTDT", PARAKEET_TRANSDUCER),
        )
    },
}
