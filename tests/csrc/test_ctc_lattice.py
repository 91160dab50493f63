import ctypes
import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.csrc.native import Implementation, ctc_reference, random_transcript

SHAPES = (
    *((1, 0), (1, 1), (2, 1), (2, 2), (9, 4), (60, 20), (90, 40), (40, 0), (0, 0)),
    *((130, 31), (130, 32), (130, 33), (150, 99), (0, 2), (1, 2), (1, 40), (3, 40), (70, 66)),
)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
def test_matches_the_reference(implementation: Implementation, wide: bool, in_place: bool) -> None:
    """Also transcripts that do not fit, and those without frames or labels."""
    sequences = [random_transcript(*shape) for shape in SHAPES]
    found = implementation.ctc(sequences, wide_targets=wide, in_place=in_place)
    for (scores, normalizer, labels), (total, shares) in zip(sequences, found, strict=True):
        expected, occupancies = ctc_reference(scores - normalizer[:, None], labels)
        torch.testing.assert_close(total, expected.double(), rtol=0, atol=3e-6)
        torch.testing.assert_close(shares.double(), occupancies.double(), rtol=5e-6, atol=1e-9)


def test_normalizers_and_occupancies_are_optional(implementation: Implementation) -> None:
    sequences = [random_transcript(*shape) for shape in SHAPES]
    both = implementation.ctc(sequences)
    alone = implementation.ctc(sequences, only_likelihoods=True)
    assert torch.stack([x[0] for x in alone]).equal(torch.stack([x[0] for x in both]))
    normalized = implementation.ctc(sequences, normalized=True)
    for x, y in zip(normalized, both, strict=True):
        torch.testing.assert_close(x[1], y[1], rtol=1e-5, atol=1e-6)


def test_matches_the_sum_over_all_alignments(implementation: Implementation) -> None:
    """Of a label that repeats, over the classes of each frame."""
    frames, labels = 5, torch.tensor([2, 2, 1])
    log_probs = torch.randn(frames, 3).log_softmax(-1)
    masses = [
        sum(float(log_probs[t, c]) for t, c in enumerate(path))
        for path in itertools.product(range(3), repeat=frames)
        if [c for c, _ in itertools.groupby(path) if c] == labels.tolist()
    ]
    expected = torch.tensor(masses, dtype=torch.float64).logsumexp(0)
    scores = log_probs[:, [0, *labels.tolist()]]
    ((total, _),) = implementation.ctc([(scores, torch.zeros(frames), labels)])
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-6)


def test_matches_torch(implementation: Implementation) -> None:
    """Whose gradient by normalised log-probabilities is softmax minus occupancy."""
    frames, labels, classes = 120, torch.randint(1, 9, (30,)), 9
    log_probs = torch.randn(frames, classes).log_softmax(-1)
    z = log_probs.double().requires_grad_()
    loss = F.ctc_loss(
        z[:, None],
        labels[None],
        torch.tensor([frames]),
        torch.tensor([len(labels)]),
        reduction="sum",
    )
    (gradient,) = torch.autograd.grad(loss, z)
    scores = log_probs[:, [0, *labels.tolist()]]
    ((total, occupancies),) = implementation.ctc([(scores, torch.zeros(frames), labels)])
    torch.testing.assert_close(total, -loss.detach(), rtol=0, atol=3e-6)
    found = torch.zeros(frames, classes, dtype=torch.float64)
    columns = torch.tensor([0, *labels.tolist()])
    found.index_add_(1, columns, occupancies.double())
    torch.testing.assert_close(found, log_probs.double().exp() - gradient, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_is_exact_on_long_sequences(library: ctypes.CDLL) -> None:
    sequence = random_transcript(2000, 300, classes=500)
    scores, normalizer, labels = sequence
    total, expected = ctc_reference(scores.double() - normalizer.double()[:, None], labels)
    ((found, occupancies),) = Implementation(library).ctc([sequence])
    assert abs(float(found - total)) < 3e-5
    assert float((occupancies - expected).abs().max()) < 4e-6
    counted = expected > 1e-4
    error = (occupancies - expected).abs()[counted] / expected[counted]
    assert float(error.max()) < 8e-6


def test_occupancies_of_each_frame_sum_to_one(implementation: Implementation) -> None:
    ((_, occupancies),) = implementation.ctc([random_transcript(90, 30)])
    sums = occupancies.double().sum(1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=3e-6)


def test_nan_stays_in_its_sequence(implementation: Implementation) -> None:
    sequences = [random_transcript(20, 6, classes=90) for _ in range(3)]
    sequences[1][0][7] = torch.nan
    alone = implementation.ctc(sequences[::2])
    found = implementation.ctc(sequences)
    assert found[1][0].isnan()
    for x, y in zip(found[::2], alone, strict=True):
        assert x[0] == y[0]
        assert torch.equal(x[1], y[1])


def test_gives_the_same_bits_in_any_order(library: ctypes.CDLL) -> None:
    """On any number of threads."""
    sequences = [random_transcript(*shape) for shape in SHAPES]
    results = []
    for i in range(4):
        found = Implementation(library, 1 + i).ctc(sequences)
        results.append(torch.cat([x.flatten().double() for result in found for x in result]))
    assert all(torch.equal(results[0], other) for other in results[1:])
