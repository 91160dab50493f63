import numpy as np
import pytest

from effasr.data.batch import StaticShape
from effasr.data.conversation.corpus import (
    epoch_mixture,
    of_whole_steps,
    populations,
    token_budget,
)
from effasr.data.mixture import MixConfig
from effasr.data.sampling.packing import plan_epoch
from effasr.data.sampling.plan import UtteranceLengths

STACK = 4


def corpus(speech, text):
    """Speech with instruction and answer, and texts of a few to several hundred rows."""
    random = np.random.default_rng(0)
    frames = np.clip(random.lognormal(4.8, 0.6, speech), 8, 490).astype(np.int32)
    spoken = -(-frames // STACK) + 20 + random.poisson(frames / 3)
    written = np.clip(random.lognormal(4.5, 0.8, text), 10, 1_500)
    return UtteranceLengths(
        np.concatenate([frames, np.zeros(text, np.int32)]),
        np.concatenate([spoken, written]).astype(np.int32),
    ), np.repeat(np.array([0, 1], np.uint16), [speech, text])


@pytest.fixture(scope="module")
def lengths():
    return corpus(12_000, 6_000)


# A few conversations are drawn many times, so what is drawn varies most.
@pytest.mark.parametrize("count", [300, 1_200, 12_000])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_epochs_of_mixed_conversations_fill_whole_steps(count, temperature):
    lengths, sources = corpus(count, count // 2)
    mix = MixConfig(sources={"speech": "s.jsonl", "text": "t.jsonl"}, temperature=temperature)
    mixture = epoch_mixture(mix, lengths, sources)
    shape = StaticShape(8_000, token_budget(lengths, sources, mixture, 8_000), 2_000)
    mixture = of_whole_steps(mixture, lengths, sources, shape, micro_batches=2)
    draw = populations(mixture, lengths, sources, seed=5)
    steps = set()
    for epoch in (0, 3, 7):
        members = draw(epoch)
        plan = plan_epoch(
            lengths, shape=shape, micro_batches=2, seed=5, epoch=epoch, population=members
        )
        assert plan.padding_frames < 0.005
        assert plan.padding_tokens < 0.005
        steps.add(plan.num_steps)
        drawn = np.bincount(sources[plan.indices], weights=lengths.tokens[plan.indices])
        near = 2e-3 if count == 12_000 else 1e-2
        assert drawn / drawn.sum() == pytest.approx(mixture.asked, abs=near)
    assert len(steps) == 1
    if temperature == 0:
        assert mixture.asked == pytest.approx([0.5, 0.5])


def test_an_epoch_in_hours_is_refused(lengths):
    mix = MixConfig(sources={"speech": "s.jsonl", "text": "t.jsonl"}, epoch_hours=2.0)
    with pytest.raises(ValueError, match="epoch_hours"):
        epoch_mixture(mix, *lengths)
