from collections.abc import Sequence

import numpy as np
import pytest
import torch

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import Framing
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig

VOCABULARY = 40
BATCH = {"eos_id": 3, "pad_id": 2}


@pytest.fixture
def examples():
    """Four utterances: long, tiny, a translation, and one whose text cannot fit in its frames."""
    random = np.random.default_rng(0)

    def example(name: str, samples: int, tokens: int, monotonic: bool = True) -> Example:
        audio = 0.1 * random.standard_normal(samples).astype(np.float32)
        text = random.integers(8, VOCABULARY, tokens).tolist()
        return Example(id=name, audio=audio, prompt=[7, 5, 6], text=text, monotonic=monotonic)

    return [
        example("long", 14_005, 5),
        example("short", 2_719, 1),
        example("translated", 8_000, 4, monotonic=False),
        example("crowded", 3_000, 9),
    ]


@pytest.fixture(scope="session")
def subsampling():
    """Mel rows of an encoder frame of `tiny_config` and `make_batch`."""
    return 8


@pytest.fixture
def is_causal():
    """Whether the convolutions that subsample are."""
    return False


@pytest.fixture
def make_batch(subsampling, is_causal):
    """Collate, exactly or in a static shape with a tail and empty sequences."""

    def make(examples: Sequence[Example], *, static: bool = False) -> Batch:
        shape = StaticShape(
            frame_budget=40 * 8 // subsampling,
            token_budget=50,
            max_sequences=6,
            framing=Framing(subsampling=subsampling, causal=is_causal),
        )
        framing = None if static else shape.framing
        return collate(list(examples), shape if static else None, framing=framing, **BATCH)

    return make


@pytest.fixture
def tiny_config(subsampling):
    """A decoder and a CTC head; batch normalisation and relative positions."""
    return ModelConfig(
        features=FeatureConfig(mel_bins=16),
        encoder=FastConformerConfig(
            width=32,
            layers=2,
            heads=4,
            feed_forward=48,
            subsampling=subsampling,
            subsampling_channels=8,
        ),
        decoder=DecoderConfig(
            width=24, layers=2, heads=2, head_dim=8, feed_forward=40, max_positions=64
        ),
        ctc=True,
    )


@pytest.fixture
def tiny_model(tiny_config):
    """In evaluation mode, with no bias at zero and no norm at rest."""
    torch.manual_seed(0)
    model = ASRModel(tiny_config, VOCABULARY).eval()
    shake(model)
    return model


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)


def check_compiled(model, batches, graphs: int = 1, **options) -> None:
    """The first batches make a graph each, without a break; losses and gradients are the same."""
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    for number, batch in enumerate(batches):
        results = []
        for call in (compiled, model):
            model.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=number >= graphs):
                losses = call(batch, **options)
            loss = losses.cross_entropy + (0 if losses.ctc is None else losses.ctc)
            loss.backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            results.append({"loss": loss.detach(), **{n: x.clone() for n, x in grads.items()}})
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
