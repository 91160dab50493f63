"""Training with experts on two sources."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, TextExample, collate, collate_text
from effasr.model.asr import ASRModel
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.experts import ExpertFeedForward, ExpertsConfig, ExpertUse
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training.step import train_step

SOURCES = ("low", "high")
NAMED = ExpertsConfig(count=2, route="source", names=SOURCES)


def _batch(step: int) -> Batch:
    """Tones of two sources, which give the same sound different names; one rank, static shape."""
    generator = np.random.default_rng(step)
    examples = []
    for number in range(4):
        source, word = number % 2, int(generator.integers(3))
        seconds = np.arange(8_000) / 16_000
        audio = 0.3 * np.sin(2 * np.pi * 400 * 2**word * seconds)
        text = [4 + (word + source) % 3]
        name = f"{step}-{number}"
        examples.append(Example(name, audio.astype(np.float32), [2], text, expert=source))
    return collate(examples, StaticShape(40, 20, 6), eos_id=1, pad_id=0)


@pytest.mark.parametrize("experts", [NAMED, ExpertsConfig(count=2)], ids=["named", "learned"])
def test_the_loss_falls_and_experts_are_chosen(experts, model_config, make_train_state):
    config = replace(model_config, encoder=replace(model_config.encoder, experts=experts))
    optimizer, schedule = OptimizerConfig(lr=1e-2), ScheduleConfig(warmup_steps=0)
    model, state = make_train_state(model=config, optimizer=optimizer, schedule=schedule)
    use, losses = ExpertUse(model), []
    for step in range(16):
        torch.manual_seed(step)
        losses.append(train_step(state, [_batch(step)], step).read()["loss"])
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
    line = use.line()
    if experts.is_learned:
        assert 0 < min(line["encoder_expert_shares"]) <= max(line["encoder_expert_shares"]) < 1
        assert 1 <= line["encoder_expert_balance"] <= 2
    else:
        # Two utterances of equal length of each source in every batch.
        assert line == {"encoder_expert_shares": [0.5, 0.5]}


def test_a_text_pair_trains_the_expert_of_its_source_alone(model_config):
    text = TextEncoderConfig(layers=1, heads=2, feed_forward=32, experts=NAMED)
    torch.manual_seed(0)
    config = replace(model_config.decoder, experts=NAMED)
    model = ASRModel(replace(model_config, text_encoder=text, decoder=config), 20).train()
    for expert in range(2):
        pairs = [TextExample(f"{n}", [5 + n, 9, 1], [2], [6 + n], expert) for n in range(3)]
        model.zero_grad()
        model(
            collate_text(pairs, StaticShape(16, 16, 4), eos_id=1, pad_id=0)
        ).cross_entropy.backward()
        networks = [x for x in model.modules() if isinstance(x, ExpertFeedForward)]
        assert len(networks) == 1 + config.layers
        for parameter in (p for network in networks for p in network.parameters()):
            assert parameter.grad is not None
            assert parameter.grad[expert].any()
            assert not parameter.grad[1 - expert].any()
