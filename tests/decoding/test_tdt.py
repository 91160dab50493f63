"""Greedy and beam search of a transducer with durations (TDT)."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import pack
from tests.decoding.cases import best_tdt_beam as tdt_beam
from tests.decoding.cases import make_frames, make_head

LABELS, FEW = 6, 3
"""Of greedy search, and of the beam, which is compared with all texts."""
DURATIONS = (0, 1, 2, 5)


def tdt_config(predictor: Any, durations: tuple[int, ...]) -> TransducerConfig:
    return TransducerConfig(predictor=predictor, width=8, joint=7, durations=durations)


def small_head(
    predictor: str, seed: int, durations: tuple[int, ...], *, blank: float = 0.0, stay: float = 0.0
) -> Transducer:
    config = tdt_config(predictor, durations)
    return make_head(config, FEW, seed, scale=1.0, blank=blank, stay=stay)


@torch.no_grad()
def step_by_step(head: Transducer, frames: Tensor, max_symbols: int) -> tuple[list[int], set[str]]:
    """The definition, for one utterance, with whole transcripts every time; and what occurred."""
    projected = head.encoder_projection(frames)
    message: list[int] = []
    seen = set[str]()
    at = here = 0
    while at < len(projected):
        labels = pack([torch.tensor(message, dtype=torch.int64)])
        predicted = head.predictor_projection(head.predictor(labels.values, labels.layout))
        logits = head.logits(projected[at], predicted[-1])
        symbol = int(logits[: LABELS + 1].argmax())
        lasts = DURATIONS[int(logits[LABELS + 1 :].argmax())]
        if symbol == LABELS:
            seen.add(f"blank of {lasts}")
            lasts = max(lasts, 1)
        else:
            message.append(symbol)
            here += 1
            seen.add(f"label of {lasts}")
            if lasts == 0 and here == max_symbols:
                seen.add("too many labels")
                lasts = 1
        at += lasts
        here = 0 if lasts else here
        if at > len(projected):
            seen.add("past the end")
    return message, seen


@pytest.mark.parametrize("predictor", ["lstm", "stateless"])
@pytest.mark.parametrize("max_symbols", [1, 2, 10])
@torch.no_grad()
def test_greedy_is_step_by_step(predictor, max_symbols) -> None:
    occurred = set[str]()
    config = tdt_config(predictor, DURATIONS)
    for seed in range(6):
        head = make_head(config, LABELS, seed, blank=1.0, stay=1.0)
        encoded = make_frames(5, 0, 1, 12, 3, 0, 30, seed=seed)
        result = transducer_greedy(head, encoded, max_symbols)
        for labels, frames in zip(result, encoded.unpack(), strict=True):
            expected, seen = step_by_step(head, frames, max_symbols)
            assert labels == expected
            occurred |= seen
    everything = {f"{symbol} of {d}" for symbol in ("blank", "label") for d in DURATIONS}
    assert occurred >= everything | {"too many labels", "past the end"}


@torch.no_grad()
def test_greedy_is_that_of_transformers() -> None:
    """Where no frame has so many labels that only one of the two stops."""
    parakeet = pytest.importorskip("transformers.models.parakeet")
    encoder: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "subsampling_conv_channels": 4, "num_mel_bins": 16,
    }  # fmt: skip
    torch.manual_seed(6)
    config = parakeet.ParakeetTDTConfig(
        vocab_size=LABELS + 1, blank_token_id=LABELS, decoder_hidden_size=8, pad_token_id=0,
        num_decoder_layers=2, encoder_config=encoder, durations=[0, 1, 2, 3],
    )  # fmt: skip
    theirs = parakeet.ParakeetForTDT(config).eval()
    theirs.generation_config.decoder_start_token_id = LABELS
    for parameter in theirs.encoder.parameters():
        if parameter.ndim > 1:
            parameter.mul_(20)
    for part in (theirs.encoder_projector, theirs.decoder, theirs.joint):
        for parameter in part.parameters():
            parameter.normal_()
    theirs.decoder.decoder_projector.weight.mul_(3)
    theirs.joint.head.bias[LABELS] += 2
    # Among themselves durations stay as likely; its `generate` takes them for symbols otherwise.
    theirs.joint.head.bias[LABELS + 1 :] -= 100
    head = Transducer(
        TransducerConfig(width=8, joint=8, layers=2, durations=(0, 1, 2, 3)), 16, LABELS
    ).eval()
    named = {
        "encoder_projection": theirs.encoder_projector,
        "predictor.embedding": theirs.decoder.embedding,
        "predictor.lstm": theirs.decoder.lstm,
        "predictor_projection": theirs.decoder.decoder_projector,
        "output": theirs.joint.head,
    }
    for name, module in named.items():
        head.get_submodule(name).load_state_dict(module.state_dict())
    lengths = [400, 160, 320, 96]
    features = torch.randn(4, max(lengths), 16)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    encoded = theirs.encoder(features, attention_mask=mask, output_attention_mask=True)
    frames = encoded.attention_mask.sum(1).tolist()
    packed = pack([x[:n] for x, n in zip(encoded.last_hidden_state, frames, strict=True)])
    result = transducer_greedy(head, packed, 100)
    different, occurred = set(), set()
    generated = theirs.generate(features, attention_mask=mask, max_new_tokens=500)
    for labels, row, passed, n in zip(
        result, generated.sequences.tolist(), generated.durations.tolist(), frames, strict=True
    ):
        steps, at = [], 0
        # Rows that are at their end go on until the last one is.
        for symbol, lasts in zip(row[1:], passed[1:], strict=True):
            if at < n:
                occurred.add((symbol == LABELS, lasts))
            if at < n and symbol != LABELS:
                steps.append(symbol)
            at += lasts
        assert at >= n, "the test needs searches that end"
        assert labels == steps
        different.add(tuple(labels))
    assert len(different) == 4
    assert occurred >= {(False, 0), (False, 1), (False, 2), (False, 3), (True, 1), (True, 3)}


def likelihoods(head: Transducer, frames: Tensor, texts: list[list[int]]) -> Tensor:
    """By the loss: the sum over all paths."""
    encoded = pack([frames] * len(texts))
    return -head(encoded, pack([torch.tensor(text, dtype=torch.int64) for text in texts]))


@pytest.mark.parametrize("durations", [(0, 1), (0, 1, 2), (0, 1, 3)])
@pytest.mark.parametrize("predictor", ["lstm", "stateless"])
@pytest.mark.representative(durations=(0, 1, 3))
@torch.no_grad()
def test_a_wide_beam_finds_the_likeliest_of_all_texts(predictor, durations) -> None:
    texts = [list(x) for n in range(3) for x in itertools.product(range(FEW), repeat=n)]
    seen = set()
    for seed in range(5):
        head = small_head(predictor, seed, durations)
        encoded = make_frames(3, 0, 1, 5, 2, seed=seed)
        result = tdt_beam(head, encoded, 60, [2] * 5)
        assert result[1] == []
        for labels, frames in zip(result, encoded.unpack(), strict=True):
            if len(frames):
                best = texts[int(likelihoods(head, frames, texts).argmax())]
                assert labels == best
                seen.add(tuple(labels))
    assert len(seen) > 4, "the test needs different texts"


@torch.no_grad()
@pytest.mark.extended
def test_a_wider_beam_is_likelier_and_any_than_greedy() -> None:
    totals: dict[str | int, float] = {"greedy": 0.0, 1: 0.0, 2: 0.0, 8: 0.0}
    better = 0
    for seed in range(8):
        # Otherwise a frame may go on for ever.
        head = small_head("lstm", seed, (0, 1, 2, 4), blank=1.0, stay=-2.0)
        encoded = make_frames(9, 14, seed=seed)
        transcripts = {
            name: transducer_greedy(head, encoded, 5)
            if isinstance(name, str)
            else tdt_beam(head, encoded, name, [40] * 2)
            for name in totals
        }
        for number, frames in enumerate(encoded.unpack()):
            result = [transcripts[name][number] for name in totals]
            for name, value in zip(totals, likelihoods(head, frames, result), strict=True):
                totals[name] += value.item()
            greedy, *_, widest = likelihoods(head, frames, result)
            assert widest >= greedy - 1e-9
            better += int(widest > greedy + 1e-9)
    assert totals["greedy"] < totals[1] < totals[2] < totals[8]
    assert better > 4


@torch.no_grad()
def test_a_beam_keeps_to_the_limits() -> None:
    for seed in range(4):
        head = small_head("stateless", seed, (0, 1, 2), blank=-4.0, stay=4.0)
        encoded = make_frames(5, 7, 2, seed=seed)
        free = tdt_beam(head, encoded, 3, [50] * 3)
        limits = [len(free[0]) - 1, 0, len(free[2])]
        result = tdt_beam(head, encoded, 3, limits)
        assert len(result[0]) <= limits[0]
        assert result[1] == []
        assert result[2] == free[2]


@torch.no_grad()
def test_there_is_a_transcript_though_labels_would_skip_the_end() -> None:
    head = small_head("lstm", 0, (0, 1, 6))
    with torch.no_grad():
        head.output.bias[FEW] -= 20
        head.output.bias[-1] += 20
    for labels in tdt_beam(head, make_frames(3, 1, 2, seed=0), 2, [3] * 3):
        assert len(labels) <= 3
