"""One shape for every step: nothing is compiled twice, and nothing grows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.transducer import TransducerConfig
from effasr.training.step import train_step
from effasr_kernels import PackedSequence
from tests.training.conftest import without_randomness

SHAPE = StaticShape(60, 50, 6, longest_frames=30, longest_tokens=20)


def make_batch(seed: int) -> Batch:
    """Utterances of other numbers and lengths, in the same shape."""
    generator = np.random.default_rng(seed)
    examples = [
        Example(
            str(n),
            generator.normal(size=int(generator.integers(3_000, 20_000))).astype(np.float32),
            [1, 2],
            generator.integers(3, 12, size=int(generator.integers(0, 6))).tolist(),
        )
        for n in range(int(generator.integers(2, 5)))
    ]
    return collate(examples, SHAPE, eos_id=1, pad_id=0)


HEADS = {
    "attention": None,
    "lstm": TransducerConfig(width=12, joint=12),
    "stateless": TransducerConfig(predictor="stateless", width=12, joint=12),
}


def make_model(config: ModelConfig, head: str = "attention") -> ASRModel:
    """Without randomness, which a compiler may draw otherwise."""
    torch.manual_seed(0)
    config = without_randomness(config)
    if HEADS[head] is not None:
        config = replace(config, decoder=None, transducer=HEADS[head])
    return ASRModel(config, 12).train()


@pytest.mark.usefixtures("eager_compiler", "without_onednn")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.representative(head="attention")
def test_the_model_compiles_once_and_without_a_break(model_config, head):
    model = make_model(model_config, head)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    options = {"label_smoothing": 0.1, "guided_sigma": 0.3} if head == "attention" else {}
    for seed in range(4):
        batch = make_batch(seed)
        results = []
        for call in (compiled, model):
            model.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                losses = call(batch, **options)
                sums = [losses.cross_entropy, losses.ctc, losses.guided, losses.transducer]
                sum(sums).backward()
            # Batch norm cancels the bias in front of it, whose gradient is rounding alone.
            gradients = [
                x.grad.clone()
                for name, x in model.named_parameters()
                if x.grad is not None and not name.endswith("conv.depthwise.bias")
            ]
            results.append([*sums, *gradients])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


class Sizes(TorchDispatchMode):
    """Writes down the bytes of each result of the dispatcher's operations, in order."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self.found.append((str(func), x.numel() * x.element_size()))
        return result


def test_every_step_asks_for_the_same_memory(make_train_state):
    _, train_state = make_train_state()
    traces = []
    for step in range(4):
        batch = make_batch(step)
        # As on a GPU: on a CPU features depend on the lengths that the host knows.
        audio = PackedSequence(batch.audio.values, batch.audio.layout.rewritable())
        with Sizes() as sizes:
            train_step(train_state, [replace(batch, audio=audio)], step)
        traces.append(sizes.found)
    # The first step makes the optimizer's state.
    assert len(traces[1]) > 500
    assert traces[1] == traces[2] == traces[3]


@pytest.mark.parametrize("head", ["lstm", "stateless"])
def test_a_predictor_asks_for_the_same_memory_at_every_step(model_config, head):
    predictor, traces = make_model(model_config, head).transducer.predictor, []
    for seed in range(3):
        text = make_batch(seed).text
        with Sizes() as sizes:
            predictor(text.values, text.layout).sum().backward()
        traces.append(sizes.found)
    assert len(traces[1]) > 20
    assert traces[2] == traces[1]


def test_the_table_of_positions_does_not_follow_the_longest_utterance(model_config):
    encoder = make_model(model_config).encoder
    sizes = {encoder._embeddings(make_batch(seed).frames, torch.float32).shape for seed in range(4)}
    assert len(sizes) == 1
