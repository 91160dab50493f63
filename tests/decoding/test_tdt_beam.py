"""Beam search of a transducer with durations."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.greedy import decode
from effasr.decoding.tdt_beam import durations_beam
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import PackedSequence, pack

LABELS, WIDTH = 3, 5


def make_head(
    predictor: Any, seed: int, durations: tuple[int, ...], *, blank: float = 0.0, stay: float = 0.0
) -> Transducer:
    torch.manual_seed(seed)
    config = TransducerConfig(predictor=predictor, width=8, joint=7, durations=durations)
    head = Transducer(config, WIDTH, LABELS).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (1.0 if parameter.ndim > 1 else 0.5))
        head.output.bias[LABELS] += blank
        head.output.bias[LABELS + 1] += stay
    return head


def make_frames(*lengths: int, seed: int) -> PackedSequence:
    draw = torch.Generator().manual_seed(seed)
    return pack([2 * torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in lengths])


def likelihoods(head: Transducer, frames: Tensor, texts: list[list[int]]) -> Tensor:
    """By the loss: the sum over all paths."""
    encoded = pack([frames] * len(texts))
    return -head(encoded, pack([torch.tensor(text, dtype=torch.int64) for text in texts]))


@pytest.mark.parametrize("durations", [(0, 1), (0, 1, 2), (0, 1, 3)])
@pytest.mark.parametrize("predictor", ["lstm", "stateless"])
@torch.no_grad()
def test_a_wide_beam_finds_the_likeliest_of_all_texts(
    predictor: str, durations: tuple[int, ...]
) -> None:
    texts = [list(x) for n in range(3) for x in itertools.product(range(LABELS), repeat=n)]
    seen = set()
    for seed in range(5):
        head = make_head(predictor, seed, durations)
        encoded = make_frames(3, 0, 1, 5, 2, seed=seed)
        found = durations_beam(head, encoded, 60, [2] * 5)
        assert found[1] == []
        for labels, frames in zip(found, encoded.unpack(), strict=True):
            if len(frames):
                best = texts[int(likelihoods(head, frames, texts).argmax())]
                assert labels == best
                seen.add(tuple(labels))
    assert len(seen) > 4, "the test needs different texts"


@torch.no_grad()
def test_a_wider_beam_is_likelier_and_any_than_greedy() -> None:
    totals: dict[str | int, float] = {"greedy": 0.0, 1: 0.0, 2: 0.0, 8: 0.0}
    better = 0
    for seed in range(8):
        # Otherwise a frame may go on for ever.
        head = make_head("lstm", seed, (0, 1, 2, 4), blank=1.0, stay=-2.0)
        encoded = make_frames(9, 14, seed=seed)
        transcripts = {
            name: transducer_greedy(head, encoded, 5)
            if isinstance(name, str)
            else durations_beam(head, encoded, name, [40] * 2)
            for name in totals
        }
        for number, frames in enumerate(encoded.unpack()):
            found = [transcripts[name][number] for name in totals]
            for name, value in zip(totals, likelihoods(head, frames, found), strict=True):
                totals[name] += value.item()
            greedy, *_, widest = likelihoods(head, frames, found)
            assert widest >= greedy - 1e-9
            better += int(widest > greedy + 1e-9)
    assert totals["greedy"] < totals[1] < totals[2] < totals[8]
    assert better > 4


@torch.no_grad()
def test_a_beam_keeps_to_the_limits() -> None:
    for seed in range(4):
        head = make_head("stateless", seed, (0, 1, 2), blank=-4.0, stay=4.0)
        encoded = make_frames(5, 7, 2, seed=seed)
        free = durations_beam(head, encoded, 3, [50] * 3)
        limits = [len(free[0]) - 1, 0, len(free[2])]
        found = durations_beam(head, encoded, 3, limits)
        assert len(found[0]) <= limits[0]
        assert found[1] == []
        assert found[2] == free[2]


@torch.no_grad()
def test_there_is_a_transcript_though_labels_would_skip_the_end() -> None:
    head = make_head("lstm", 0, (0, 1, 6))
    with torch.no_grad():
        head.output.bias[LABELS] -= 20
        head.output.bias[-1] += 20
    for labels in durations_beam(head, make_frames(3, 1, 2, seed=0), 2, [3] * 3):
        assert len(labels) <= 3


def test_an_utterance_gives_the_same_tokens_in_any_company(tdt_model, tokenizer, noise) -> None:
    prompt = tokenizer.prompt(Prompt())
    examples = [
        Example(str(n), noise(seconds, seed=n), prompt, [], monotonic=True)
        for n, seconds in enumerate((0.3, 2.1, 0.7, 3.3, 1.2, 0.08))
    ]

    def tokens(chosen: list[Example], shape: StaticShape | None = None, beam: int = 3):
        batch = collate(chosen, shape, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
        config = DecodingConfig(beam=beam)
        found = decode(tdt_model, tokenizer, batch, [prompt] * len(chosen), config)
        return [result.tokens for result in found]

    together = tokens(examples)
    assert len(set(together)) > 4, "the test needs different texts"
    assert together != tokens(examples, beam=1)
    assert [tokens([example])[0] for example in examples] == together
    assert tokens(examples[::-1]) == together[::-1]
    assert tokens(examples, StaticShape(400, 80, 11)) == together


def test_half_precision_decodes_too(tdt_model, tokenizer, noise) -> None:
    prompt = tokenizer.prompt(Prompt())
    example = Example("a", noise(1.0, seed=1), prompt, [], monotonic=True)
    batch = collate([example], eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = decode(tdt_model, tokenizer, batch, [prompt], DecodingConfig(beam=3))
    assert found.tokens
