import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import PackedLayout, ctc_loss, pack
from effasr_kernels.testing.conformance import Case, Packed, Shared, check_compiler

WIDTH = 3


def _labels(length: int, classes: int, blank_id: int) -> Tensor:
    labels = torch.randint(classes - 1, (length,))
    return labels + (labels >= blank_id)


def _case(lengths: tuple[int, ...], *, blank_id: int = 4, classes: int = 5) -> Case:
    """A transcript of a third of each length; that of the last sequence is infeasible if it can."""
    labels = [_labels((n + 2) // 3, classes, blank_id) for n in lengths]
    labels[-1] = _labels(lengths[-1] + 1, classes, blank_id) if lengths[-1] else labels[-1]

    def run(packed: Packed, shared: Shared) -> Tensor:
        hidden, targets = packed["hidden"], packed["targets"]
        return ctc_loss(
            hidden.values,
            shared["weight"],
            targets.values,
            hidden.layout,
            targets.layout,
            bias=shared["bias"],
            blank_id=blank_id,
        )

    return Case(
        run,
        {
            "hidden": [torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths],
            "targets": labels,
        },
        {
            "weight": torch.randn(classes, WIDTH, dtype=torch.float64),
            "bias": torch.randn(classes, dtype=torch.float64),
        },
    )


def _call(case: Case) -> Tensor:
    result = case.run({name: pack(list(x)) for name, x in case.packed.items()}, case.shared)
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("blank_id", [0, 4])
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], blank_id: int
) -> None:
    check(_case(lengths, blank_id=blank_id))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2)))


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
    targets = [_labels(n, classes, 0) for n in labels]
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


def test_nothing_at_all_costs_nothing() -> None:
    layout = PackedLayout.from_lengths([0, 0])
    empty, labels = torch.zeros(0, WIDTH), torch.zeros(0).long()
    loss = ctc_loss(empty, torch.randn(3, WIDTH), labels, layout, layout, blank_id=0)
    assert loss.tolist() == [0, 0]


def test_losses_of_narrow_inputs_are_float32() -> None:
    layout = PackedLayout.from_lengths([3])
    hidden, weight = torch.randn(3, WIDTH).half(), torch.randn(3, WIDTH).half()
    loss = ctc_loss(hidden, weight, torch.ones(3).int(), layout, layout, blank_id=0)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": torch.zeros(5, 3)}, "`hidden` must have 4 rows, as `layout_frames` does"),
        ({"weight": torch.zeros(6, 2)}, r"`weight` must have shape \(V, C\) = \(any, 3\)"),
        ({"bias": torch.zeros(2)}, r"`bias` must have shape \(V,\) = \(6,\)"),
        ({"bias": torch.zeros(6).half()}, "`bias` must be torch.float32, as `hidden` is"),
        ({"targets": torch.ones(3).long()}, r"`targets` must have shape \(U,\) = \(2,\)"),
        (
            {
                "targets": torch.ones(2, device="meta").long(),
                "layout_targets": PackedLayout.from_lengths([1, 1], "meta"),
            },
            "`targets` must be on cpu, as `layout_frames` is, but is meta",
        ),
        ({"targets": torch.ones(2)}, "`targets` must be int32 or int64, but is torch.float32"),
        ({"targets": torch.tensor([1, 6])}, r"`targets` must hold classes in \[0, 6\).* is 6"),
        ({"targets": torch.tensor([0, 1])}, "other than the blank 0, but is 0"),
        ({"blank_id": 6}, r"`blank_id` must be in \[0, 6\), but is 6"),
        (
            {"layout_targets": PackedLayout.from_lengths([2])},
            "`layout_targets` must have 2 sequences, as `layout_frames` does, but is 1",
        ),
    ],
)
def test_says_what_is_wrong(arguments: dict, message: str) -> None:
    given = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(6, 3),
        "targets": torch.ones(2).long(),
        "layout_frames": PackedLayout.from_lengths([1, 3]),
        "layout_targets": PackedLayout.from_lengths([1, 1]),
        "blank_id": 0,
    }
    with pytest.raises(ValueError, match="^ctc_loss: .*" + message):
        ctc_loss(**(given | arguments))
