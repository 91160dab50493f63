"""Encoders with limited contexts: packed, alone, and chunk by chunk."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from effasr import config as configuration
from effasr.data.features.frame_geometry import Framing
from effasr.data.features.log_mel import MelFrames
from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model
from effasr.model.encoder import FastConformerConfig, FastConformerEncoder
from effasr.model.streaming_encoder import StreamingEncoder
from effasr.training import step as training_step
from effasr.training.seeds import sample
from effasr_kernels import Context, PackedLayout
from tests.support.small_model import shake

VOCABULARY, BINS = 40, 16
CONTEXT = Context(4, 0, 3)


def _encoder(context, **options):
    torch.manual_seed(0)
    fields = {"conv_kernel": 5, "feed_forward": 48, "subsampling_channels": 8} | options
    config = FastConformerConfig(
        width=32, layers=3, heads=4, context=(context,), causal_convolution=True, **fields
    )
    encoder = FastConformerEncoder(config, BINS).eval()
    shake(encoder)
    return encoder


def _mel(rows, factor=8):
    return [torch.randn(count, BINS) for count in rows]


def _offline(encoder, mel):
    factor = encoder.config.subsampling
    framing = Framing(hop=1, subsampling=factor, causal=encoder.config.causal_subsampling)
    lengths = [framing.frames(len(item)) for item in mel]
    slots = [
        torch.nn.functional.pad(item, (0, 0, 0, factor * frames - len(item)))
        for item, frames in zip(mel, lengths, strict=True)
    ]
    real = torch.tensor([len(item) for item in mel])
    layout = PackedLayout.from_lengths(lengths)
    with torch.no_grad():
        return encoder(MelFrames(torch.cat(slots), layout, real, factor)).unpack()


def _streamed(encoder, mel, context, slots):
    """Streams begin as slots become free, so that they are at different places."""
    factor, size = encoder.config.subsampling, context.chunk * encoder.config.subsampling
    streams = StreamingEncoder(encoder, BINS, slots, context)
    framing = Framing(hop=1, subsampling=factor, causal=encoder.config.causal_subsampling)
    waiting, open_streams = list(range(len(mel))), dict[int, int]()
    at, result = [0] * len(mel), [list[Tensor]() for _ in mel]
    turn = 0
    while waiting or open_streams:
        for slot in range(slots):
            # Not all at once.
            if slot not in open_streams and waiting and turn >= slot:
                open_streams[slot] = waiting.pop(0)
                streams.start(slot)
        block, rows, frames = torch.full((slots, size, BINS), torch.nan), [0] * slots, [0] * slots
        for slot, name in open_streams.items():
            part = mel[name][at[name] : at[name] + size]
            # Streams that wait must stay as they are.
            if (turn + slot) % 3:
                block[slot, : len(part)], rows[slot] = part, len(part)
                at[name] += len(part)
                done = sum(map(len, result[name]))
                remaining = framing.frames(len(mel[name])) - done
                frames[slot] = min(context.chunk, remaining)
        encoded = streams.step(block, rows, frames)
        for slot, name in list(open_streams.items()):
            result[name].append(encoded[slot, : frames[slot]])
            if sum(map(len, result[name])) == framing.frames(len(mel[name])):
                del open_streams[slot]
        turn += 1
    return [torch.cat(pieces) for pieces in result]


@pytest.mark.parametrize("position", ["relative", "rotary", "none"])
@pytest.mark.parametrize("left", [0, 1, 5, 12])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 40])
@pytest.mark.representative(position="relative")
@pytest.mark.representative(chunk=2)
def test_chunks_give_what_the_whole_gives(chunk, left, position):
    context = Context(left, 0, chunk)
    encoder = _encoder(context, position=position)
    mel = _mel([171, 8, 1, 90, 33, 160])
    for expected, result in zip(
        _offline(encoder, mel), _streamed(encoder, mel, context, 2), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"conv_norm": "layer_norm", "subsampling_norm": True, "input_positions": 0.3},
        {"scale_input": True, "bias": False, "convolution_bias": False, "conv_kernel": 9},
        {"subsampling": 4, "conv_kernel": 1},
        {"causal_subsampling": True},
        {"causal_subsampling": True, "subsampling": 4},
    ],
)
def test_chunks_give_what_the_whole_gives_with_all_options(options):
    encoder = _encoder(CONTEXT, **options)
    mel = _mel([171, 64, 5])
    for expected, result in zip(
        _offline(encoder, mel), _streamed(encoder, mel, CONTEXT, 3), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_one_model_serves_several_contexts():
    encoder = _encoder(CONTEXT)
    mel = _mel([100])
    (first,) = _offline(encoder, mel)
    encoder.evaluate_with(Context(8, 0, 6))
    (second,) = _offline(encoder, mel)
    assert (first - second).abs().max() > 1e-3
    (result,) = _streamed(encoder, mel, Context(8, 0, 6), 1)
    torch.testing.assert_close(result, second, rtol=1e-5, atol=1e-5)
    encoder.evaluate_with(None)
    (whole,) = _offline(encoder, mel)
    assert (whole - second).abs().max() > 1e-3


def test_the_cost_is_the_mean_over_contexts(tiny_config):
    def cost(*contexts):
        encoder = dataclasses.replace(tiny_config.encoder, context=contexts)
        model = cost_model(dataclasses.replace(tiny_config, encoder=encoder), VOCABULARY)
        return int(model.of(np.array([0, 300]), np.array([0, 0])).sum())

    narrow, wide = Context(8, 0, 4), Context(64, 0, 16)
    assert cost(narrow) < cost(narrow, wide) < cost(wide) < cost()


def test_a_context_is_read_from_a_recipe():
    provided = {"context": [{"left": 56, "right": 0, "chunk": 7}, {"left": 56, "chunk": 14}]}
    config = configuration.from_mapping(FastConformerConfig, provided)
    assert config.context == (Context(56, 0, 7), Context(56, 0, 14))
    assert (
        configuration.from_mapping(FastConformerConfig, configuration.to_mapping(config)) == config
    )
    with pytest.raises(configuration.ConfigError, match="`chunk` must be a whole number"):
        configuration.from_mapping(FastConformerConfig, {"context": [{"left": 1, "chunk": 0}]})


def test_a_step_draws_the_same_context_everywhere():
    contexts = [Context(1), Context(2), Context(3)]
    draws = [sample(contexts, 5, step) for step in range(300)]
    assert draws == [sample(contexts, 5, step) for step in range(300)]
    assert draws != [sample(contexts, 6, step) for step in range(300)]
    # Each is expected 100 times, with a standard deviation of 8.
    assert all(60 < draws.count(context) < 140 for context in contexts)


def test_each_step_trains_with_its_context(tiny_config):
    contexts = CONTEXT, Context(8, 0, 6), Context(8, 0, 2)
    encoder = dataclasses.replace(tiny_config.encoder, context=contexts)
    model = ASRModel(dataclasses.replace(tiny_config, encoder=encoder), VOCABULARY)
    state = SimpleNamespace(grad_sync=SimpleNamespace(module=model), config=SimpleNamespace(seed=3))
    for step in range(5):
        training_step._sample_attention_context(state, step)
        assert model.train().encoder.context == sample(contexts, 3, step)
        assert model.eval().encoder.context == CONTEXT
