"""Layers that are computed again: the same gradients and statistics, from less memory."""

from contextlib import contextmanager

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import TextExample, collate_text
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.stack import apply_activation_checkpointing, is_recomputing
from tests.training.conftest import VOCABULARY, make_batch

NOISE = {"residual_dropout": 0.1, "activation_dropout": 0.1, "attention_dropout": 0.1}


def text_batch():
    examples = [TextExample(str(n), [4, 5, 6 + n], [2, 3], [7, 8]) for n in range(4)]
    return collate_text(examples, StaticShape(30, 30, 6), eos_id=1, pad_id=0)


def make_model(every):
    """With every kind of randomness, and with statistics."""
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=FastConformerConfig(
            width=16, layers=3, heads=2, feed_forward=16, subsampling_channels=4,
            input_dropout=0.1, position_dropout=0.1, **NOISE,
        ),
        decoder=DecoderConfig(width=16, layers=2, heads=2, feed_forward=16, **NOISE),
        text_encoder=TextEncoderConfig(layers=2, heads=2, feed_forward=16, **NOISE),
        ctc=True,
    )  # fmt: skip
    model = ASRModel(config, VOCABULARY).train()
    if every:
        apply_activation_checkpointing(model, every)
    return model


def results(every):
    """Losses, gradients and buffers of batches of speech and of text; and what each kept."""
    model, result, selected = make_model(every), [], []
    for seed, batch in enumerate([make_batch(0), text_batch(), make_batch(1)]):
        model.zero_grad()
        torch.manual_seed(seed)
        with counting() as bytes_of:
            losses = model(batch, label_smoothing=0.1, guided_sigma=0.3)
        selected.append(sum(bytes_of.values()))
        parts = losses.cross_entropy, losses.ctc, losses.guided
        torch.stack([part for part in parts if part is not None]).sum().backward()
        # What comes after must not see that anything was computed in between.
        result += [losses.cross_entropy.detach(), torch.rand(())]
        result += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        result += [buffer.clone() for buffer in model.buffers()]
    return result, selected


@contextmanager
def counting():
    """The bytes that autograd keeps, by where they are, so that none counts twice."""
    result: dict[int, int] = {}
    tensors = []

    def pack(x):
        storage = x.untyped_storage()
        result[storage.data_ptr()] = storage.nbytes()
        tensors.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield result


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_and_statistics_are_bitwise_the_same(every):
    expected, _ = results(0)
    result, _ = results(every)
    assert len(result) == len(expected)
    for number, (x, y) in enumerate(zip(result, expected, strict=True)):
        assert torch.equal(x, y), number


def test_less_is_kept_the_more_layers_are_computed_again():
    # Weights count as well, which are small here.
    everything, some, least = (results(each_item)[1] for each_item in (0, 2, 1))
    for whole, middle, remainder in zip(everything, some, least, strict=True):
        assert remainder < middle < whole
    speech = 0
    assert least[speech] < 0.6 * everything[speech]


def test_the_first_layer_of_every_n_is_computed_again():
    model = make_model(2)
    assert [layer.is_checkpointed for layer in model.encoder.layers] == [True, False, True]
    assert [layer.is_checkpointed for layer in model.decoder.layers] == [True, False]


def test_nothing_is_computed_again_where_nothing_was_kept():
    model, calls = make_model(1), []
    model.encoder.layers[0].norm_conv.register_forward_hook(
        lambda *_: calls.append(is_recomputing())
    )
    with torch.no_grad():
        model(make_batch(0))
    assert calls == [False]
    model(make_batch(0)).cross_entropy.backward()
    assert calls == [False, False, True]
    assert not is_recomputing()
