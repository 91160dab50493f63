import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from effasr_kernels.transducer_loss.lattice import occupancies
from tests.csrc.native import Implementation, random_planes

SHAPES = (
    *((1, 0), (1, 1), (2, 1), (1, 5), (6, 4), (3, 7), (9, 0), (40, 33), (20, 70), (70, 20)),
    *((3, 100), (100, 3), (31, 31), (32, 32), (33, 64)),
)


def _reference(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return occupancies(pair[0], pair[1][:, :-1])


def _assert_close(
    found: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, Tensor, Tensor]
) -> None:
    """To what a step's rounding allows on a few hundred steps; where they matter, relatively."""
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
    for x, y in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(x.double(), y, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
def test_matches_the_reference(implementation: Implementation, in_place: bool) -> None:
    planes = [random_planes(*shape) for shape in SHAPES]
    found = implementation.transducer(planes, in_place=in_place)
    for pair, result in zip(planes, found, strict=True):
        _assert_close(result, _reference(pair))


def test_likelihoods_alone_are_the_same_bits(implementation: Implementation) -> None:
    planes = [random_planes(*shape) for shape in SHAPES]
    alone = implementation.transducer(planes, only_likelihoods=True)
    both = implementation.transducer(planes)
    assert [x[0] for x in alone] == [x[0] for x in both]


def test_matches_the_sum_over_all_paths(implementation: Implementation) -> None:
    frames, labels = 4, 3
    blank, label = random_planes(frames, labels, classes=5)
    paths, nodes = [], []
    for emitting in itertools.combinations(range(frames - 1 + labels), labels):
        t, u, mass, path = 0, 0, 0.0, []
        for step in range(frames + labels):
            kind = int(step in emitting)
            mass += float((blank, label)[kind][t, u])
            path.append((kind, t, u))
            t, u = t + 1 - kind, u + kind
        paths.append(mass)
        nodes.append(path)
    masses = torch.tensor(paths, dtype=torch.float64)
    total = masses.logsumexp(0)
    expected = torch.zeros(2, frames, labels + 1, dtype=torch.float64)
    for share, path in zip((masses - total).exp(), nodes, strict=True):
        for node in path:
            expected[node] += share
    (found,) = implementation.transducer([(blank, label)])
    _assert_close(found, (total, *expected))


@pytest.mark.parametrize(
    ("frames", "labels", "tolerance"),
    [
        (250, 60, 2e-6),
        pytest.param(1000, 200, 4e-6, marks=pytest.mark.slow),
        pytest.param(2000, 400, 8e-6, marks=pytest.mark.slow),
    ],
)
def test_is_exact_on_long_sequences(
    library: ctypes.CDLL, frames: int, labels: int, tolerance: float
) -> None:
    """Relative to the occupancy. With float32 masses under float64 offsets it would be 1e-3."""
    pair = random_planes(frames, labels)
    _, *expected = _reference(pair)
    reached = torch.stack(expected).sum(0)
    ((_, *found),) = Implementation(library).transducer([pair])
    error = (torch.stack(found).double().sum(0) - reached).abs() / reached
    assert float(error[reached > 1e-4].max()) < tolerance


def test_masses_far_apart_lose_nothing(implementation: Implementation) -> None:
    """The path that counts may lie thousands below the largest mass of its diagonal."""
    frames, labels = 40, 20
    blank, label = random_planes(frames, labels)
    label[:, :-1] -= 300.0
    blank[-1, :-1] = -torch.inf
    expected = _reference((blank, label))
    for found in implementation.transducer([(blank, label)]):
        _assert_close((found[0] - expected[0], *found[1:]), (0 * expected[0], *expected[1:]))


def test_occupancies_of_each_diagonal_sum_to_one(implementation: Implementation) -> None:
    frames, labels = 90, 40
    ((_, blank, label),) = implementation.transducer([random_planes(frames, labels)])
    diagonal = (torch.arange(frames)[:, None] + torch.arange(labels + 1)).flatten()
    sums = torch.zeros(frames + labels, dtype=torch.float64)
    sums.index_add_(0, diagonal, (blank.double() + label.double()).flatten())
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=3e-6)


def test_no_path_no_frames_no_sequence(implementation: Implementation) -> None:
    closed, lost = random_planes(5, 3), random_planes(5, 3)
    closed[1][:, 1] = -torch.inf  # the second label can nowhere be emitted
    lost[0][2, 2] = torch.nan
    empty, unspoken = torch.zeros(0, 1), torch.zeros(0, 3)
    partly = random_planes(6, 4)
    partly[0][2, 1:] = -torch.inf
    planes = [closed, (empty, empty), random_planes(4, 2), (unspoken, unspoken), lost, partly]
    found = implementation.transducer(planes)
    assert found[0][0] == found[3][0] == -torch.inf
    assert not torch.cat(found[0][1:]).any()
    assert found[1][0] == 0.0
    _assert_close(found[2], _reference(planes[2]))
    assert found[4][0].isnan()
    assert torch.cat(found[4][1:]).isnan().any()
    _assert_close(found[5], _reference(partly))
    assert implementation.transducer([(empty, empty)])[0][0] == 0.0


def test_gives_the_same_bits_in_any_order(library: ctypes.CDLL) -> None:
    """On any number of threads."""
    planes = [random_planes(*shape) for shape in SHAPES]
    results = []
    for i in range(4):
        found = Implementation(library, 1 + i).transducer(planes)
        results.append(torch.cat([x.flatten().double() for result in found for x in result]))
    assert all(torch.equal(results[0], other) for other in results[1:])
