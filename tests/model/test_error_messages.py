"""What models and their configurations say about wrong arguments: argument, rule and value."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.features.config import FeatureConfig
from effasr.interop.tables import refuse_experts
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQConfig
from effasr.model.config import ModelConfig
from effasr.model.cost import cost_model
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig, FastConformerEncoder
from effasr.model.language_prompt import LanguagePromptConfig
from effasr.model.streaming_encoder import StreamingEncoder, check_streamable
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.model.wav2vec2_encoder import Wav2Vec2EncoderConfig
from effasr.nn.experts import ExpertsConfig
from effasr_kernels import Context
from tests.model.test_text_encoder import PAIRS, batch_of

TEXT = TextEncoderConfig(layers=2, heads=4, feed_forward=48)
LANGUAGES = LanguagePromptConfig(languages={"en": 0})
SAMPLES = FeatureConfig(kind="waveform", hop=320)
NAMED = ExpertsConfig(count=2, route="task", names=("transcribe", "translate"))
CONTEXT = Context(4, 0, 3)
CONFIGURATIONS: list[tuple[type, dict[str, Any], str]] = [
    (FastConformerConfig, {"layers": 0}, "`layers` must be at least 1, but is 0"),
    (
        FastConformerConfig,
        {"width": 30, "heads": 4},
        "multiple of 2 and of heads = 4, but is 30",
    ),
    (FastConformerConfig, {"conv_kernel": 8}, "`conv_kernel` must be odd, but is 8"),
    (
        FastConformerConfig,
        {"subsampling": 6},
        "`subsampling` must be 4 or 8, but is 6: 8",
    ),
    (FastConformerConfig, {"position": "absolute"}, "one of relative, rotary, none"),
    (FastConformerConfig, {"conv_norm": "group_norm"}, "one of batch_norm, layer_norm"),
    (FastConformerConfig, {"residual_dropout": 1.0}, r"in \[0, 1\), but is 1\.0"),
    (FastConformerConfig, {"input_positions": -0.1}, "at least 0"),
    (FastConformerConfig, {"max_frames": 0}, "at least 1 or null"),
    (DecoderConfig, {"width": 33}, "even and at least 4"),
    (DecoderConfig, {"width": 34, "heads": 4}, "or set `head_dim`"),
    (DecoderConfig, {"head_dim": 0}, "`head_dim` must be at least 1"),
    (DecoderConfig, {"attention_dropout": -0.5}, r"in \[0, 1\)"),
    (DecoderConfig, {"max_positions": 0}, "`max_positions` must be at least 1"),
    (TransducerConfig, {"predictor": "gru"}, "must be one of lstm, stateless, but is 'gru'"),
    (TransducerConfig, {"activation": "gelu"}, "`activation` must be one of relu, tanh"),
    *(
        (TransducerConfig, {name: 0}, f"`{name}` must be at least 1")
        for name in ("width", "layers", "context", "joint")
    ),
    (TransducerConfig, {"fastemit": -0.1}, "`fastemit` must be at least 0"),
    (TransducerConfig, {"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
    (TransducerConfig, {"durations": (1, 2)}, r"start with 0 and 1 and increase, as \[0, 1"),
    (TransducerConfig, {"durations": (0, 1, 1)}, r"`durations` .*, but is \[0, 1, 1\]"),
    (TransducerConfig, {"durations": (0, 1), "sigma": -0.1}, "`sigma` .*0, but is -0.1"),
    (TransducerConfig, {"sigma": 0.1}, "`sigma` must be 0 without `durations`, but is 0.1"),
    (BestRQConfig, {"codes": 1}, "`codes` must be at least 2"),
    (BestRQConfig, {"masked_share": 1.0}, "`masked_share` must lie between 0 and 1"),
    (BestRQConfig, {"span_s": 0.0}, "`span_s` must"),
    (BestRQConfig, {"noise": -1.0}, "`noise` must"),
    (BestRQConfig, {"codebooks": 0}, "`codebooks` must"),
    (BestRQConfig, {"seed": -1}, "`seed` must"),
    (TextEncoderConfig, {"layers": 0}, "`layers` must be at least 1"),
    (Wav2Vec2EncoderConfig, {"position_kernel": 15}, "`position_kernel` must be even, but is 15"),
    (Wav2Vec2EncoderConfig, {"position_groups": 7}, "heads = 12 and position_groups = 7, but is"),
    (Wav2Vec2EncoderConfig, {"adapter": 8}, "`adapter` must be null without `pre_norm`, but is 8"),
    (Wav2Vec2EncoderConfig, {"distance_buckets": 6}, "`distance_buckets` must be a multiple of 4"),
    (Wav2Vec2EncoderConfig, {"longest_distance": 80}, "greater than distance_buckets / 4 = 80"),
    (
        LanguagePromptConfig,
        {"languages": {"en": 9}, "count": 9},
        "`languages` .* 0 to count - 1 = 8",
    ),
    (
        ModelConfig,
        {"language_prompt": LANGUAGES, "text_encoder": TextEncoderConfig()},
        "`language_prompt` must be null with",
    ),
    (ModelConfig, {"encoder": Wav2Vec2EncoderConfig()}, "must be waveform for an encoder of kind"),
    (
        ModelConfig,
        {"encoder": Wav2Vec2EncoderConfig(), "features": SAMPLES, "best_rq": BestRQConfig()},
        "`best_rq` must be null for features of kind waveform",
    ),
    (ModelConfig, {"decoder": None}, "set `ctc` or give a `decoder`"),
    (ModelConfig, {"best_rq": BestRQConfig()}, "`decoder` must be null where `best_rq` is"),
    (
        ModelConfig,
        {"decoder": None, "ctc": True, "best_rq": BestRQConfig()},
        "`ctc` must be false where `best_rq` is given",
    ),
]


@pytest.mark.parametrize(("cls", "options", "message"), CONFIGURATIONS)
def test_messages_of_configurations(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


def _with(config, **parts):
    """The configuration with other fields in its parts."""
    return replace(config, **{k: replace(getattr(config, k), **v) for k, v in parts.items()})


def _stream(context, **options):
    sizes = {"width": 32, "layers": 1, "heads": 4, "causal_convolution": True}
    return StreamingEncoder(
        FastConformerEncoder(FastConformerConfig(**sizes | options), 16), 16, 1, context
    )


def _step_past_the_room(x):
    state = x.model.start_decoding(x.encoded, 1)
    x.model.decode_step(x.tokens, state)
    x.model.decode_step(x.tokens, state)


def _without_decoder(x):
    return ASRModel(replace(x.config, decoder=None), 40)


CALLS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: ASRModel(x.config, 0), "`vocab_size` must be at least 1, but is 0"),
    (lambda x: cost_model(x.config, 0), "`vocab_size` must be at least 1, but is 0"),
    (
        lambda x: ASRModel(_with(x.config, encoder={"max_frames": 10}), 40)(x.batch),
        "`max_frames` must be at least the 11 frames.*is 10",
    ),
    (
        lambda x: ASRModel(_with(x.config, decoder={"max_positions": 11}), 40)(x.batch),
        "max_positions = 11 tokens.*has 12",
    ),
    (
        lambda x: ASRModel(replace(x.config, ctc=False), 40).ctc_logits(x.encoded.values),
        "this model has no CTC head",
    ),
    (lambda x: _without_decoder(x).decode(x.batch.tokens, x.encoded), "this model has none"),
    (lambda x: _without_decoder(x).logits(x.encoded.values), "this model has none"),
    (lambda x: _without_decoder(x).start_decoding(x.encoded, 4), "this model has none"),
    # Decoding.
    (_step_past_the_room, "at most 1 tokens can be decoded"),
    *(
        (
            lambda x, most=most: x.model.start_decoding(x.encoded, most),
            f"1 to max_positions = 64, but is {most}",
        )
        for most in (0, 65)
    ),
    *(
        (lambda x, read=read: x.model.start_decoding(x.encoded, 6, read), message)
        for read, message in (
            ([[1, 2], [3]], r"`read` must have equally many tokens .*, but is \[2, 1\]"),
            ([[1] * 7], r"at most max_tokens = 6, but is \[7\]"),
            ([[]] * 5, "`read` must be of at most 4 sequences, as `encoded` is, but is 5"),
        )
    ),
    (
        lambda x: x.model.decode_step(x.tokens[:3], x.model.start_decoding(x.encoded, 6)),
        r"`tokens` must be \(4,\), but is \(3,\)",
    ),
    # Text encoders.
    (lambda x: x.model(batch_of(PAIRS)), "`text_encoder` must be given for text-only batches"),
    (
        lambda x: replace(x.config, decoder=None, text_encoder=TEXT),
        "`decoder` must be given where `text_encoder` is",
    ),
    (lambda x: replace(TEXT, mask=1.0), r"`mask` must lie in \[0, 1\), but is 1.0"),
    (
        lambda x: replace(x.config, text_encoder=replace(TEXT, shared_layers=9)),
        r"`text_encoder\.shared_layers` must be at most encoder.layers = 2, but is 9",
    ),
    (
        lambda x: replace(x.config, text_encoder=replace(TEXT, heads=5)),
        r"`text_encoder\.heads` must divide encoder.width = 32",
    ),
    (
        lambda x: batch_of([replace(PAIRS[1], prompt=[])], StaticShape(9, 9, 1)),
        "short: `prompt` must have at least one token",
    ),
    (
        lambda x: batch_of(PAIRS, StaticShape(9, 40, 4)),
        "must fit in `frame_budget` = 9, but fills 12",
    ),
    # Experts.
    (
        lambda x: _with(
            x.config,
            encoder={"experts": NAMED},
            decoder={"experts": replace(NAMED, names=("translate", "transcribe"))},
        ),
        r"`decoder\.experts\.names` must be \('transcribe'.*that of `encoder\.experts`.*late'",
    ),
    (
        lambda x: _with(
            x.config,
            encoder={"experts": NAMED},
            decoder={"experts": replace(NAMED, route="language")},
        ),
        r"`decoder\.experts\.route` must be task, .*is language",
    ),
    (
        lambda x: refuse_experts(_with(x.config, encoder={"experts": NAMED}), "NeMo"),
        r"cannot be exported.*NeMo has no encoder\.experts",
    ),
    (
        lambda x: ModelConfig(
            encoder=replace(x.config.encoder, experts=NAMED), decoder=None, best_rq=BestRQConfig()
        ),
        r"`encoder\.experts\.route` must be learned with `best_",
    ),
    # Adapters by language.
    (
        lambda x: refuse_experts(replace(x.config, language_adapters=("de", "nl")), "NeMo"),
        r"`--merge-language` must be given, as NeMo has no .*: such as --merge-language de",
    ),
    (
        lambda x: _with(replace(x.config, language_adapters=("de",)), encoder={"experts": NAMED}),
        r"`lora\.by_language` must be empty with .* named experts, but is \['de'\]",
    ),
    # Streams.
    (
        lambda x: check_streamable(
            replace(x.config.encoder, experts=NAMED, causal_convolution=True), Context(56, 0, 7)
        ),
        r"`experts\.route` must be learned to decode a stream",
    ),
    (lambda x: _stream(None), "`encoder.context` must be given to decode a stream"),
    (
        lambda x: _stream(Context(None, 0, 3)),
        "`context.left` must be limited to decode a stream",
    ),
    (lambda x: _stream(Context(3, 1, 3)), "`context.right` must be 0 to decode .*, but is 1"),
    (
        lambda x: _stream(CONTEXT, causal_convolution=False),
        "`encoder.causal_convolution` must be true",
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("call", "message"), CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_messages_of_calls(call, message, tiny_config, tiny_model, examples, make_batch):
    batch = make_batch(examples)
    encoded = tiny_model.encode(batch)
    tokens = batch.tokens.values[:4]
    with pytest.raises(ValueError, match=message):
        call(
            SimpleNamespace(
                config=tiny_config, model=tiny_model, batch=batch, encoded=encoded, tokens=tokens
            )
        )
