"""The lattices of transducers on CPUs, against sums in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss.lattice import occupancies

pytestmark = pytest.mark.usefixtures("cpp_library")
SHAPES = (
    *((1, 0), (1, 1), (2, 1), (1, 5), (6, 4), (3, 7), (9, 0), (40, 33), (20, 70), (70, 20)),
    *((3, 100), (100, 3), (31, 31), (32, 32), (33, 64), (0, 0)),
)
Planes = tuple[Tensor, Tensor]


def _offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def _random_planes(frames: int, labels: int, classes: int = 1024) -> Planes:
    """Log-probabilities like those of an untrained model; NaN where they must not be read."""
    z = torch.randn(2, frames, labels + 1) - torch.tensor(1.65 * classes).log()
    z[1, :, -1] = torch.nan
    return z[0].contiguous(), z[1].contiguous()


def _transducer(planes: Sequence[Planes], in_place: bool = False) -> list[tuple[Tensor, ...]]:
    """Log-likelihood and occupancies (T, U + 1) of each; sequences lie apart."""
    starts = _offsets([blank.numel() + 3 for blank, _ in planes], torch.int64)
    inputs = torch.full((2, int(starts[-1])), torch.nan)
    nodes = torch.zeros(int(starts[-1]), dtype=torch.bool)
    for start, pair in zip(starts.tolist(), planes, strict=False):
        rows = slice(start, start + pair[0].numel())
        inputs[:, rows] = torch.stack(pair).flatten(1)
        nodes[rows] = True
    lengths = _offsets([len(x) for x, _ in planes]), _offsets([x.shape[1] - 1 for x, _ in planes])
    arguments = *inputs, *lengths, starts[:-1]
    alone = lattice.transducer(*arguments)
    results = (inputs[0], inputs[1]) if in_place else (inputs[0].clone(), inputs[1].clone())
    total = lattice.transducer(*arguments, results)
    assert torch.equal(alone.nan_to_num(nan=1.0), total.nan_to_num(nan=1.0))
    if in_place:
        # Nothing is written between sequences.
        assert bool(inputs[:, ~nodes].isnan().all())
    return [
        (total[n], *(x[start:][: blank.numel()].view_as(blank) for x in results))
        for n, (start, (blank, _)) in enumerate(zip(starts.tolist(), planes, strict=False))
    ]


def _assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """To what a step's rounding allows on a few hundred steps; where they matter, relatively."""
    torch.testing.assert_close(found[0], expected[0].double(), rtol=0, atol=3e-6)
    for x, y in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=5e-6, atol=1e-9)


def _expected(pair: Planes) -> tuple[Tensor, ...]:
    if not len(pair[0]):
        return torch.zeros(()), *pair
    return occupancies(pair[0], pair[1][:, :-1])


def test_masses_far_apart_lose_nothing() -> None:
    """The path that counts may lie thousands below the largest mass of its diagonal."""
    blank, label = _random_planes(40, 20)
    label[:, :-1] -= 300.0
    blank[-1, :-1] = -torch.inf
    expected = _expected((blank, label))
    ((total, *found),) = _transducer([(blank, label)])
    _assert_close((total - expected[0], *found), (0 * expected[0], *expected[1:]))


def test_any_number_of_threads_gives_the_same_bits() -> None:
    planes = [_random_planes(*shape) for shape in SHAPES]
    results = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found = _transducer(planes)
            results.append(torch.cat([x.flatten().double() for result in found for x in result]))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"log_blank": torch.zeros(6).double()}, "`log_blank` must be float32"),
        ({"log_label": torch.zeros(5)}, "`log_label` must have shape"),
        ({"cu_frames": _offsets([3]).long()}, "`cu_frames` must be int32"),
        ({"first_nodes": torch.zeros(2, dtype=torch.int64)}, "`first_nodes` must have shape"),
        ({"log_blank": torch.zeros(12)[::2]}, "must be contiguous"),
        ({}, "`first_nodes` must have ranges within the 6 elements"),
        ({"log_blank": torch.zeros(6, device="meta")}, "`log_blank` must be on a CPU"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x,
)
def test_error_messages(changed: dict[str, Tensor], message: str) -> None:
    arguments = {
        **{name: torch.zeros(6) for name in ("log_blank", "log_label")},
        **{name: _offsets([3]) for name in ("cu_frames", "cu_labels")},
        "first_nodes": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        lattice.transducer(**(arguments | changed))
