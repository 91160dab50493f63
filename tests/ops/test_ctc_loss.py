import itertools

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import PackedLayout, ctc_loss, pack
from tests.support.operation_cases import labels_for

WIDTH = 3


def _collapsed(alignment: tuple[int, ...], blank_id: int) -> list[int]:
    return [label for label, _ in itertools.groupby(alignment) if label != blank_id]


@pytest.mark.parametrize("blank_id", [0, 1, 2])
@pytest.mark.parametrize("frames", [0, 1, 4])
def test_matches_the_sum_over_all_alignments(frames: int, blank_id: int) -> None:
    """Also of empty transcripts, of repeated labels, and of more labels than fit."""
    hidden = torch.randn(frames, WIDTH, dtype=torch.float64)
    weight = torch.randn(3, WIDTH, dtype=torch.float64)
    log_probs = F.linear(hidden, weight).log_softmax(-1)
    a, b = (label for label in range(3) if label != blank_id)
    transcripts = [[], [a], [b, b], [a, b], [a, a, b], [a, b, a, b], [b, b, b], [a, a, b, b, a]]
    layout_frames = PackedLayout.from_lengths([frames] * len(transcripts))
    targets = pack([torch.tensor(t, dtype=torch.int64) for t in transcripts])
    got = ctc_loss(
        hidden.repeat(len(transcripts), 1),
        weight,
        targets.values,
        layout_frames,
        targets.layout,
        blank_id=blank_id,
    )
    for loss, transcript in zip(got, transcripts, strict=True):
        likelihood = sum(
            log_probs[range(frames), alignment].sum().exp()
            for alignment in itertools.product(range(3), repeat=frames)
            if _collapsed(alignment, blank_id) == transcript
        )
        expected = -torch.as_tensor(likelihood, dtype=torch.float64).log()
        torch.testing.assert_close(loss, expected)


def test_matches_torch_on_a_padded_batch() -> None:
    frames, labels, classes = (30, 21, 40), (8, 0, 15), 12
    hidden = pack([torch.randn(n, WIDTH, dtype=torch.float64) for n in frames])
    targets = [labels_for(n, classes, 0) for n in labels]
    weight = torch.randn(classes, WIDTH, dtype=torch.float64, requires_grad=True)
    hidden.values.requires_grad_()
    packed = pack(targets)
    got = ctc_loss(hidden.values, weight, packed.values, hidden.layout, packed.layout, blank_id=0)
    padded = torch.nn.utils.rnn.pad_sequence(hidden.unpack())
    expected = F.ctc_loss(
        F.linear(padded, weight).log_softmax(-1),
        torch.nn.utils.rnn.pad_sequence(targets, batch_first=True),
        torch.tensor(frames),
        torch.tensor(labels),
        reduction="none",
    )
    torch.testing.assert_close(got, expected)
    leaves = hidden.values, weight
    for x, y in zip(
        torch.autograd.grad(got.sum(), leaves),
        torch.autograd.grad(expected.sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


def test_an_infeasible_pair_is_infinite_and_has_no_gradient() -> None:
    """Two equal labels need a blank between them: three frames."""
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    weight = torch.randn(3, WIDTH)
    layout = PackedLayout.from_lengths([2, 2])
    loss = ctc_loss(hidden, weight, torch.tensor([1, 1, 1, 2]), layout, layout, blank_id=0)
    assert loss[0] == torch.inf
    assert bool(loss[1].isfinite())
    loss.sum().backward()
    assert hidden.grad is not None
    assert bool((hidden.grad[:2] == 0).all())
    assert bool((hidden.grad[2:] != 0).all())
