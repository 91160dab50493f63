"""Confidences of tokens against their definitions, and paths against all paths."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from effasr.decoding.confidence.tokens import (
    ALPHA,
    entropy_confidence,
    likeliest_frames,
    token_confidences,
)
from effasr.model.transducer import TransducerConfig
from effasr_kernels import pack
from tests.decoding.cases import batch_of, decode_all, make_frames, make_head


def measure(p: np.ndarray, alpha: float = 1 / 3) -> float:
    """The definition, for one distribution."""
    entropy = (sum(float(x) ** alpha for x in p) - 1) / (1 - alpha)
    most = (len(p) * (1 / len(p)) ** alpha - 1) / (1 - alpha)
    return (math.exp(-entropy) - math.exp(-most)) / (1 - math.exp(-most))


@pytest.mark.parametrize("alpha", [ALPHA, 0.7])
@pytest.mark.parametrize("classes", [2, 5, 1000])
def test_confidence_is_the_normalized_entropy(classes, alpha) -> None:
    draw = torch.Generator().manual_seed(classes)
    logs = (4 * torch.randn(6, classes, generator=draw)).log_softmax(-1)
    result = entropy_confidence(logs, alpha)
    for row, value in zip(logs.double().exp().numpy(), result.tolist(), strict=True):
        assert value == pytest.approx(measure(row, alpha), rel=1e-5, abs=1e-9)
    uniform, certain = torch.zeros(classes).log_softmax(-1), torch.full((classes,), -math.inf)
    certain[0] = 0.0
    assert float(entropy_confidence(uniform, alpha)) == pytest.approx(0.0, abs=1e-6)
    assert float(entropy_confidence(certain, alpha)) == 1.0
    with pytest.raises(ValueError, match="`alpha` must be between 0 and 1"):
        entropy_confidence(uniform, 1.0)


def every_path(blank, label, lasting, durations) -> dict[tuple[int, ...], float]:
    """The best log-probability of a path for each list of frames of the labels."""
    frames, count = blank.shape[0], label.shape[1]
    result: dict[tuple[int, ...], float] = {}

    def go(frame: int, said: tuple[int, ...], score: float) -> None:
        after = len(said)
        if frame == frames:
            if after == count:
                result[said] = max(result.get(said, -math.inf), score)
            return
        steps = ([(0, 0.0)], [(1, 0.0)])
        if lasting is not None:
            each_item = [(d, lasting[frame, after, n]) for n, d in enumerate(durations)]
            steps = each_item, [(d, s) for d, s in each_item if d]
        for lasts, local in steps[1]:
            if frame + lasts <= frames:
                go(frame + lasts, said, score + blank[frame, after] + local)
        for lasts, local in steps[0]:
            if after < count and frame + lasts < frames:
                go(frame + lasts, (*said, frame), score + label[frame, after] + local)

    go(0, (), 0.0)
    return result


@pytest.mark.parametrize("durations", [None, (0, 1), (0, 1, 3)])
@pytest.mark.parametrize(("frames", "count"), [(4, 3), (1, 2), (5, 1), (3, 0), (2, 4)])
def test_the_path_is_the_likeliest_of_all(frames, count, durations) -> None:
    seen = set()
    for seed in range(6):
        draw = np.random.default_rng(seed)
        blank, label = (-4 * draw.random((frames, n)) for n in (count + 1, count))
        lasting = (
            None if durations is None else -4 * draw.random((frames, count + 1, len(durations)))
        )
        each_item = every_path(blank, label, lasting, durations)
        result = likeliest_frames(blank, label, lasting, durations or ())
        assert result is not None
        assert each_item[tuple(result)] == max(each_item.values())
        assert all(a <= b for a, b in pairwise(result))
        seen.add(tuple(result))
    assert len(seen) > 1 or frames == 1 or count == 0


def test_there_is_no_path_without_frames() -> None:
    assert likeliest_frames(np.zeros((0, 3)), np.zeros((0, 2))) is None
    assert likeliest_frames(np.zeros((0, 1)), np.zeros((0, 0))) == []


@torch.no_grad()
def test_the_decoders_distributions_are_measured(examples, model, tokenizer) -> None:
    result = decode_all(examples, model, tokenizer, word_confidence=True, extra_tokens=4)
    encoded = model.encode(batch_of(examples, tokenizer))
    for example, rows, item in zip(examples, encoded.unpack(), result, strict=False):
        state = model.start_decoding(pack([rows]), 64)
        expected = []
        for position, token in enumerate([*example.prompt, *item.tokens][:-1]):
            hidden = model.decode_step(torch.tensor([token]), state)
            if position >= len(example.prompt) - 1:
                p = model.logits(hidden)[0, : model.vocab_size].double().softmax(-1)
                expected.append(measure(p.numpy()))
        assert item.confidences == pytest.approx(expected[: len(item.tokens)], rel=1e-4)
        assert len(item.confidences) == len(item.tokens)


@torch.no_grad()
def test_frames_of_ctc_are_measured(examples, model, tokenizer) -> None:
    result = decode_all(examples, model, tokenizer, method="ctc", word_confidence=True)
    encoded = model.encode(batch_of(examples, tokenizer))
    for rows, item in zip(encoded.unpack(), result, strict=False):
        p = model.ctc_logits(rows).double().softmax(-1)
        best = p.argmax(-1).tolist()
        expected, before = [], model.vocab_size
        for frame, symbol in enumerate(best):
            value = measure(p[frame].numpy())
            if symbol != model.vocab_size and symbol == before:
                expected[-1] = min(expected[-1], value)
            elif symbol != model.vocab_size:
                expected.append(value)
            before = symbol
        assert item.confidences == pytest.approx(expected, rel=1e-4)
    assert any(len(item.tokens) > 3 for item in result)


@pytest.mark.parametrize("durations", [None, (0, 1, 2)])
@torch.no_grad()
def test_frames_of_transducers_are_measured(durations) -> None:
    """A text of one label: the likeliest frame of it, by its definition."""
    config = TransducerConfig(
        predictor="stateless", width=8, joint=7, activation="tanh", durations=durations
    )
    head = make_head(config, 4, 1)
    encoded = make_frames(5, 0, 3)

    class Model:
        transducer = head

    result = token_confidences(Model(), "transducer", encoded, [], [[2], [1], []])  # type: ignore[arg-type]
    assert result[1:] == [None, ()]
    rows = encoded.unpack()[0]
    labels = pack([torch.tensor([2])])
    predicted = head.predictor_projection(head.predictor(labels.values, labels.layout))
    logits = head.logits(head.encoder_projection(rows)[:, None], predicted[None])
    logs = logits[..., :5].log_softmax(-1)
    lasting = None if durations is None else logits[..., 5:].log_softmax(-1).numpy()
    arrays = logs[..., 4].numpy(), logs[:, :1, 2].numpy(), lasting, durations
    each_item = every_path(*arrays)
    (frame,) = max(each_item, key=lambda path: each_item[path])
    assert result[0] == pytest.approx([measure(logs[frame, 0].exp().numpy())], rel=1e-5)


@pytest.mark.parametrize("method", ["attention", "ctc", "transducer"])
@pytest.mark.parametrize("beam", [1, 3])
def test_every_search_has_confidences(method, beam, examples, model, tdt_model, tokenizer) -> None:
    used = tdt_model if method == "transducer" else model
    options = {"method": method, "beam": beam}
    plain = decode_all(examples, used, tokenizer, **options)
    result = decode_all(examples, used, tokenizer, **options, word_confidence=True)
    for item, other in zip(plain, result, strict=True):
        assert item.tokens == other.tokens
        assert item.confidences is None
        assert len(other.confidences) == len(other.tokens)
        assert all(0 <= value <= 1 for value in other.confidences)
