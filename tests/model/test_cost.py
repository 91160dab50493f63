"""Predicted FLOPs against those that torch counts."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.data.batch import StaticShape
from effasr.data.collate import TextExample, collate_text
from effasr.data.sampling.cost import CANARY_180M_FLASH
from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model, recomputed_costs
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.stack import apply_activation_checkpointing

VOCABULARY = 40
STATELESS = TransducerConfig(predictor="stateless", width=12, joint=10)
LSTM = TransducerConfig(width=12, layers=2, joint=10, durations=(0, 1, 2))


@pytest.mark.parametrize("transducer", [None, STATELESS, LSTM], ids=["none", "stateless", "lstm"])
@pytest.mark.parametrize("position", ["relative", "rotary"])
@pytest.mark.parametrize("decoder", [True, False])
def test_the_factors_are_what_torch_counts(
    transducer, position, decoder, tiny_config, examples, make_batch
):
    config = dataclasses.replace(
        tiny_config,
        encoder=dataclasses.replace(tiny_config.encoder, position=position),
        decoder=tiny_config.decoder if decoder else None,
        transducer=transducer,
    )
    model = ASRModel(config, VOCABULARY).eval()
    predicted, counted = [], []
    for example in examples:
        # More prompt would count as text; a translation has none for CTC and transducer.
        batch = make_batch([dataclasses.replace(example, prompt=[7], monotonic=True)])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(batch)
        lengths = np.array([batch.frames.total]), np.array([batch.tokens.layout.total])
        predicted.append(int(cost_model(config, VOCABULARY).of(*lengths)[0]))
        counted.append(counter.get_total_flops() - _table(model, batch) - _spare_row(transducer))
    assert predicted == counted


def _table(model, batch):
    """Of the projection of relative positions, which does not depend on lengths."""
    encoder = model.encoder
    if encoder.config.position != "relative":
        return 0
    embeddings = encoder._embeddings(batch.frames, torch.float32)
    return encoder.config.layers * 2 * len(embeddings) * encoder.config.width**2


def _spare_row(transducer):
    """Of the row by which a lane is longer than the sequences that an LSTM reads in it."""
    if transducer is None or transducer.predictor != "lstm":
        return 0
    return transducer.layers * 16 * transducer.width**2


def test_the_default_of_planning_is_the_preset():
    name = "canary_180m_flash"
    assert cost_model(PRESETS[name], PRESET_VOCABULARIES[name]) == CANARY_180M_FLASH


def test_a_vocabulary_is_needed(tiny_config):
    with pytest.raises(ValueError, match="`vocab_size` must be at least 1, but is 0"):
        cost_model(tiny_config, 0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("every", [1, 2])
def test_what_is_computed_again_is_what_torch_counts(
    every, dropout, tiny_config, examples, make_batch
):
    rotary = dataclasses.replace(tiny_config.encoder, position="rotary", layers=3)
    decoder = dataclasses.replace(tiny_config.decoder, residual_dropout=dropout)
    text = TextEncoderConfig(layers=3, heads=4, feed_forward=40, residual_dropout=dropout)
    config = dataclasses.replace(tiny_config, encoder=rotary, decoder=decoder, text_encoder=text)
    shape = StaticShape(9, 10, 1)
    pair = collate_text([TextExample("pair", [4] * 9, [7], [8] * 9)], shape, eos_id=3, pad_id=2)
    for batch in (make_batch(examples[:1]), pair):
        model = ASRModel(config, VOCABULARY)
        counted = []
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                model(batch).cross_entropy.backward()
            counted.append(counter.get_total_flops())
            apply_activation_checkpointing(model, every)
        speech, text_pair = recomputed_costs(config, VOCABULARY, every)
        cost = speech if batch.source is None else text_pair
        lengths = np.array([batch.frames.total]), np.array([batch.tokens.layout.total])
        assert counted[1] - counted[0] == cost.of(*lengths)[0]
