"""The lattices of transducers on CPUs, against sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss.lattice import occupancies

pytestmark = pytest.mark.usefixtures("cpp_library")


def _offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def test_masses_far_apart_lose_nothing() -> None:
    """The path that counts may lie thousands below the largest mass of its diagonal."""
    # Log-probabilities like those of an untrained model; NaN where they must not be read.
    blank, label = torch.randn(2, 40, 21) - torch.tensor(1.65 * 1024).log()
    label[:, :-1] -= 300.0
    label[:, -1] = torch.nan
    blank[-1, :-1] = -torch.inf
    arguments = blank.flatten(), label.flatten(), _offsets(40), _offsets(20)
    first, found = torch.zeros(1, dtype=torch.int64), torch.empty(2, 40 * 21)
    total = lattice.transducer(*arguments, first, (found[0], found[1]))
    assert torch.equal(lattice.transducer(*arguments, first), total)
    expected, *nodes = occupancies(blank, label[:, :-1])
    torch.testing.assert_close(total[0] - expected, 0 * expected, rtol=0, atol=3e-6)
    for x, y in zip(found, nodes, strict=True):
        torch.testing.assert_close(x.view(40, 21).double(), y.double(), rtol=5e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"log_blank": torch.zeros(6).double()}, "`log_blank` must be float32"),
        ({"log_label": torch.zeros(5)}, "`log_label` must have shape"),
        ({"cu_frames": _offsets(3).long()}, "`cu_frames` must be int32"),
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
        **{name: _offsets(3) for name in ("cu_frames", "cu_labels")},
        "first_nodes": torch.zeros(1, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        lattice.transducer(**(arguments | changed))
