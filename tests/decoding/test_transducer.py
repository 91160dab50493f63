import itertools

import pytest
import torch
from torch import Tensor

from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import pack
from tests.decoding.cases import best_transducer_beam as transducer_beam
from tests.decoding.cases import make_frames, make_head

LABELS, JOINT = 6, 7
KINDS = {
    "lstm": TransducerConfig(predictor="lstm", width=8, layers=2, joint=JOINT),
    "stateless": TransducerConfig(predictor="stateless", width=8, joint=JOINT, activation="tanh"),
    "context 3": TransducerConfig(predictor="stateless", width=8, context=3, joint=JOINT),
}


def head_of(kind: str, seed: int = 0, *, blank: float = 0.5) -> Transducer:
    return make_head(KINDS[kind], LABELS, seed, blank=blank)


@torch.no_grad()
def frame_by_frame(head: Transducer, frames: Tensor, max_symbols: int) -> list[int]:
    """The definition of greedy search, for one utterance, with whole transcripts every time."""
    message: list[int] = []
    for frame in head.encoder_projection(frames):
        for _ in range(max_symbols):
            labels = pack([torch.tensor(message, dtype=torch.int64)])
            predicted = head.predictor_projection(head.predictor(labels.values, labels.layout))
            symbol = int(head.logits(frame, predicted[-1]).argmax())
            if symbol == LABELS:
                break
            message.append(symbol)
    return message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_symbols", [1, 2, 10])
@torch.no_grad()
def test_greedy_is_frame_by_frame(kind, max_symbols) -> None:
    several = 0
    for seed in range(4):
        head = head_of(kind, seed, blank=1.0)
        encoded = make_frames(5, 0, 1, 12, 3, 0, seed=seed)
        result = transducer_greedy(head, encoded, max_symbols)
        sequences = encoded.unpack()
        assert result == [frame_by_frame(head, item, max_symbols) for item in sequences]
        several += sum(
            len(message) > len(item) for message, item in zip(result, sequences, strict=True)
        )
    assert several or max_symbols == 1, "the test needs several labels at one frame"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representative(kind="context 3")
@torch.no_grad()
def test_a_beam_of_one_is_greedy(kind) -> None:
    compared = set()
    for seed in range(4):
        head = head_of(kind, seed, blank=2.0)
        encoded = make_frames(5, 0, 1, 12, 3, 0, seed=seed)
        unbounded = transducer_greedy(head, encoded, 100)
        for message, result in zip(
            unbounded, transducer_beam(head, encoded, 1, [50] * 6), strict=True
        ):
            # A frame may go on for ever.
            assert result == (message if len(message) < 50 else message[:50])
            compared.add(tuple(result))
    assert len(compared) > 5, "the test needs different texts"


def every_text(longest: int) -> list[list[int]]:
    texts = (itertools.product(range(LABELS), repeat=n) for n in range(longest + 1))
    return [list(text) for of_one_length in texts for text in of_one_length]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representative(kind="lstm")
@torch.no_grad()
def test_a_wide_beam_finds_the_likeliest_of_all_texts(kind) -> None:
    """Whose likelihood is the sum over all paths, as the loss has it."""
    texts = every_text(2)
    better = 0
    for seed in range(8):
        head = head_of(kind, seed, blank=1.0)
        encoded = make_frames(3, 1, 0, 2, 4, seed=seed)
        result = transducer_beam(head, encoded, 300, [2] * 5)
        for item, message, greedy in zip(
            encoded.unpack(), result, transducer_greedy(head, encoded, 100), strict=True
        ):
            if not len(item):
                assert message == []
                continue
            labels = pack([torch.tensor(text, dtype=torch.int64) for text in texts])
            losses = head(pack([item] * len(texts)), labels)
            assert message == texts[int(losses.argmin())]
            better += message != greedy
    assert better > 2, "the test needs texts that greedy search does not find"


@torch.no_grad()
def test_a_wider_beam_is_likelier() -> None:
    likelihoods = {beam: 0.0 for beam in (1, 2, 8)}
    for seed in range(6):
        head = head_of("lstm", seed, blank=2.0)
        encoded = make_frames(12, 9, 15, seed=seed)
        for beam in likelihoods:
            result = transducer_beam(head, encoded, beam, [40] * 3)
            labels = pack([torch.tensor(text, dtype=torch.int64) for text in result])
            likelihoods[beam] -= head(encoded, labels).sum().item()
    assert likelihoods[1] < likelihoods[2] < likelihoods[8]


@torch.no_grad()
def test_a_beam_keeps_to_the_limits() -> None:
    head = head_of("stateless", 1, blank=-5.0)
    result = transducer_beam(head, make_frames(5, 7, 2), 3, [4, 0, 9])
    assert [len(message) for message in result] == [4, 0, 9]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_state_read_label_by_label_is_that_of_the_transcript(kind) -> None:
    head = head_of(kind)
    message = torch.randint(LABELS, (2, 5))
    labels = pack(list(message))
    whole = head.predictor_projection(head.predictor(labels.values, labels.layout)).view(2, 6, -1)
    predicted, state = head.begin(2)
    for n in range(5):
        torch.testing.assert_close(predicted, whole[:, n])
        predicted, state = head.step(message[:, n], state)
    torch.testing.assert_close(predicted, whole[:, 5])
