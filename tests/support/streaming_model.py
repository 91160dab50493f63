"""Small models with limited contexts, whose random weights give many tokens."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.model.asr import ASRModel
from effasr.model.transducer import TransducerConfig
from effasr.transcription.results import Segment
from effasr_kernels import Context
from tests.support.recognition import make_model
from tests.support.small_model import shake

RATE = 16_000
CONTEXTS = Context(9, 0, 3), Context(10, 0, 1), Context(14, 0, 7)
WHOLE = Context(None, None)
"""Also trained with, and of no use for a stream."""
HEADS = {
    "ctc": None,
    "stateless": TransducerConfig(predictor="stateless", width=24, joint=16),
    "rnnt": TransducerConfig(width=24, joint=16),
    "tdt": TransducerConfig(width=24, joint=16, activation="tanh", durations=(0, 1, 2, 4)),
}
Make = Callable[..., ASRModel]


@pytest.fixture(scope="session")
def streaming_model(tokenizer):
    """``streaming_model(head, **features)``, of random weights that give many tokens."""

    def make(head: str, *, causal: bool = False, **features: object) -> ASRModel:
        limited = {"layers": 2, "context": (WHOLE, *CONTEXTS), "causal_convolution": True}
        model = make_model(
            tokenizer.vocab_size,
            seed=3,
            features={"normalize": False, **features},
            encoder=limited | {"causal_subsampling": causal},
            ctc=head == "ctc",
            transducer=HEADS[head],
        )
        shake(model)
        with torch.no_grad():
            if model.ctc_head is not None:
                model.ctc_head.weight.mul_(4)
            if model.transducer is not None:
                model.transducer.output.weight.mul_(4)
        return model

    return make


def pieces(audio: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """The audio in packets of so many samples; 0 for random sizes, some of them 0."""
    draw, start = np.random.default_rng(size), 0
    while start < len(audio):
        count = size or int(draw.integers(0, 9000))
        yield audio[start : start + count]
        start += count


@torch.no_grad()
def encoded_by(model, audio, context=CONTEXTS[0], expert=None):
    example = Example(id="one", audio=audio, prompt=[1], text=[], expert=expert)
    batch = collate([example], eos_id=3, pad_id=2, framing=model.config.features.framing)
    model.encoder.evaluate_with(context)
    return model.encode(batch)


def recognized(recognizer, packets):
    """A new stream, decoded after each packet and ended, and its segments."""
    stream, result = recognizer.open(), list[Segment]()
    for samples in packets:
        stream.feed(samples)
        recognizer.decode()
        result += stream.take()
    stream.finish()
    recognizer.decode()
    assert stream.done
    return stream, result + stream.take()
