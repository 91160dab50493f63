"""`transducer_loss` with durations in Triton against its definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.lattice import occupancies
from effasr_kernels.transducer_loss.triton import backend, duration_lattice
from effasr_kernels.transducer_loss.triton.plan import Cost, Lattices
from effasr_kernels.transducer_loss.triton.work import Work
from tests.gpu.live_memory import Live
from tests.support.loss_calls import LEAVES, assert_agrees, gradients, transducer_arguments
from tests.support.operation_cases import labels_for


@pytest.mark.parametrize(
    ("frames", "labels", "durations", "options"),
    [
        ((7, 0, 5), (3, 0, 0), (0, 1, 2, 3, 4), {}),
        ((6, 3), (2, 4), (1, 2, 4), {"activation": "tanh", "longest": 5}),
        ((4, 1), (2, 1), (0, 1), {"fastemit": 0.3, "blank_id": 0}),
        ((9,), (2,), (0, 3, 8), {"blank_id": 6, "sigma": 0.0}),
    ],
    ids=["usual", "never_0", "one_at_most", "longest"],
)
@pytest.mark.representative(durations=[(0, 1, 2, 3, 4), (1, 2, 4)])
def test_agrees_with_the_definition(
    frames: tuple[int, ...],
    labels: tuple[int, ...],
    durations: tuple[int, ...],
    options: dict,
    device: torch.device,
) -> None:
    arguments = transducer_arguments(frames, labels, device, durations, **options)
    assert_agrees(arguments, torch.tensor([1.0, -2.0, 0.5])[: len(frames)])


def test_agrees_in_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    arguments = transducer_arguments((5, 2), ([1, 3], [6]), device, (0, 1, 2, 4), dtype=dtype)
    assert_agrees(arguments)


@pytest.mark.parametrize(
    ("frames", "transcripts", "durations", "possible"),
    [
        ((2, 3, 4), ([], [], [1]), (0, 3), [False, True, False]),
        ((1, 1, 1), ([1], [], [1, 1]), (1, 2), [False, True, False]),
        ((0, 0, 2), ([], [1], [1]), (0, 1, 2), [True, False, True]),
        ((1, 4), ([], []), (2,), [False, True]),
        ((1, 2), ([3, 4, 5], [1, 3, 5, 6]), (0, 1, 4), [True, True]),
    ],
    ids=["threes", "no_time", "no_frames", "by_twos", "all_at_once"],
)
@pytest.mark.representative(durations=[(0, 3), (0, 1, 2)])
def test_what_no_path_fits_costs_infinity(
    frames: tuple[int, ...],
    transcripts: tuple[list[int], ...],
    durations: tuple[int, ...],
    possible: list[bool],
    device: torch.device,
) -> None:
    arguments = transducer_arguments(frames, transcripts, device, durations)
    actual = assert_agrees(arguments)
    assert actual["loss"].isfinite().tolist() == possible
    rows = iter(actual["encoded"].split(list(frames)))
    for gradient, is_possible in zip(rows, possible, strict=True):
        assert is_possible or bool((gradient == 0).all())


@pytest.mark.parametrize("longest", [None, 9])
def test_divides_nodes_as_it_is_told(longest: int | None, device: torch.device) -> None:
    """A small workspace changes results by the order of sums alone; inputs may be overwritten."""
    transcripts = [1, 3, 5], [], [4, 1]
    arguments = transducer_arguments((8, 3, 5), transcripts, device, (0, 1, 2), longest=longest)
    upstream = torch.tensor([1.0, -2.0, 0.5])
    expected = gradients(arguments, upstream)
    for size in (2**12, 2**16):
        set_workspace(size)
        found = gradients(arguments, upstream, overwrite_inputs=size == 2**12)
        assert torch.equal(found["loss"], expected["loss"])
        for name in LEAVES:
            torch.testing.assert_close(
                found[name], expected[name], rtol=1e-5, atol=1e-6, msg=f"{name}, {size}"
            )


def test_a_strip_hands_on_what_leaves_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transcripts of more than 511 labels."""
    before = duration_lattice.DurationSweeps.__init__

    def narrow(self: Any, *call: Any) -> None:
        before(self, *call)
        self._options |= {"BLOCK": 8, "num_warps": 1}

    monkeypatch.setattr(duration_lattice.DurationSweeps, "__init__", narrow)
    transcripts = [labels_for(n, 7, 2).tolist() for n in (7, 8, 19)]
    arguments = transducer_arguments((5, 3, 9), transcripts, device, (0, 1, 2, 4))
    assert_agrees(arguments, torch.tensor([1.0, -2.0, 0.5]))


def test_an_infinite_loss_has_no_gradient_whatever_comes_from_above(device: torch.device) -> None:
    arguments = transducer_arguments((3, 1, 3), ([1], [1, 3], [3]), device, (1, 2))
    for upstream in (torch.inf, torch.nan, -2.0):
        actual = gradients(arguments, torch.tensor([1.0, upstream, 1.0]))
        assert actual["loss"].isfinite().tolist() == [True, False, True]
        assert bool((actual["encoded"][3] == 0).all())
        assert bool((actual["predicted"][2:5] == 0).all())
        assert bool(actual["weight"].isfinite().all())


@pytest.mark.parametrize(("frames", "labels"), [(120, 24), (4, 512), (4, 1030)])
@pytest.mark.representative(labels=[24, 512])
def test_lattice_against_float64(frames: int, labels: int, device: torch.device) -> None:
    """Shares of steps to rounding, on lattices where float32 masses would be off by 1e-3.

    Of 512 states, each strip hands what leaves it to the next.
    """
    durations = (0, 1, 2, 3, 4)
    tokens = torch.randn(frames, labels + 1, 50).mul(3).log_softmax(-1)
    lasting = torch.randn(frames, labels + 1, len(durations)).log_softmax(-1)
    log_blank, log_label = tokens[..., 0], tokens[..., 1]
    total, took_blank, took_label, took = occupancies(
        log_blank, log_label[:, :-1], lasting, durations
    )
    arguments = transducer_arguments((frames,), ([1] * labels,), device, durations)
    layouts = arguments["layout_frames"], arguments["layout_targets"]
    work = Work(TransducerArguments(**arguments))
    (group,) = Lattices(*layouts).groups(Cost(1), 2**29, Cost(1), 2**29)
    scores = work.scores(group)
    for plane, x in zip(scores[1:], (log_blank, log_label, lasting), strict=True):
        plane.copy_(x.reshape(plane.shape))
    sweeps = duration_lattice.DurationSweeps(work.offsets, work.bound, 0.0, work.durations)
    assert sweeps._options["BLOCK"] == min(512, max(32, 1 << labels.bit_length()))
    loss, trace = torch.empty(1, device=device), sweeps.room(scores)
    sweeps.losses(group, scores, trace, loss)
    torch.testing.assert_close(loss.cpu().double(), -total[None], rtol=1e-6, atol=0)
    sweeps.occupancies(group, scores, trace, loss, torch.ones_like(loss), scores)
    blank, label, d_duration = (x.cpu().double() for x in scores[1:])
    torch.testing.assert_close(blank.view_as(took_blank), took_blank, rtol=0, atol=2e-6)
    torch.testing.assert_close(label.view_as(took_label), took_label, rtol=0, atol=2e-6)
    whole = (took_blank + took_label)[..., None]
    expected = lasting.double().exp() * whole - took
    torch.testing.assert_close(d_duration.view_as(took), expected, rtol=0, atol=2e-6)


def test_loads_ahead_of_stores_to_their_buffer_change_no_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Occupancies overwrite scores while those of the next nodes are fetched."""
    arguments = transducer_arguments((30, 7), ([1, 3] * 9, [3]), device, (0, 1, 2))
    upstream = torch.tensor([1.0, -2.0])
    ahead = gradients(arguments, upstream)
    before = duration_lattice.DurationSweeps.__init__

    def one_stage(self: Any, *call: Any) -> None:
        before(self, *call)
        assert self._options["STAGES"] > 1
        self._options |= {"STAGES": 1}

    monkeypatch.setattr(duration_lattice.DurationSweeps, "__init__", one_stage)
    found = gradients(arguments, upstream)
    assert found.keys() == ahead.keys()
    for name, x in found.items():
        assert torch.equal(x, ahead[name]), name


def test_memory_is_that_of_the_workspace(device: torch.device) -> None:
    """But for inputs, and their gradients."""
    classes, width, sequences, frames, labels, size = 60, 8, 20, 10, 3, 2**16
    set_workspace(size)
    transcripts = [labels] * sequences
    sizes = {"classes": classes, "width": width}
    arguments = transducer_arguments((frames,) * sequences, transcripts, device, (0, 1, 2), **sizes)
    with Live(*(x for x in arguments.values() if isinstance(x, Tensor))) as live:
        results, saved = backend.forward(TransducerArguments(**arguments))
        backend.backward(
            TransducerArguments(**arguments), (torch.ones_like(results[0]),), results, saved
        )
    given = arguments["encoded"].nbytes + arguments["predicted"].nbytes
    fixed = 3 * arguments["weight"].nbytes
    assert 4 * sequences * frames * (labels + 1) * classes > 2 * size
    # A tile of rows, which statistics round up to, is no small thing beside these sizes.
    assert live.peak <= given + fixed + 1.1 * size + 2**13, (live.peak, given)


def test_durations_beyond_its_registers_are_for_the_reference(device: torch.device) -> None:
    arguments = transducer_arguments((3,), ([1],), device, (0, 1, 9))
    reason = backend.unsupported_reason(TransducerArguments(**arguments))
    assert "durations of up to 8 frames" in str(reason)
    assert (
        backend.unsupported_reason(TransducerArguments(**(arguments | {"durations": (0, 1, 8)})))
        is None
    )
