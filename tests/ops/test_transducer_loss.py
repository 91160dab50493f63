import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, pack, transducer_loss
from effasr_kernels.testing.conformance import Case, Shared, check_compiler
from effasr_kernels.transducer_loss.lattice import log_likelihood, occupancies
from tests.ops.transducer_cases import CLASSES, JOINT, case_for


@pytest.mark.parametrize(
    ("durations", "settings"),
    [
        (None, {"activation": "tanh"}),
        (None, {"activation": "relu"}),
        (None, {"activation": "relu", "fastemit": 0.1}),
        ((0, 1, 2, 3, 4), {"activation": "relu", "sigma": 0.05}),
        ((1, 3), {"fastemit": 0.1}),
    ],
    ids=str,
)
def test_keeps_the_contract(
    check: Callable[[Case], None],
    lengths: tuple[int, ...],
    durations: tuple[int, ...] | None,
    settings: dict,
) -> None:
    check(case_for(lengths, durations, **settings))


def test_compiles() -> None:
    check_compiler(case_for((5, 0, 2)))
    check_compiler(case_for((5, 0, 2), (0, 1, 2), sigma=0.05))


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


def test_losses_of_narrow_inputs_are_float32() -> None:
    layout = PackedLayout.from_lengths([2])
    narrow = lambda *shape: torch.randn(*shape).bfloat16()
    loss = transducer_loss(
        narrow(2, JOINT),
        narrow(3, JOINT),
        torch.tensor([1, 2]),
        layout,
        layout,
        narrow(CLASSES, JOINT),
        narrow(CLASSES),
        blank_id=0,
    )
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoded": torch.zeros(5, 3)}, "`encoded` must have 4 rows, as `layout_frames` does"),
        (
            {"predicted": torch.zeros(3, 3)},
            r"`predicted` must have shape \(U \+ N, J\) = \(5, 3\), but is \(3, 3\)",
        ),
        ({"weight": torch.zeros(6, 2)}, r"`weight` must have shape \(V, J\) = \(any, 3\)"),
        ({"bias": torch.zeros(5)}, r"`bias` must have shape \(V,\) = \(6,\), but is \(5,\)"),
        ({"bias": torch.zeros(6).double()}, "`bias` must be torch.float32, as `encoded` is"),
        ({"targets": torch.tensor([1, 2, 0])}, "other than the blank 0, but is 0"),
        ({"targets": torch.tensor([1, 2, -1])}, r"`targets` must hold classes in \[0, 6\)"),
        ({"activation": "gelu"}, '`activation` must be "relu" or "tanh", but is \'gelu\''),
        ({"fastemit": -0.1}, "`fastemit` must be at least 0, but is -0.1"),
        ({"blank_id": -1}, r"`blank_id` must be in \[0, 6\), but is -1"),
        (
            {"durations": (0, 1), "weight": torch.zeros(6, 2)},
            r"`weight` must have shape \(V \+ D, J\) = \(any, 3\)",
        ),
        (
            {"durations": (0, 1), "bias": torch.zeros(5)},
            r"`bias` must have shape \(V \+ D,\) = \(6,\), but is \(5,\)",
        ),
        (
            {"durations": (0, 1), "targets": torch.tensor([1, 2, 4])},
            r"`targets` must hold classes in \[0, 4\)",
        ),
        ({"durations": (0, 1), "blank_id": 4}, r"`blank_id` must be in \[0, 4\), but is 4"),
        ({"durations": (0, 1, 2, 3, 4, 5)}, "`weight` must have more rows than .* durations"),
        ({"durations": ()}, r"`durations` must increase, .*, but is \(\)"),
        ({"durations": (0,)}, r"`durations` must increase, from 0 or more to 1 or more"),
        ({"durations": (1, 0)}, r"`durations` must increase, .*, but is \(1, 0\)"),
        ({"durations": (1, 1)}, r"`durations` must increase"),
        ({"durations": (-1, 1)}, r"`durations` must increase"),
        ({"durations": (0, 1), "sigma": -0.1}, "`sigma` must be at least 0, but is -0.1"),
        ({"durations": None, "sigma": 0.1}, "`sigma` must be 0 without `durations`, but is 0.1"),
    ],
)
def test_says_what_is_wrong(arguments: dict, message: str) -> None:
    given = {
        "encoded": torch.zeros(4, 3),
        "predicted": torch.zeros(5, 3),
        "targets": torch.ones(3).long(),
        "layout_frames": PackedLayout.from_lengths([1, 3]),
        "layout_targets": PackedLayout.from_lengths([1, 2]),
        "weight": torch.zeros(6, 3),
        "bias": torch.zeros(6),
        "blank_id": 0,
    }
    with pytest.raises(ValueError, match="^transducer_loss: .*" + message):
        transducer_loss(**(given | arguments))
