"""`transducer_loss` in Triton, with durations and without, against its definition."""

from typing import Any

import pytest
import torch

from effasr_kernels import transducer_loss
from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.lattice import occupancies
from effasr_kernels.transducer_loss.triton import backend, duration_lattice, lattice
from effasr_kernels.transducer_loss.triton.plan import Cost, Lattices
from effasr_kernels.transducer_loss.triton.work import Work
from tests.support import operation_cases
from tests.support.conformance import check_kernel
from tests.support.loss_calls import LEAVES, assert_agrees, gradients, transducer_arguments

UPSTREAM, TDT = torch.tensor([1.0, -2.0, 0.5]), (0, 1, 2)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        *((2**13, {}), (2**13, {"longest": 4}), (2**16, {})),
        *((2**12, {"durations": TDT, "longest": x}) for x in (None, 9)),
    ],
    ids=str,
)
def test_agrees_however_nodes_are_divided(
    size: int, options: dict[str, Any], device: torch.device
) -> None:
    set_workspace(size)
    check_kernel(operation_cases.transducer_loss((5, 0, 8), **options), torch.float32, device)


@pytest.mark.parametrize(
    ("durations", "frames", "labels"),
    [(None, (9, 3, 20), (15, 16, 40)), ((0, 1, 2, 4), (5, 3, 9), (7, 8, 19))],
)
def test_a_strip_hands_on_what_leaves_it(
    durations: tuple[int, ...] | None,
    frames: tuple[int, ...],
    labels: tuple[int, ...],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in transcripts of more than a thousand labels, or of more than 511."""
    monkeypatch.setattr(lattice, "_WIDEST", 16)
    before = duration_lattice.DurationSweeps.__init__

    def changed(self: Any, *call: Any) -> None:
        before(self, *call)
        self._options |= {"BLOCK": 8, "num_warps": 1}

    monkeypatch.setattr(duration_lattice.DurationSweeps, "__init__", changed)
    assert_agrees(transducer_arguments(frames, labels, device, durations), UPSTREAM)


@pytest.mark.parametrize(
    ("durations", "frames", "labels"),
    [
        # Of 1,024 states, those of 1,023 labels, each strip hands what leaves it to the next.
        *((None, frames, labels) for frames, labels in ((300, 60), (5, 1023), (5, 1024))),
        (None, 3, 2100),
        # With durations of 512; float32 masses would be off by 1e-3.
        *(((0, 1, 2, 3, 4), frames, labels) for frames, labels in ((120, 24), (4, 512), (4, 1030))),
    ],
)
@pytest.mark.representative(labels=[60, 1024, 24, 512])
def test_lattice_against_float64(
    durations: tuple[int, ...] | None, frames: int, labels: int, device: torch.device
) -> None:
    """The loss, and to rounding the share of each step."""
    tokens = torch.randn(frames, labels + 1, 50).mul(3).log_softmax(-1)
    lasting = torch.randn(frames, labels + 1, 5).log_softmax(-1)
    log_blank, log_label = tokens[..., 0], tokens[..., 1]
    given = [log_blank, log_label] if durations is None else [log_blank, log_label, lasting]
    wide = log_blank.double(), log_label[:, :-1].double()
    last = () if durations is None else (lasting.double(), durations)
    total, took_blank, took_label, *took = occupancies(*wide, *last)
    arguments = transducer_arguments((frames,), ([1] * labels,), device, durations)
    call = TransducerArguments(**arguments)
    work = Work(call)
    lattices = Lattices(arguments["layout_frames"], arguments["layout_targets"])
    (group,) = lattices.groups(Cost(1), 2**29, Cost(1), 2**29)
    scores, sweeps = work.scores(group), backend._sweeps(call, work)
    planes = [x for x in scores[1:] if x is not None]
    for plane, x in zip(planes, given, strict=True):
        plane.copy_(x.reshape(plane.shape))
    loss, trace = torch.empty(1, device=device), sweeps.room(scores)
    sweeps.losses(group, scores, trace, loss)
    torch.testing.assert_close(loss.cpu().double(), -total[None], rtol=1e-6, atol=0)
    sweeps.occupancies(group, scores, trace, loss, torch.ones_like(loss), scores)
    expected = [took_blank, took_label]
    if durations is not None:
        whole = (took_blank + took_label)[..., None]
        expected.append(lasting.double().exp() * whole - took[0])
    # Each anti-diagonal multiplies by shares of float32, whose errors add up as a random walk.
    atol = 2e-6 * max(1.0, ((frames + labels) / 360) ** 0.5)
    for x, y in zip(planes, expected, strict=True):
        torch.testing.assert_close(x.cpu().double().view_as(y), y, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("size", "longest"),
    [(2**29, None), (2**14, None), (2**14, 9), (2**16, 9)],
    ids=["whole", "few", "kept", "many"],
)
@pytest.mark.representative(size=2**29)
@pytest.mark.representative(size=2**14, longest=9)
def test_overwriting_inputs_gives_the_same_bits(
    size: int, longest: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """However nodes are divided, with sequences of no frames, and a tail."""
    set_workspace(size)
    frames, labels = (5, 0, 8, 0, 3), (2, 1, 4, 0, 0)
    arguments = transducer_arguments(frames, labels, device, dtype=dtype, spare=3, longest=longest)
    # The tail may hold anything.
    for name in LEAVES[:2]:
        arguments[name][-3:] = torch.nan
    upstream = torch.tensor([1.0, -3.0, 2.0, 1.0, 0.5])
    expected = gradients(arguments, upstream)
    overwritten = gradients(arguments, upstream, overwrite_inputs=True)
    for name, x in overwritten.items():
        assert torch.equal(x, expected[name]), name


def test_overwriting_counts_versions_as_an_operation_of_torch_does(device: torch.device) -> None:
    arguments = transducer_arguments((3, 2), (1, 2), device)
    leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES}
    made = {name: leaves[name] * 1 for name in LEAVES[:2]}
    squares = made["encoded"].square().sum()
    transducer_loss(**(arguments | leaves | made), overwrite_inputs=True).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
