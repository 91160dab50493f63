"""`transducer_loss` with durations: the token-and-duration transducer."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import PackedLayout, pack, transducer_loss
from effasr_kernels.testing.conformance import Case, Shared
from effasr_kernels.transducer_loss.duration_lattice import log_likelihood, occupancies
from tests.ops.transducer_cases import CLASSES, JOINT, case_for

Scores = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities of blank (T, U + 1), next label (T, U) and durations (T, U + 1, D)."""


def _scores(
    encoded: Tensor,
    predicted: Tensor,
    labels: Tensor,
    shared: Shared,
    *,
    activation: str = "tanh",
    blank_id: int = 2,
    fastemit: float = 0.0,
    sigma: float = 0.0,
) -> Scores:
    """FastEmit scales the gradient of each label's log-probability, not its value."""
    act = torch.tanh if activation == "tanh" else torch.relu
    logits = act(encoded[:, None] + predicted) @ shared["weight"].T + shared["bias"]
    tokens = logits[..., :CLASSES].log_softmax(-1) - sigma
    label = tokens[:, torch.arange(len(labels)), labels]
    label = label + fastemit * (label - label.detach())
    return tokens[..., blank_id], label, logits[..., CLASSES:].log_softmax(-1)


def _paths(scores: Scores, durations: tuple[int, ...], t: int, u: int) -> Iterator[list[Tensor]]:
    """Every way from a node to the end, as the terms of its log-probability."""
    blank, label, duration = scores
    frames, count = label.shape
    for i, d in enumerate(durations):
        if d > 0 and (t + d, u) == (frames, count):
            yield [blank[t, u], duration[t, u, i]]
        if t + d >= frames:
            continue
        if d > 0:
            for rest in _paths(scores, durations, t + d, u):
                yield [blank[t, u], duration[t, u, i], *rest]
        if u < count:
            for rest in _paths(scores, durations, t + d, u + 1):
                yield [label[t, u], duration[t, u, i], *rest]


def _by_listing_paths(scores: Scores, durations: tuple[int, ...]) -> Tensor:
    paths = [torch.stack(terms).sum() for terms in _paths(scores, durations, 0, 0)]
    return -torch.stack(paths).logsumexp(0) if paths else torch.tensor(torch.inf).double()


def _by_nodes(scores: Scores, durations: tuple[int, ...]) -> Tensor:
    """Equation 7 of the paper node by node, as NeMo's ``TDTLossPytorch`` has it."""
    blank, label, duration = scores
    frames, count = label.shape
    alpha: dict[tuple[int, int], Tensor] = {(0, 0): torch.zeros((), dtype=torch.float64)}

    def came(t: int, u: int, *, with_labels: bool) -> list[Tensor]:
        found = []
        for i, d in enumerate(durations):
            if d > 0 and (t - d, u) in alpha:
                found.append(alpha[t - d, u] + blank[t - d, u] + duration[t - d, u, i])
            if with_labels and (t - d, u - 1) in alpha:
                before = alpha[t - d, u - 1]
                found.append(before + label[t - d, u - 1] + duration[t - d, u - 1, i])
        return found

    for t in range(frames):
        for u in range(count + 1):
            if found := came(t, u, with_labels=True):
                alpha[t, u] = torch.stack(found).logsumexp(0)
    return -torch.stack(came(frames, count, with_labels=False)).logsumexp(0)


def _assert_agrees(
    case: Case, expect: Callable[[Scores], Tensor], settings: dict, weights: Tensor
) -> None:
    """The value and every gradient, each loss with a weight of its own."""
    packed = {name: pack(list(pieces)) for name, pieces in case.packed.items()}
    leaves = [packed["encoded"].values, packed["predicted"].values, *case.shared.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    got = case.run(packed, case.shared)
    assert isinstance(got, Tensor)
    pieces = zip(*(x.unpack() for x in packed.values()), strict=True)
    scores = [_scores(x, g, y, case.shared, **settings) for x, g, y in pieces]
    expected = torch.stack([expect(each) for each in scores])
    torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(case.run(packed, case.shared), expected)
    # The derivative of an infinite loss is zero by definition.
    finite = expected.isfinite()
    gradients = torch.autograd.grad(got, leaves, weights)
    for x, y in zip(
        gradients, torch.autograd.grad(expected[finite], leaves, weights[finite]), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("durations", "settings"),
    [
        ((0, 1, 2), {"activation": "tanh", "blank_id": 2}),
        ((0, 1, 2, 3, 4), {"activation": "relu", "blank_id": 0, "sigma": 0.05}),
        ((0, 1, 2, 9), {"blank_id": 4, "fastemit": 0.3, "sigma": 0.5}),
        ((1,), {}),
        ((0, 2, 3), {}),
        ((1, 3), {}),
    ],
    ids=str,
)
def test_matches_the_sum_over_all_paths(durations: tuple[int, ...], settings: dict) -> None:
    """Some durations fit no path to some lengths."""
    case = case_for((1, 4, 3, 5), durations, **settings)
    # The third has no labels: blanks alone.
    case.packed["targets"][2] = case.packed["targets"][2][:0]  # type: ignore[index]
    case.packed["predicted"][2] = case.packed["predicted"][2][:1]  # type: ignore[index]
    for weights in (torch.ones(4).double(), torch.randn(4).double()):
        expect = lambda scores: _by_listing_paths(scores, durations)
        _assert_agrees(case, expect, settings, weights)


@pytest.mark.parametrize("fastemit", [0.0, 0.2])
def test_matches_the_published_recursion(fastemit: float) -> None:
    """At lengths whose paths nobody could list."""
    durations = 0, 1, 2, 3, 4
    settings: dict = {"sigma": 0.05, "fastemit": fastemit}
    case = case_for((21, 40), durations, **settings)
    expect = lambda scores: _by_nodes(scores, durations)
    _assert_agrees(case, expect, settings, torch.tensor([1.0, -0.5]).double())


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_agrees_with_transformers(sigma: float) -> None:
    """Of its own gradients, in float32, those of the logits pass through the same joint."""
    peer = pytest.importorskip("transformers.loss.loss_tdt")
    durations, frames = (0, 1, 2, 3, 4), (12, 5, 30)
    case = case_for(frames, durations, blank_id=CLASSES - 1, sigma=sigma)
    packed = {name: pack(list(pieces)) for name, pieces in case.packed.items()}
    leaves = [packed["encoded"].values, packed["predicted"].values, *case.shared.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    padded = [
        torch.nn.utils.rnn.pad_sequence(list(x.unpack()), batch_first=True) for x in packed.values()
    ]
    encoded, predicted, targets = padded
    logits = (encoded[:, :, None] + predicted[:, None]).tanh() @ case.shared["weight"].T
    logits = logits + case.shared["bias"]
    expected = peer.tdt_loss(
        logits[..., :CLASSES],
        logits[..., CLASSES:],
        targets,
        torch.tensor(frames),
        torch.tensor(packed["targets"].layout.lengths),
        CLASSES - 1,
        list(durations),
        sigma=sigma,
        reduction="none",
    )
    got = case.run(packed, case.shared)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got.float(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.tensor([0.5, 1.0, 2.0])
    actual = torch.autograd.grad(got, leaves, weights.double())
    for x, y in zip(actual, torch.autograd.grad(expected, leaves, weights), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_paths_pass_every_frame_and_every_label() -> None:
    """At a length where float32 logarithms would be off by a percent."""
    frames, labels, durations = 300, 80, (0, 1, 2, 3, 4)
    log_probs = torch.randn(frames, labels + 1, 30).mul(3).log_softmax(-1)
    log_blank, log_label = log_probs[..., 0], log_probs[:, :-1, 1]
    log_duration = torch.randn(frames, labels + 1, 5).mul(3).log_softmax(-1)
    lattice = log_blank, log_label, log_duration, durations
    total, took_blank, took_label, took_duration = occupancies(*lattice)
    torch.testing.assert_close(took_blank + took_label, took_duration.sum(-1))
    passed = (took_duration * torch.tensor(durations)).sum()
    torch.testing.assert_close(passed, torch.tensor(300.0).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        took_label.sum(0), F.pad(torch.ones(labels), (0, 1)).double(), rtol=0, atol=1e-9
    )
    torch.testing.assert_close(log_likelihood(*lattice), total)


def _one(frames: int, labels: int, durations: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    rows = 4 + len(durations)
    leaves = torch.randn(frames, JOINT), torch.randn(labels + 1, JOINT), torch.randn(rows, JOINT)
    for leaf in leaves:
        leaf.requires_grad_()
    encoded, predicted, weight = leaves
    layouts = PackedLayout.from_lengths([frames]), PackedLayout.from_lengths([labels])
    targets = torch.ones(labels).long()
    loss = transducer_loss(
        *(encoded, predicted, targets, *layouts, weight, torch.randn(rows)),
        blank_id=0,
        durations=durations,
    )
    return loss, leaves


@pytest.mark.parametrize(
    ("frames", "labels", "durations"),
    [(0, 1, (0, 1)), (2, 0, (0, 3)), (4, 1, (0, 3)), (1, 1, (1, 2)), (1, 0, (2,))],
)
def test_what_no_path_fits_costs_infinity(
    frames: int, labels: int, durations: tuple[int, ...]
) -> None:
    loss, leaves = _one(frames, labels, durations)
    assert loss.tolist() == [torch.inf]
    assert all(bool((x == 0).all()) for x in torch.autograd.grad(loss.sum(), leaves))


def test_without_frames_the_empty_transcript_is_certain() -> None:
    loss, _ = _one(0, 0, (0, 1))
    assert loss.tolist() == [0]
