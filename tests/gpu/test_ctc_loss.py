"""`ctc_loss` in Triton against its definition."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from effasr_kernels import BackendUnavailable, ctc_loss
from effasr_kernels.ctc_loss import CtcArguments, _triton
from effasr_kernels.shared import projection
from tests.support.loss_calls import WIDTH, Arguments, assert_agrees, ctc_arguments, gradients

# NumPy says so where Triton's interpreter finds the maximum of a row of NaN.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")


def _arguments(
    frames: Sequence[int], transcripts: Any, device: torch.device, classes: int = 6, **options: Any
) -> Arguments:
    return ctc_arguments(frames, transcripts, device, classes=classes, bias=None, **options)


def test_empty_sequences_and_empty_transcripts(device: torch.device) -> None:
    actual = assert_agrees(_arguments((0, 0, 3, 2, 1), ([], [1, 0], [], [3], []), device))
    assert actual["loss"][:2].tolist() == [0, torch.inf]


@pytest.mark.parametrize("transcript", [[1, 1], [1, 3, 1], [1, 1, 1], [5, 5, 0, 0, 5]])
def test_a_transcript_is_possible_from_as_many_frames_as_by_definition(
    transcript: list[int], device: torch.device
) -> None:
    frames = range(len(transcript), 2 * len(transcript))
    assert_agrees(_arguments(frames, [transcript] * len(frames), device))


def test_a_bound_above_the_longest_transcript_changes_nothing(device: torch.device) -> None:
    torch.manual_seed(1)
    tight = _arguments((6, 4), ([1, 3, 3], [0]), device)
    torch.manual_seed(1)
    loose = _arguments((6, 4), ([1, 3, 3], [0]), device, longest=100)
    upstream = torch.tensor([2.0, -1.0])
    expected = gradients(tight, upstream)
    for name, x in gradients(loose, upstream).items():
        assert torch.equal(x, expected[name]), name


def test_long_sequences_keep_their_digits(device: torch.device) -> None:
    """The definition sums in float64; sums in float32 would be hundreds of times further off."""
    labels = torch.randint(9, (50,))
    labels += labels >= 2
    arguments = _arguments((300, 3), (labels.tolist(), [1]), device, classes=10)
    assert_agrees(arguments)


def test_occupancies_are_those_of_the_definition(device: torch.device) -> None:
    arguments = _arguments((12, 3, 5), ([1, 1, 3, 1], [1, 1, 1], [0, 4]), device)
    results, saved = _triton.forward(CtcArguments(**arguments))
    layouts = arguments["layout_frames"], arguments["layout_targets"]
    occupancies, classes, scale = _triton.occupancies_of(
        torch.ones(3, device=device), *results, saved[1:], arguments["targets"], *layouts, 2
    )
    assert classes.tolist() == [1, -1, 3, -1, 1, -1, -1, 0, 4]
    assert scale.tolist() == [1.0] * 12 + [0.0] * 3 + [1.0] * 5
    logits = torch.nn.functional.linear(arguments["hidden"], arguments["weight"]).cpu().double()
    log_probs = logits.log_softmax(-1).requires_grad_()
    # The derivative by log-probabilities, which F.ctc_loss does not give, but its definition does.
    for rows, transcript, columns in (
        (slice(0, 12), [1, 1, 3, 1], {2: 0, 1: 1, 3: 3}),
        (slice(15, 20), [0, 4], {2: 0, 0: 1, 4: 2}),
    ):
        (expected,) = torch.autograd.grad(
            _log_likelihood(log_probs[rows], transcript, 2), log_probs
        )
        actual = occupancies[rows].cpu().double()[:, list(columns.values())]
        torch.testing.assert_close(actual, expected[rows][:, list(columns)], rtol=1e-5, atol=1e-6)
        one = torch.ones(len(actual), dtype=torch.float64)
        torch.testing.assert_close(actual.sum(1), one, rtol=0, atol=1e-6)


def test_loads_ahead_of_stores_to_their_buffer_change_no_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares overwrite the scores of a frame while those of later frames are fetched."""
    arguments = _arguments((40, 3, 21), ([1, 1, 3, 1] * 4, [1, 3], [0, 4]), device)
    upstream = torch.tensor([1.0, -2.0, 0.5])
    ahead = gradients(arguments, upstream)
    before = _triton._sweep
    assert before(20)["STAGES"] > 1
    monkeypatch.setattr(_triton, "_sweep", lambda columns: before(columns) | {"STAGES": 1})
    for name, x in gradients(arguments, upstream).items():
        assert torch.equal(x, ahead[name]), name


def _log_likelihood(log_probs: Tensor, transcript: list[int], blank: int) -> Tensor:
    """Of one sequence, by the textbook's recursion over blanks and labels, in float64."""
    states = [blank]
    for label in transcript:
        states += [label, blank]
    nothing = log_probs.new_full((), -1e9)
    alpha = [log_probs[0, s] if i < 2 else nothing for i, s in enumerate(states)]
    for frame in log_probs[1:]:
        alpha = [
            torch.stack(
                [
                    alpha[i],
                    alpha[i - 1] if i else nothing,
                    alpha[i - 2] if i > 1 and s != blank and s != states[i - 2] else nothing,
                ]
            ).logsumexp(0)
            + frame[s]
            for i, s in enumerate(states)
        ]
    return torch.stack(alpha[-2:]).logsumexp(0)


def test_an_infinite_loss_has_no_gradient_whatever_comes_from_above(device: torch.device) -> None:
    arguments = _arguments((3, 1, 3), ([1], [1, 3], [3]), device)
    arguments["hidden"][3] = torch.nan
    for upstream in (torch.inf, torch.nan, -2.0):
        actual = gradients(arguments, torch.tensor([1.0, upstream, 1.0]))
        assert actual["loss"].isfinite().tolist() == [True, False, True]
        assert actual["loss"][1] == torch.inf
        assert bool((actual["hidden"][3] == 0).all())
        assert bool(actual["weight"].isfinite().all())


def test_a_sequence_without_gradient_may_hold_nan(device: torch.device) -> None:
    arguments = _arguments((3, 4), ([1], [1, 3]), device)
    clean = gradients(arguments, torch.tensor([1.0, 0.0]))
    arguments["hidden"][3:] = torch.nan
    actual = gradients(arguments, torch.tensor([1.0, 0.0]))
    assert bool(actual["loss"][1].isnan())
    for name in ("hidden", "weight"):
        assert torch.equal(actual[name], clean[name]), name


def test_classes_of_no_probability(device: torch.device) -> None:
    """A bias of -inf masks a class: the transcripts that need it are impossible."""
    arguments = _arguments((3, 2, 5), ([1], [1, 3], [4, 0, 4]), device)
    arguments["bias"] = torch.tensor([0.0, 0, -torch.inf, 0, 0, -torch.inf], device=device)
    upstream = torch.tensor([1.0, 0.5, -1.0])
    actual = gradients(arguments, upstream)
    assert actual["loss"].isfinite().tolist() == [True] * 3
    arguments["bias"][1] = -torch.inf
    actual = gradients(arguments, upstream)
    assert actual["loss"].tolist()[:2] == [torch.inf] * 2
    assert bool((actual["hidden"][:5] == 0).all())
    assert bool((actual["hidden"][5:] != 0).any())
    assert bool(actual["weight"].isfinite().all())


def test_labels_out_of_range_give_nan_and_reach_no_other_sequence(device: torch.device) -> None:
    """Where the values are not checked, that is: on a GPU it would wait."""
    arguments = _arguments((4, 3, 3), ([1, 3], [4], [0]), device)
    good = gradients(arguments, torch.ones(3))
    arguments["targets"][2] = 2**40
    actual = gradients(arguments, torch.ones(3))
    assert actual["loss"].isnan().tolist() == [False, True, False]
    for rows in (slice(0, 4), slice(7, 10)):
        assert torch.equal(actual["hidden"][rows], good["hidden"][rows])


def test_a_label_that_is_the_blank_is_not_written_twice(device: torch.device) -> None:
    """It is wrong, but must not make two threads race for one element."""
    arguments = _arguments((5,), ([1, 2, 1],), device)
    layouts = arguments["layout_frames"], arguments["layout_targets"]
    (loss,), saved = _triton.forward(CtcArguments(**arguments))
    _, classes, _ = _triton.occupancies_of(
        torch.ones_like(loss), loss, saved[1:], arguments["targets"], *layouts, 2
    )
    assert classes.tolist() == [1, -1, -1]


def test_the_logits_are_never_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward makes a tensor of all frames and the vocabulary."""
    monkeypatch.setattr(projection, "chunk_rows", lambda count: 8)
    classes, frames = 131, (40, 20)
    arguments = _arguments(frames, ([1, 3], [4]), device, classes=classes)
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made = out if isinstance(out, (tuple, list)) else (out,)
            sizes.extend(x.numel() for x in made if isinstance(x, Tensor) and x.is_floating_point())
            return out

    with Watch():
        results, saved = _triton.forward(CtcArguments(**arguments))
        _triton.backward(CtcArguments(**arguments), (torch.ones_like(results[0]),), results, saved)
    assert classes * WIDTH <= max(sizes) < sum(frames) * classes


def test_saves_what_it_says(device: torch.device) -> None:
    arguments = _arguments((3, 2), ([1], [1, 3]), device, longest=9)
    _, saved = _triton.forward(CtcArguments(**arguments))
    said = _triton.saved_like(CtcArguments(**arguments))
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in said]


def test_refuses_longer_transcripts_than_fit(device: torch.device) -> None:
    arguments = _arguments((3,), ([1],), device, longest=2048)
    with pytest.raises(BackendUnavailable, match="up to 2047 labels in a sequence, not 2048"):
        ctc_loss(**arguments, backend="triton")
