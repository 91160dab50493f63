"""Searches of transducers, with and without durations (TDT)."""

import pytest
import torch
from torch import Tensor

from effasr.decoding.transducer_greedy import TransducerStreams, transducer_greedy
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import pack
from tests.decoding.cases import make_frames, make_head, transducer_texts

LABELS, JOINT = 6, 7
DURATIONS = (0, 1, 2, 5)
KINDS = {
    "lstm": TransducerConfig(predictor="lstm", width=8, layers=2, joint=JOINT),
    "stateless": TransducerConfig(predictor="stateless", width=8, joint=JOINT, activation="tanh"),
    "context 3": TransducerConfig(predictor="stateless", width=8, context=3, joint=JOINT),
    "lstm tdt": TransducerConfig(predictor="lstm", width=8, joint=JOINT, durations=DURATIONS),
    "stateless tdt": TransducerConfig(
        predictor="stateless", width=8, joint=JOINT, durations=DURATIONS
    ),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def head_of(kind: str, seed: int = 0, *, blank: float = 0.5, stay: float = 0.0) -> Transducer:
    scale = 1.5 if KINDS[kind].durations is None else 1.0
    return make_head(KINDS[kind], LABELS, seed, scale=scale, blank=blank, stay=stay)


@torch.no_grad()
def step_by_step(head: Transducer, frames: Tensor, max_symbols: int) -> tuple[list[int], set[str]]:
    """The definition, for one utterance, with whole transcripts every time; and what occurred."""
    projected, durations = head.encoder_projection(frames), head.config.durations
    text: list[int] = []
    seen = set[str]()
    at = here = 0
    while at < len(projected):
        labels = pack([torch.tensor(text, dtype=torch.int64)])
        predicted = head.predictor_projection(head.predictor(labels.values, labels.layout))
        logits = head.logits(projected[at], predicted[-1])
        symbol = int(logits[: LABELS + 1].argmax())
        lasts = 0 if durations is None else durations[int(logits[LABELS + 1 :].argmax())]
        if symbol == LABELS:
            seen.add(f"blank of {lasts}")
            lasts = max(lasts, 1)
        else:
            text.append(symbol)
            here += 1
            seen.add(f"label of {lasts}")
            if lasts == 0 and here == max_symbols:
                seen.add("too many labels")
                lasts = 1
        at += lasts
        here = 0 if lasts else here
        if at > len(projected):
            seen.add("past the end")
    return text, seen


@EVERY_KIND
@pytest.mark.parametrize("max_symbols", [1, 2, 10])
@torch.no_grad()
def test_greedy_is_step_by_step(kind, max_symbols) -> None:
    occurred, durations = set[str](), KINDS[kind].durations
    for seed in range(6):
        head = head_of(kind, seed, blank=1.0, stay=1.0)
        encoded = make_frames(5, 0, 1, 12, 3, 0, *([30] if durations else []), seed=seed)
        result = transducer_greedy(head, encoded, max_symbols)
        for labels, frames in zip(result, encoded.unpack(), strict=True):
            expected, seen = step_by_step(head, frames, max_symbols)
            assert labels == expected
            occurred |= seen
    every = {f"{symbol} of {n}" for symbol in ("blank", "label") for n in durations or (0,)}
    assert occurred >= every | {"too many labels"} | ({"past the end"} if durations else set())


@torch.no_grad()
def test_a_new_stream_skips_no_frames_for_the_one_before() -> None:
    head = head_of("lstm tdt", blank=-20.0)
    head.output.bias[-1] += 100
    streams, encoded = TransducerStreams(head, 1, 10), make_frames(3).values[None]
    results = []
    for _ in range(2):
        streams.start(0)
        results.append(streams.step(encoded, [3]))
    # A label that lasts five frames, so that the next part would begin with its third.
    assert [emitted.frame for emitted in results[0][0]] == [0]
    assert results[1] == results[0]


@pytest.mark.parametrize("kind", ["stateless", "stateless tdt"])
@torch.no_grad()
def test_a_beam_keeps_to_the_limits(kind) -> None:
    head = head_of(kind, 1, blank=-5.0, stay=4.0)
    for limits in ([4, 0, 9], [11, 5, 1]):
        lengths = [len(text) for text in transducer_texts(head, make_frames(5, 7, 2), 3, limits)]
        assert all(length <= limit for length, limit in zip(lengths, limits, strict=True))
        # A text of TDT may have to end before, as durations lead past the end.
        assert lengths == limits or (KINDS[kind].durations and sum(lengths) >= 4)


@torch.no_grad()
def test_there_is_a_transcript_though_labels_would_skip_the_end() -> None:
    config = TransducerConfig(predictor="lstm", width=8, joint=JOINT, durations=(0, 1, 6))
    head = make_head(config, LABELS, scale=1.0)
    head.output.bias[LABELS] -= 20
    head.output.bias[-1] += 20
    for labels in transducer_texts(head, make_frames(3, 1, 2), 2, [3] * 3):
        assert len(labels) <= 3
