"""`transducer_loss` in Triton, whose nodes are divided on the device: the host reads no length."""

from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, transducer_loss
from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.triton import backend, fold
from effasr_kernels.transducer_loss.triton.division import strides
from effasr_kernels.transducer_loss.triton.plan import Room
from tests.gpu.live_memory import Live
from tests.support.loss_calls import LEAVES, assert_agrees, gradients, transducer_arguments

FRAMES, TRANSCRIPTS = (5, 0, 3, 4, 0), ([1, 3], [1], [], [4], [])
NODES = 5 * 3 + 3 + 4 * 2
UPSTREAM = torch.tensor([1.0, 2.0, -2.0, 0.5, 1.0])


def _arguments(
    device: torch.device, durations: tuple[int, ...] | None = None, **options: Any
) -> dict[str, Any]:
    """A batch of a static shape, with tails of NaN, and labels in it out of range."""
    arguments = transducer_arguments(FRAMES, TRANSCRIPTS, device, durations, longest=5, **options)
    for name, rows in {"encoded": 7, "predicted": 3, "targets": 3}.items():
        x = arguments[name]
        fill = torch.nan if x.is_floating_point() else 2**20
        arguments[name] = torch.cat([x, x.new_full((rows, *x.shape[1:]), fill)])
    for name, rows in {"layout_frames": 7, "layout_targets": 3}.items():
        x = arguments[name]
        arguments[name] = PackedLayout(x.cu_seqlens, x.cu_seqlens_host, x.rows + rows, 9)
    return arguments


def _on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, whose offsets the host does not know."""
    return {
        name: x.rewritable() if isinstance(x, PackedLayout) else x for name, x in arguments.items()
    }


@pytest.mark.parametrize("durations", [None, (0, 1, 2)])
def test_agrees_however_the_capacity_is_divided(
    durations: tuple[int, ...] | None, device: torch.device
) -> None:
    set_workspace(2**12)
    arguments = transducer_arguments(
        FRAMES, TRANSCRIPTS, device, durations, longest=4, fastemit=0.2, max_nodes=NODES + 9
    )
    assert_agrees(arguments, UPSTREAM)


def test_numbers_of_tiles_have_room_for_every_sequence() -> None:
    """Those of one end before those of the next begin, and the bound of a chunk is after all."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda most, n: torch.randint(most, (n,), generator=generator).tolist()
    first_tile = lambda *given: (given[0] + 31 * given[1] + 7 * given[2]) // 256 + given[3]
    assert (fold.FRAMES, fold.STATES) == (8, 32)
    for _ in range(500):
        count = 1 + draw(6, 1)[0]
        node = frame = state = past = 0
        for n, (t, s) in enumerate(zip(draw(40, count), draw(90, count), strict=True)):
            assert first_tile(node, frame, state, n) >= past
            past = first_tile(node, frame, state, n) + -(-t // 8) * -(-(s + 1) // 32)
            node, frame, state = node + t * (s + 1), frame + t, state + s + 1
        assert past <= fold.count_tiles(Room(node, frame, count, state))


@pytest.mark.extended
def test_tiles_of_long_transcripts(device: torch.device) -> None:
    """Of several strips of states, and frames that are no whole tile."""
    transcripts = [[1] * 33, [], [3] * 40]
    arguments = transducer_arguments((3, 2, 9), transcripts, device, longest=40, width=4)
    set_workspace(2**15)
    expected = gradients(arguments, torch.ones(3))
    found = gradients(_on_device(arguments), torch.ones(3), max_nodes=480)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-5, msg=name)
    assert_agrees(arguments | {"max_nodes": 480})


def test_gradients_overwrite_the_inputs(device: torch.device) -> None:
    """With several chunks; the tails become zero."""
    set_workspace(2**13)
    arguments = _on_device(_arguments(device))
    expected = gradients(arguments, UPSTREAM, max_nodes=NODES)
    leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES}
    made = {name: leaves[name] * 1 for name in LEAVES[:2]}
    options = {"max_nodes": NODES, "overwrite_inputs": True, "backend": "triton"}
    loss = transducer_loss(**(arguments | leaves | made), **options)
    found = torch.autograd.grad(loss, list(leaves.values()), UPSTREAM.to(loss))
    for name, x in zip(LEAVES, found, strict=True):
        assert torch.equal(x, expected[name]), name
    assert torch.equal(made["encoded"], expected["encoded"])
    assert bool((expected["encoded"][-7:] == 0).all())
    assert bool((expected["predicted"][-3:] == 0).all())


def test_a_batch_after_another_has_nothing_of_it(device: torch.device) -> None:
    """As a graph is replayed: the same layouts, with other offsets."""
    set_workspace(2**13)
    first, second = _arguments(device), _arguments(device)
    frames, labels = (0, 3, 2, 0, 1), (1, 0, 2, 0, 2)
    for name, lengths in {"layout_frames": frames, "layout_targets": labels}.items():
        rows = second[name].rows
        layout = PackedLayout.from_lengths(lengths, device, rows=rows, static_max_seqlen=9)
        second[name] = layout
    # What lies past its rows is now a tail, and the tail of the first no longer is one.
    for name in ("encoded", "predicted"):
        second[name] = torch.randn_like(second[name])
    second["targets"] = torch.randint(3, 6, second["targets"].shape).to(device)
    expected = gradients(second, UPSTREAM, max_nodes=NODES)
    replayed = _on_device(first)
    gradients(replayed, UPSTREAM, max_nodes=NODES)
    for name in ("layout_frames", "layout_targets"):
        replayed[name].cu_seqlens.copy_(second[name].cu_seqlens)
    replayed |= {name: second[name] for name in (*LEAVES, "targets")}
    found = gradients(replayed, UPSTREAM, max_nodes=NODES)
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("capacity", [0, 5])
def test_without_any_frame(capacity: int, device: torch.device) -> None:
    arguments = transducer_arguments((0, 0), ([], [1]), device, longest=2, max_nodes=capacity)
    assert assert_agrees(arguments)["loss"].tolist() == [0, torch.inf]


def test_memory_is_that_of_the_workspace_and_the_capacity(device: torch.device) -> None:
    """Whatever the padded product of the longest lengths is."""
    classes, width, sequences, frames, labels, size = 60, 8, 12, 16, 3, 2**16
    set_workspace(size)
    transcripts = [[1] * labels] * sequences
    arguments = transducer_arguments(
        (frames,) * sequences, transcripts, device, classes=classes, width=width, longest=40
    )
    nodes = sequences * frames * (labels + 1)
    call = TransducerArguments(**_on_device(arguments), max_nodes=nodes)
    with Live(*(x for x in arguments.values() if isinstance(x, Tensor))) as live:
        results, saved = backend.forward(call)
        backend.backward(call, (torch.ones_like(results[0]),), results, saved)
    given = arguments["encoded"].nbytes + arguments["predicted"].nbytes
    fixed = 3 * arguments["weight"].nbytes
    assert 4 * nodes * classes > 2 * size
    assert live.peak <= given + fixed + size + 16 * nodes + 2**13, (live.peak, given)


def test_strides_are_equal_and_fit() -> None:
    assert strides(1000, 5, 104) == (10, 100, 104)
    # Two frames fit always.
    assert strides(1000, 200, 1) == (5, 200, 399)
    assert strides(7, 200, 1) == (1, 7, 7)


def test_refuses_a_capacity_that_the_batch_exceeds(device: torch.device) -> None:
    arguments = _arguments(device)
    call = lambda **options: transducer_loss(**(arguments | options), backend="triton")
    with pytest.raises(ValueError, match=rf"`max_nodes` must be at least the {NODES} nodes"):
        call(max_nodes=NODES - 1)
    with pytest.raises(ValueError, match="`max_nodes` must lie in 0 to"):
        call(max_nodes=-1)
    unbounded = {
        name: PackedLayout(x.cu_seqlens, x.cu_seqlens_host, x.rows).rewritable()
        for name, x in arguments.items()
        if isinstance(x, PackedLayout)
    }
    with pytest.raises(ValueError, match="`max_nodes` must be None without a bound"):
        call(max_nodes=NODES, **unbounded)
