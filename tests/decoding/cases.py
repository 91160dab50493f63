"""What the tests of several searches share: utterances, transducer heads and checks."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_beam import ctc_beam
from effasr.decoding.decode import decode
from effasr.decoding.decoded import Decoded
from effasr.decoding.hypothesis import Hypothesis
from effasr.decoding.tdt_beam import tdt_beam
from effasr.decoding.transducer_beam import transducer_beam
from effasr.model.asr import ASRModel
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import PackedSequence, pack

SECONDS = (0.3, 2.1, 0.7, 3.3, 1.2, 0.08, 2.6)
SHAPE = StaticShape(frame_budget=400, token_budget=80, max_sequences=11)
FRAME_WIDTH = 5


def make_examples(
    noise: Callable[..., np.ndarray], prompts: Sequence[list[int]], *, monotonic: bool = False
) -> list[Example]:
    """An utterance for each of `SECONDS`, with these prompts in turn."""
    return [
        Example(str(n), noise(seconds, seed=n), prompts[n % len(prompts)], [], monotonic=monotonic)
        for n, seconds in enumerate(SECONDS)
    ]


def batch_of(
    examples: Sequence[Example], tokenizer: Tokenizer, shape: StaticShape | None = None
) -> Batch:
    return collate(list(examples), shape, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)


def decode_all(
    examples: Sequence[Example],
    model: ASRModel,
    tokenizer: Tokenizer,
    shape: StaticShape | None = None,
    **options,
) -> list[Decoded]:
    prompts = [example.prompt for example in examples]
    batch = batch_of(examples, tokenizer, shape)
    return decode(model, tokenizer, batch, prompts, DecodingConfig(**options))


def assert_independent_of_batch(
    examples: Sequence[Example], model: ASRModel, tokenizer: Tokenizer, **options
) -> list[Decoded]:
    """An utterance gives the same tokens alone, in other orders and in a static shape."""
    together = decode_all(examples, model, tokenizer, **options)
    assert len({result.tokens for result in together}) > 4, "the test needs different texts"
    alone = [decode_all([example], model, tokenizer, **options)[0] for example in examples]
    assert alone == together
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(1)).tolist()
    for indices in (order, order[::-1]):
        permuted = decode_all([examples[n] for n in indices], model, tokenizer, **options)
        assert permuted == [together[n] for n in indices]
    assert decode_all(examples, model, tokenizer, SHAPE, **options) == together
    return together


@torch.no_grad()
def make_head(
    config: TransducerConfig,
    labels: int,
    seed: int = 0,
    *,
    scale: float = 1.5,
    blank: float = 0.0,
    stay: float = 0.0,
) -> Transducer:
    """A float64 transducer with weights so large that symbols depend on frames and labels.

    Args:
        config: The architecture.
        labels: V.
        seed: Of the weights.
        scale: Standard deviation of the matrices.
        blank: Added to the bias of the blank.
        stay: Added to the bias of the first duration.
    """
    torch.manual_seed(seed)
    head = Transducer(config, FRAME_WIDTH, labels).double().eval()
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape) * (scale if parameter.ndim > 1 else 0.5))
    head.output.bias[labels] += blank
    if config.durations is not None:
        head.output.bias[labels + 1] += stay
    return head


def make_frames(*lengths: int, seed: int = 0) -> PackedSequence:
    draw = torch.Generator().manual_seed(seed)
    sizes = [(length, FRAME_WIDTH) for length in lengths]
    return pack([2 * torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes])


def best_of(lists: Sequence[Sequence[Hypothesis]]) -> list[list[int]]:
    """The transcripts alone."""
    return [list(found[0].tokens) if found else [] for found in lists]


def best_ctc_beam(*arguments, **options) -> list[list[int]]:
    return best_of(ctc_beam(*arguments, **options))


def best_transducer_beam(*arguments, **options) -> list[list[int]]:
    return best_of(transducer_beam(*arguments, **options))


def best_tdt_beam(*arguments, **options) -> list[list[int]]:
    return best_of(tdt_beam(*arguments, **options))
