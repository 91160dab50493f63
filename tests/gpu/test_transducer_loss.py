"""`transducer_loss` in Triton, with durations and without, against its definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, transducer_loss
from effasr_kernels.testing.conformance import check_kernel
from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.lattice import occupancies
from effasr_kernels.transducer_loss.triton import duration_lattice, lattice
from effasr_kernels.transducer_loss.triton.plan import Cost, Lattices, Scores, Trace, first_nodes
from effasr_kernels.transducer_loss.triton.work import Work
from tests.support import operation_cases
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


def _change_sweeps(monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
    """Of lattices with durations."""
    before = duration_lattice.DurationSweeps.__init__

    def changed(self: Any, *call: Any) -> None:
        before(self, *call)
        assert self._options["STAGES"] > 1
        self._options |= options

    monkeypatch.setattr(duration_lattice.DurationSweeps, "__init__", changed)


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
    _change_sweeps(monkeypatch, BLOCK=8, num_warps=1)
    assert_agrees(transducer_arguments(frames, labels, device, durations), UPSTREAM)


def _sweep(log_blank: Tensor, log_label: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """The loss of one sequence, the shares of its nodes, and the occupancies written over them."""
    frames, labels = log_blank.shape[0], log_blank.shape[1] - 1
    of_frames, of_labels = (PackedLayout.from_lengths([n], device) for n in (frames, labels))
    (group,) = Lattices(of_frames, of_labels).groups(Cost(1), 2**29, Cost(1), 2**29)
    offsets = of_frames.cu_seqlens, of_labels.cu_seqlens, first_nodes(of_frames, of_labels)
    share, other = (x.to(device, copy=True).contiguous().flatten() for x in (log_blank, log_label))
    loss, scores = torch.empty(1, device=device), Scores(0, share, other)
    sweeps, trace = lattice.LabelSweeps(offsets, labels, 0.0), Trace(0, share)
    sweeps.losses(group, scores, trace, loss)
    kept = share.clone()
    sweeps.occupancies(group, scores, trace, loss, torch.ones(1, device=device), scores)
    return loss.cpu(), *(x.cpu().view(log_blank.shape) for x in (kept, share, other))


def _scores(frames: int, labels: int) -> tuple[Tensor, Tensor]:
    log_probs = torch.randn(frames, labels + 1, 50).mul(3).log_softmax(-1)
    return log_probs[..., 0], log_probs[..., 1]


@pytest.mark.parametrize(("frames", "labels"), [(300, 60), (5, 1023), (5, 1024), (3, 2100)])
@pytest.mark.representative(labels=[60, 1024])
def test_lattice_against_float64(frames: int, labels: int, device: torch.device) -> None:
    """Occupancies to rounding; and every path crosses each anti-diagonal once.

    Of 1,024 states, those of 1,023 labels, each strip hands what leaves it to the next.
    """
    log_blank, log_label = _scores(frames, labels)
    total, took_blank, took_label = occupancies(log_blank.double(), log_label[:, :-1].double())
    loss, _, blank, label = _sweep(log_blank, log_label, device)
    torch.testing.assert_close(loss.double(), -total[None], rtol=1e-6, atol=0)
    # Each anti-diagonal multiplies by shares of float32, whose errors add up as a random walk.
    atol = 2e-6 * max(1.0, ((frames + labels) / 360) ** 0.5)
    torch.testing.assert_close(blank.double(), took_blank, rtol=0, atol=atol)
    torch.testing.assert_close(label.double(), took_label, rtol=0, atol=atol)
    diagonal = torch.arange(frames)[:, None] + torch.arange(labels + 1)
    sums = torch.zeros(frames + labels, dtype=torch.float64)
    sums.index_add_(0, diagonal.flatten(), (blank.double() + label.double()).flatten())
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)


def test_groups_and_chunks_cover_every_frame_once() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda most, n: torch.randint(most, (n,), generator=generator).tolist()
    for trial in range(200):
        n = draw(6, 1)[0] + (trial > 0)
        frames, labels = draw(12, n), draw(6, n)
        layouts = PackedLayout.from_lengths(frames), PackedLayout.from_lengths(labels)
        lattices = Lattices(*layouts)
        cost = Cost(2, 3, 5)
        sizes = 1 + draw(400, 1)[0], 1 + draw(200, 1)[0]
        groups = list(lattices.groups(cost, sizes[0], cost, sizes[1]))
        assert sum(x.sequences for x in groups) == n
        frame = node = 0
        for group in groups:
            assert (group.first_frame, group.first_node) == (frame, node)
            for chunk in group.chunks:
                assert (chunk.first_frame, chunk.first_node) == (frame, node)
                assert chunk.frames > 0
                last = chunk.first_sequence + chunk.sequences
                assert layouts[0].cu_seqlens_host[chunk.first_sequence] <= frame
                inside = range(chunk.first_sequence, last)
                assert chunk.states == sum(labels[n] + 1 for n in inside)
                assert chunk.room == (chunk.nodes, chunk.frames, chunk.sequences, chunk.states)
                rows = [n for n in range(n) for _ in range(frames[n])]
                used = rows[frame : frame + chunk.frames]
                assert chunk.nodes == sum(labels[n] + 1 for n in used)
                touched = {n for n in used}
                needed = 2 * chunk.nodes + 3 * chunk.frames
                needed += 5 * sum(labels[n] + 1 for n in touched)
                assert chunk.frames == 1 or needed <= sizes[1]
                frame, node = frame + chunk.frames, node + chunk.nodes
        assert frame == sum(frames)
        assert node == lattices.nodes[-1]


@pytest.mark.parametrize(("frames", "labels"), [(120, 24), (4, 512), (4, 1030)])
@pytest.mark.representative(labels=[24, 512])
def test_duration_lattice_against_float64(frames: int, labels: int, device: torch.device) -> None:
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
