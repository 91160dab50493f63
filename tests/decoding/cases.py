"""What the tests of several searches share: utterances, models, definitions and checks."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode
from effasr.decoding.decoded import Decoded
from effasr.decoding.transducer_beam import tdt_beam, transducer_beam
from effasr.model.asr import ASRModel
from effasr.model.decoder import DecoderConfig
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import PackedSequence, pack
from tests.support.recognition import TRANSDUCER_GAINS, make_model

SECONDS = (0.3, 2.1, 0.7, 3.3, 1.2, 0.08, 2.6)
SHAPE = StaticShape(frame_budget=400, token_budget=80, max_sequences=11)
FRAME_WIDTH = 5


def make_examples(noise: Callable[..., np.ndarray], prompts: Sequence[list[int]]) -> list[Example]:
    """An utterance for each of `SECONDS`, with these prompts in turn."""
    return [
        Example(str(n), noise(seconds, seed=n), prompts[n % len(prompts)], [], monotonic=False)
        for n, seconds in enumerate(SECONDS)
    ]


class GivenLogits(nn.Module):
    """A model whose CTC head hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def ctc_logits(self, encoded: torch.Tensor) -> torch.Tensor:
        return encoded


GIVEN: ASRModel = GivenLogits()  # type: ignore[assignment]


def ctc_texts(frames: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Log-probability of every transcript, by adding up all paths; the blank is last."""
    steps, blank = frames.double().log_softmax(-1).tolist(), frames.shape[1] - 1
    paths: dict[tuple[tuple[int, ...], int], float] = {((), blank): 1.0}
    for step in steps:
        longer: dict[tuple[tuple[int, ...], int], float] = {}
        for (text, last), probability in paths.items():
            for symbol, value in enumerate(step):
                key = (text if symbol in (blank, last) else (*text, symbol)), symbol
                longer[key] = longer.get(key, 0.0) + probability * math.exp(value)
        paths = longer
    texts: dict[tuple[int, ...], float] = {}
    for (text, _), probability in paths.items():
        texts[text] = texts.get(text, 0.0) + probability
    return {text: math.log(probability) for text, probability in texts.items()}


def gained(text: Sequence[int], phrases: Mapping[tuple[int, ...], float]) -> float:
    """The bonus of a text: its phrases from the left, the longest of those that begin there."""
    total, at = 0.0, 0
    while at < len(text):
        here = [p for p in phrases if tuple(text[at : at + len(p)]) == p]
        longest = max(here, key=len, default=())
        total += len(longest) * phrases.get(longest, 0.0)
        at += len(longest) or 1
    return total


@torch.no_grad()
def without_caches(
    model: ASRModel,
    speech: PackedSequence,
    prompt: Sequence[int],
    limit: int,
    eos_id: int,
    barred: Callable[[list[int], Sequence[int]], Collection[int]] = lambda said, order: (),
) -> Decoded:
    """Greedy search of one utterance, which runs the decoder over the whole text at every step.

    ``barred`` gives the tokens that may not follow a text, of those in order of their logits.
    """
    said: list[int] = []
    while len(said) < limit:
        hidden, _ = model.decode(pack([torch.tensor([*prompt, *said])]), speech)
        order = model.logits(hidden[-1]).argsort(descending=True, stable=True).tolist()
        refused = barred(said, order)
        token = next(token for token in order if token not in refused)
        if token == eos_id:
            return Decoded(tuple(said))
        said.append(token)
    return Decoded(tuple(said), truncated=True)


EOS = 2
PROMPTS = [[0], [1, 3], [3], [0, 0, 1], [2], [1], [3]]
LIMITS = [4, 4, 3, 1, 4, 4, 2]
FRAMES = (6, 3, 7, 4, 5, 2, 0)
"""Of utterances for `tiny_asr`, so short that all their transcripts can be scored."""


def all_texts(limit: int) -> list[tuple[int, ...]]:
    return [text for n in range(limit + 1) for text in product((0, 1, 3), repeat=n)]


@torch.no_grad()
def decoder_steps(
    model: ASRModel, frames: torch.Tensor, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities after each token, and its attention: the softmax, written out."""
    seen = []
    attention = model.decoder.layers[-1].encoder_attn
    handle = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    hidden, _ = model.decode(pack([torch.tensor(tokens)]), pack([frames]))
    handle.remove()
    x, _, encoded, _ = seen[0]
    q = attention.q_proj(x).double().view(len(x), attention.heads, attention.head_dim)
    k = attention.keys_values(encoded)[0].double()[: len(frames)]
    scores = torch.einsum("thd,fhd->thf", q[: len(tokens)], k) / attention.head_dim**0.5
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return model.logits(hidden).double().log_softmax(-1), weights.mean(1)


def covered_share(weights: torch.Tensor) -> float:
    """Of the frames that these tokens cover."""
    return sum(float(frame) > 0.5 for frame in weights.sum(0)) / max(1, weights.shape[1])


def tiny_asr() -> ASRModel:
    """Four tokens, of which 2 is the end; attention that is sharp enough to cover frames."""
    sizes: dict[str, Any] = {"width": 16, "heads": 2, "feed_forward": 16}
    decoder = DecoderConfig(**sizes, layers=2, max_positions=16)
    encoder = {**sizes, "subsampling_norm": False}
    model = make_model(4, seed=3, encoder=encoder, decoder=decoder, ctc=True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
        model.decoder.output_bias[EOS] = 0.5
    return model


def transducer_model(predictor: str, tokenizer: Tokenizer) -> ASRModel:
    """A hybrid whose transcripts differ by utterance."""
    head = TransducerConfig(
        predictor=predictor,  # type: ignore[arg-type]
        width=24, joint=16, activation="tanh",
    )  # fmt: skip
    gains = TRANSDUCER_GAINS
    model = make_model(tokenizer.vocab_size, seed=1, transducer=head, ctc=True, gains=gains)
    assert model.transducer is not None
    with torch.no_grad():
        # Between always a label and always the blank.
        model.transducer.output.bias[-1] = {"lstm": 6.5, "stateless": 1.5}[predictor]
    return model


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

    ``blank`` is added to the bias of the blank, ``stay`` to that of the first duration.
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


def transducer_texts(
    head: Transducer, encoded: PackedSequence, beam: int, limits: Sequence[int]
) -> list[list[int]]:
    """The best transcripts of a beam search, without their scores."""
    search = transducer_beam if head.config.durations is None else tdt_beam
    lists = search(head, encoded, beam, limits)
    return [list(result[0].tokens) if result else [] for result in lists]


def write_arpa(path: Path, *levels: Sequence[str]) -> Path:
    """Write n-grams, the lines of each length."""
    counts = [f"ngram {n}={len(lines)}" for n, lines in enumerate(levels, 1)]
    parts = [line for n, lines in enumerate(levels, 1) for line in (f"\\{n}-grams:", *lines)]
    path.write_text("\n".join(["\\data\\", *counts, *parts, "\\end\\", ""]))
    return path
