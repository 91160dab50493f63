import itertools

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, pack, transducer_loss
from effasr_kernels.testing.conformance import Shared
from effasr_kernels.transducer_loss.lattice import log_likelihood, occupancies
from tests.ops.transducer_cases import CLASSES, JOINT, case_for


def _sum_over_paths(
    encoded: Tensor,
    predicted: Tensor,
    labels: Tensor,
    shared: Shared,
    *,
    activation: str = "tanh",
    blank_id: int,
    fastemit: float = 0.0,
) -> Tensor:
    """The loss of one sequence by listing every path: which steps but the last emit labels.

    FastEmit scales the gradient of each label's log-probability, not its value.
    """
    act = torch.tanh if activation == "tanh" else torch.relu
    logits = act(encoded[:, None] + predicted) @ shared["weight"].T + shared["bias"]
    log_probs = logits.log_softmax(-1)
    frames, count = encoded.shape[0], labels.shape[0]
    paths = []
    for emitting in itertools.combinations(range(frames - 1 + count), count):
        t, u, total = 0, 0, torch.zeros((), dtype=torch.float64)
        for step in range(frames + count):
            if step in emitting:
                label = log_probs[t, u, labels[u]]
                total = total + label + fastemit * (label - label.detach())
                u += 1
            else:
                total = total + log_probs[t, u, blank_id]
                t += 1
        paths.append(total)
    return -torch.stack(paths).logsumexp(0)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "tanh", "blank_id": 2},
        {"activation": "relu", "blank_id": 0},
        {"activation": "tanh", "blank_id": 4, "fastemit": 0.3},
    ],
    ids=str,
)
def test_matches_the_sum_over_all_paths(settings: dict) -> None:
    """The value and every gradient, each loss with a weight of its own."""
    case = case_for((1, 4, 3, 5), **settings)
    # The third has no labels: one path, all blanks.
    case.packed["targets"][2] = case.packed["targets"][2][:0]  # type: ignore[index]
    case.packed["predicted"][2] = case.packed["predicted"][2][:1]  # type: ignore[index]
    packed = {name: pack(list(pieces)) for name, pieces in case.packed.items()}
    leaves = [packed["encoded"].values, packed["predicted"].values, *case.shared.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    got = case.run(packed, case.shared)
    assert isinstance(got, Tensor)
    pieces = zip(*(x.unpack() for x in packed.values()), strict=True)
    expected = torch.stack([_sum_over_paths(*each, case.shared, **settings) for each in pieces])
    torch.testing.assert_close(got, expected)
    for weights in (torch.ones(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)):
        for x, y in zip(
            torch.autograd.grad(got, leaves, weights, retain_graph=True),
            torch.autograd.grad(expected, leaves, weights, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(x, y)


def test_fastemit_leaves_the_value() -> None:
    case, fast = case_for((4, 2)), case_for((4, 2), fastemit=0.5)
    packed = {name: pack(list(pieces)) for name, pieces in case.packed.items()}
    assert torch.equal(
        torch.as_tensor(case.run(packed, case.shared)),
        torch.as_tensor(fast.run(packed, case.shared)),
    )


def test_without_frames_only_the_empty_transcript_is_possible() -> None:
    encoded = torch.randn(0, JOINT, requires_grad=True)
    predicted = torch.randn(3, JOINT, requires_grad=True)
    targets = pack([torch.zeros(0).long(), torch.tensor([1])])
    layout = PackedLayout.from_lengths([0, 0])
    weight, bias = torch.randn(CLASSES, JOINT, requires_grad=True), torch.randn(CLASSES)
    loss = transducer_loss(
        encoded, predicted, targets.values, layout, targets.layout, weight, bias, blank_id=0
    )
    assert loss.tolist() == [0, torch.inf]
    loss.sum().backward()
    for leaf in (predicted, weight):
        assert leaf.grad is not None
        assert bool((leaf.grad == 0).all())


def test_an_impossible_label_costs_infinity_and_has_no_gradient() -> None:
    bias = torch.zeros(CLASSES)
    bias[3] = -torch.inf
    encoded = torch.randn(4, JOINT, requires_grad=True)
    layout = PackedLayout.from_lengths([2, 2])
    labels = PackedLayout.from_lengths([1, 1])
    loss = transducer_loss(
        encoded,
        torch.randn(4, JOINT),
        torch.tensor([3, 1]),
        layout,
        labels,
        torch.randn(CLASSES, JOINT),
        bias,
        blank_id=0,
    )
    assert loss[0] == torch.inf
    assert bool(loss[1].isfinite())
    loss.sum().backward()
    assert encoded.grad is not None
    assert bool((encoded.grad[:2] == 0).all())
    assert bool((encoded.grad[2:] != 0).any())


def test_every_path_crosses_each_diagonal_once() -> None:
    """At a length where float32 logarithms would be off by a percent."""
    frames, labels = 400, 80
    log_probs = torch.randn(frames, labels + 1, 30).mul(3).log_softmax(-1)
    log_blank, log_label = log_probs[..., 0], log_probs[:, :-1, 1]
    total, took_blank, took_label = occupancies(log_blank, log_label)
    occupied = took_blank + took_label
    diagonal = torch.arange(frames)[:, None] + torch.arange(labels + 1)
    sums = torch.zeros(frames + labels, dtype=torch.float64)
    sums.index_add_(0, diagonal.flatten(), occupied.flatten())
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-9)
    torch.testing.assert_close(log_likelihood(log_blank, log_label), total)
