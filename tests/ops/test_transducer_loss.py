"""The definition of `transducer_loss`, without and with durations, against sums over all paths."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import pack, transducer_loss
from effasr_kernels.transducer_loss import OPERATION, TransducerArguments, lattice
from tests.support import operation_cases
from tests.support.conformance import Case
from tests.support.loss_calls import (
    LEAVES,
    check_infinite_loss,
    ctc_arguments,
    gradients,
    transducer_arguments,
)

CLASSES = 5
SIZES = {"classes": CLASSES, "width": 3}
Durations = tuple[int, ...] | None
Scores = tuple[Tensor, Tensor, Tensor | None]
"""Log-probabilities of blank (T, U + 1), next label (T, U) and durations (T, U + 1, D)."""


def _scores(
    case: Case,
    n: int,
    *,
    activation: str = "relu",
    blank_id: int = 2,
    fastemit: float = 0.0,
    sigma: float = 0.0,
    **_: Any,
) -> Scores:
    """FastEmit scales the gradient of each label's log-probability, not its value."""
    encoded, predicted, labels = (case.packed[x][n] for x in ("encoded", "predicted", "targets"))
    act = torch.tanh if activation == "tanh" else torch.relu
    logits = act(encoded[:, None] + predicted) @ case.shared["weight"].T + case.shared["bias"]
    tokens = logits[..., :CLASSES].log_softmax(-1) - sigma
    label = tokens[:, torch.arange(len(labels)), labels]
    label = label + fastemit * (label - label.detach())
    lasts = logits[..., CLASSES:].log_softmax(-1) if logits.shape[-1] > CLASSES else None
    return tokens[..., blank_id], label, lasts


def _paths(
    scores: Scores, durations: Durations, t: int = 0, u: int = 0
) -> Iterator[tuple[Tensor, ...]]:
    """Every way from a node to the end, as the terms of its log-probability."""
    blank, label, lasts = scores
    frames, count = label.shape
    # Without durations a blank takes a frame, and a label none.
    for i, d in enumerate(durations or (0, 1)):
        last = () if lasts is None else (lasts[t, u, i],)
        if d > 0 and (t + d, u) == (frames, count):
            yield blank[t, u], *last
        if t + d >= frames:
            continue
        if d > 0:
            for path in _paths(scores, durations, t + d, u):
                yield blank[t, u], *last, *path
        if u < count and (durations or d == 0):
            for path in _paths(scores, durations, t + d, u + 1):
                yield label[t, u], *last, *path


def _by_listing_paths(scores: Scores, durations: Durations) -> Tensor:
    paths = [torch.stack(terms).sum() for terms in _paths(scores, durations)]
    return -torch.stack(paths).logsumexp(0) if paths else torch.tensor(torch.inf).double()


def _leaves(case: Case) -> list[Tensor]:
    pieces = [*case.packed["encoded"], *case.packed["predicted"], *case.shared.values()]
    return [x.requires_grad_() for x in pieces]


def _losses(case: Case) -> Tensor:
    result = case.run({name: pack(list(x)) for name, x in case.packed.items()}, case.shared)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "tanh", "blank_id": 2},
        {"blank_id": 0},
        {"activation": "tanh", "blank_id": 4, "fastemit": 0.3},
        {"durations": (0, 1, 2), "activation": "tanh"},
        {"durations": (0, 1, 2, 3, 4), "blank_id": 0, "sigma": 0.05},
        {"durations": (0, 1, 2, 9), "blank_id": 4, "fastemit": 0.3, "sigma": 0.5},
        *({"durations": durations} for durations in ((1,), (0, 2, 3), (1, 3))),
    ],
    ids=str,
)
def test_matches_the_sum_over_all_paths(settings: dict[str, Any]) -> None:
    """Some durations fit no path to some lengths; the third has no labels, but blanks alone."""
    frames, transcripts = (1, 4, 3, 5), (1, 2, 0, 2)
    case = operation_cases.transducer_loss(frames, transcripts, **SIZES, **settings)(None)
    leaves, losses = _leaves(case), _losses(case)
    expected = torch.stack(
        [
            _by_listing_paths(_scores(case, n, **settings), settings.get("durations"))
            for n in range(len(frames))
        ]
    )
    torch.testing.assert_close(losses, expected)
    with torch.no_grad():
        torch.testing.assert_close(_losses(case), expected)
    # The derivative of an infinite loss is zero by definition.
    finite = expected.isfinite()
    for weights in (torch.ones(len(frames)).double(), torch.randn(len(frames)).double()):
        options = {"retain_graph": True, "materialize_grads": True}
        torch.testing.assert_close(
            torch.autograd.grad(losses, leaves, weights, **options),
            torch.autograd.grad(expected[finite], leaves, weights[finite], **options),
        )


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_agrees_with_transformers(sigma: float) -> None:
    """In float32, its gradients of the logits pass through the same joint."""
    peer = pytest.importorskip("transformers.loss.loss_tdt")
    durations, frames, labels = (0, 1, 2, 3, 4), (12, 5, 30), (4, 2, 10)
    settings = {"durations": durations, "sigma": sigma, "blank_id": CLASSES - 1}
    case = operation_cases.transducer_loss(frames, labels, **SIZES, **settings)(None)
    leaves = _leaves(case)
    encoded, predicted, targets = (
        torch.nn.utils.rnn.pad_sequence(list(x), batch_first=True) for x in case.packed.values()
    )
    logits = (encoded[:, :, None] + predicted[:, None]).relu() @ case.shared["weight"].T
    logits = logits + case.shared["bias"]
    expected = peer.tdt_loss(
        *(logits[..., :CLASSES], logits[..., CLASSES:], targets),
        *(torch.tensor(frames), torch.tensor(labels), CLASSES - 1, list(durations)),
        sigma=sigma,
        reduction="none",
    )
    losses = _losses(case)
    torch.testing.assert_close(losses.float(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.tensor([0.5, 1.0, 2.0])
    torch.testing.assert_close(
        torch.autograd.grad(losses, leaves, weights.double()),
        torch.autograd.grad(expected, leaves, weights),
        rtol=1e-4,
        atol=1e-4,
    )


def test_fastemit_leaves_the_value() -> None:
    arguments = transducer_arguments((4, 2), (2, 1))
    plain = gradients(arguments, torch.ones(2), "reference")["loss"]
    fast = gradients(arguments | {"fastemit": 0.5}, torch.ones(2), "reference")["loss"]
    assert torch.equal(plain, fast)


@pytest.mark.parametrize(
    ("frames", "labels", "durations", "expected"),
    [
        ((0, 0), (0, 1), None, [0, torch.inf]),
        ((0,), (0,), (0, 1), [0]),
        *(
            ((frames,), (labels,), durations, [torch.inf])
            for frames, labels, durations in (
                *((0, 1, (0, 1)), (2, 0, (0, 3)), (4, 1, (0, 3)), (1, 1, (1, 2)), (1, 0, (2,))),
            )
        ),
    ],
)
def test_what_no_path_fits_costs_infinity(
    frames: tuple[int, ...], labels: tuple[int, ...], durations: Durations, expected: list[float]
) -> None:
    """And has no gradient; without frames the empty transcript is certain."""
    arguments = transducer_arguments(frames, labels, durations=durations)
    results = gradients(arguments, torch.ones(len(frames)), "reference")
    assert results.pop("loss").tolist() == expected
    assert not any(x.any() for x in results.values())


@pytest.mark.parametrize("make", [transducer_arguments, ctc_arguments])
def test_an_impossible_label_costs_infinity_and_has_no_gradient(make: Any) -> None:
    check_infinite_loss(make, backend="reference")


def test_every_path_crosses_each_diagonal_once() -> None:
    """At a length where float32 logarithms would be off by a percent."""
    frames, labels = 400, 80
    log_probs = torch.randn(frames, labels + 1, 30).mul(3).log_softmax(-1)
    scores = log_probs[..., 0], log_probs[:, :-1, 1]
    total, took_blank, took_label = lattice.occupancies(*scores)
    diagonal = torch.arange(frames)[:, None] + torch.arange(labels + 1)
    sums = torch.zeros(frames + labels, dtype=torch.float64)
    sums.index_add_(0, diagonal.flatten(), (took_blank + took_label).flatten())
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-9)
    torch.testing.assert_close(lattice.log_likelihood(*scores), total)


def test_paths_with_durations_pass_every_frame_and_every_label() -> None:
    frames, labels, durations = 300, 80, (0, 1, 2, 3, 4)
    log_probs = torch.randn(frames, labels + 1, 30).mul(3).log_softmax(-1)
    log_duration = torch.randn(frames, labels + 1, 5).mul(3).log_softmax(-1)
    scores = log_probs[..., 0], log_probs[:, :-1, 1], log_duration, durations
    total, took_blank, took_label, took_duration = lattice.occupancies(*scores)
    torch.testing.assert_close(took_blank + took_label, took_duration.sum(-1))
    passed = (took_duration * torch.tensor(durations)).sum()
    torch.testing.assert_close(passed, torch.tensor(300.0).double(), rtol=0, atol=1e-9)
    expected = F.pad(torch.ones(labels), (0, 1)).double()
    torch.testing.assert_close(took_label.sum(0), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(lattice.log_likelihood(*scores), total)


FRAMES, LABELS, SPARE = (4, 0, 3, 5), (2, 1, 0, 3), 2
# Without frames, but with a label: a loss of +inf, which has no gradient.
UPSTREAM = torch.tensor([1.0, 2.0, -0.5, 0.25], dtype=torch.float64)


def _arguments(dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return transducer_arguments(FRAMES, LABELS, dtype=dtype, width=3, spare=SPARE, **options)


def _made_leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What becomes encoded, predicted, weight and bias, the first two with a tail."""
    arguments = _arguments(dtype)
    return [arguments[name].requires_grad_() for name in LEAVES]


def _loss(*leaves: Tensor, **options: Any) -> Tensor:
    return transducer_loss(**(_arguments() | dict(zip(LEAVES, leaves, strict=True))), **options)


def _made(leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Encoded and predicted as an operation makes them."""
    return leaves[0] * 2, leaves[1] * 0.5


def _counted(call: Callable[[], Any]) -> Any:
    with FlopCounterMode(display=False) as counter:
        found = call()
    assert counter.get_total_flops() > 0
    return found


@pytest.mark.parametrize("durations", [None, (0, 1, 3)], ids=["rnnt", "tdt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "dispatcher"])
def test_gives_the_same_gradients_where_the_inputs_were(
    dtype: torch.dtype, watched: bool, durations: tuple[int, ...] | None
) -> None:
    arguments = _arguments(dtype, durations=durations)
    expected = gradients(arguments, UPSTREAM, "reference")
    call = lambda: gradients(arguments, UPSTREAM, "reference", overwrite_inputs=True)
    found = _counted(call) if watched else call()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name])
    for name in LEAVES[:2]:
        assert bool((found[name][-SPARE:] == 0).all())
    made = _made(_made_leaves())
    loss = _loss(*made, *_made_leaves()[2:], overwrite_inputs=True)
    for gradient, x in zip(torch.autograd.grad(loss, made, UPSTREAM), made, strict=True):
        assert gradient.data_ptr() == x.data_ptr()


def test_only_what_requires_a_gradient_is_overwritten() -> None:
    leaves = _made_leaves()
    encoded, predicted = leaves[0].detach(), leaves[1] * 1
    before = encoded.clone()
    _loss(encoded, predicted, *leaves[2:], overwrite_inputs=True).sum().backward()
    assert torch.equal(encoded, before)
    assert leaves[1].grad is not None
    with torch.no_grad():
        _loss(*leaves, overwrite_inputs=True)


@pytest.mark.parametrize("watched", [False, True], ids=["eager", "dispatcher"])
def test_a_second_backward_is_refused(watched: bool) -> None:
    leaves = _made_leaves()

    def call() -> tuple[Tensor, ...]:
        loss = _loss(*_made(leaves), *leaves[2:], overwrite_inputs=True).nan_to_num(posinf=0).sum()
        loss.backward(retain_graph=True)
        message = "no second backward .* replaced `encoded` and `predicted`"
        with pytest.raises(RuntimeError, match=message):
            loss.backward()
        return ()

    _counted(call) if watched else call()


def test_autograd_reports_that_somebody_else_needs_the_values() -> None:
    leaves = _made_leaves()
    encoded, predicted = _made(leaves)
    # Its backward comes after that of the loss, which was made later.
    squares = encoded.square().sum()
    loss = _loss(encoded, predicted, *leaves[2:], overwrite_inputs=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (squares + loss.sum()).backward()
    # As is that the layer before keeps its output.
    loss = _loss(leaves[0].exp(), leaves[1] * 1, *leaves[2:], overwrite_inputs=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    # And that the input changed between forward and backward.
    encoded, predicted = _made(leaves)
    loss = _loss(encoded, predicted, *leaves[2:], overwrite_inputs=True)
    with torch.no_grad():
        encoded.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_refuses_memory_that_is_not_its_own() -> None:
    leaves = _made_leaves()
    encoded, predicted = _made(leaves)
    both = torch.cat([encoded, predicted])
    wide = torch.stack([encoded, encoded], -1)
    first, second = both.split([len(encoded), len(predicted)])
    for pair, message in (
        ((leaves[0], predicted), "`encoded` must be what an operation made, not a leaf"),
        ((leaves[0].view_as(encoded), predicted), "`encoded` .* is a leaf or a view of one"),
        ((encoded, leaves[1]), "`predicted` must be what an operation made"),
        ((wide[..., 0], predicted), r"`encoded` must be contiguous .* with strides \(6, 2\)"),
        ((encoded, predicted[:1].expand(predicted.shape)), "`predicted` must be contiguous"),
        ((first, both[1 : 1 + len(predicted)]), "`encoded` must have memory of its own"),
    ):
        with pytest.raises(ValueError, match="^transducer_loss: " + message):
            _loss(*pair, *leaves[2:], overwrite_inputs=True)
    # Side by side is fine.
    _loss(first, second, *leaves[2:], overwrite_inputs=True).sum().backward()


def test_the_schema_says_what_is_written() -> None:
    """`torch.library` compares the arguments before and after with what the schema declares."""
    for overwritten in ((), ("predicted",), ("encoded", "predicted")):
        flat = OPERATION.flatten(TransducerArguments(**_arguments(), overwritten=overwritten))
        wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in flat]
        over = torch.ops.effasr.transducer_loss_backward_over
        copies = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        assert len(over([UPSTREAM], [], wanted, *copies)) == 4 - len(overwritten)
        checks = "test_schema", "test_faketensor"
        torch.library.opcheck(over.default, ([UPSTREAM], [], wanted, *flat), test_utils=checks)


def test_compiled_code_refuses_it() -> None:
    torch._dynamo.reset()
    arguments = _arguments()
    call = lambda: transducer_loss(**arguments, overwrite_inputs=True)
    with pytest.raises(Exception, match="`overwrite_inputs` must be False in compiled code"):
        torch.compile(call, fullgraph=True, backend="eager")()


def test_under_autocast_the_narrow_copies_are_overwritten() -> None:
    leaves = _made_leaves(torch.float32)
    before = [leaf.detach().clone() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(*leaves, overwrite_inputs=True)
        expected = _loss(*leaves)
    found = torch.autograd.grad(loss, leaves, UPSTREAM.to(loss))
    for x, y in zip(found, torch.autograd.grad(expected, leaves, UPSTREAM.to(loss)), strict=True):
        torch.testing.assert_close(x, y)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))
