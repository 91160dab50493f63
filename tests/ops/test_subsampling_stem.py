import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import PackedLayout, pack, subsampling_stem

BINS, CHANNELS = 8, 3


both = pytest.mark.parametrize("per_slot", [4, 8])


def _alone(x: Tensor, weight: Tensor, bias: Tensor, taps: Tensor, offset: Tensor) -> Tensor:
    """Both convolutions of one utterance by torch: (L, F) to (ceil(L / 4), F / 4, C)."""
    z = F.conv2d(x[None, None], weight.view(-1, 1, 3, 3), bias, stride=2, padding=1).relu()
    taps = taps.view(-1, 1, 3, 3)
    return F.conv2d(z, taps, offset, stride=2, padding=1, groups=len(taps))[0].permute(1, 2, 0)


def _parameters() -> list[Tensor]:
    shapes = (CHANNELS, 9), (CHANNELS,), (CHANNELS, 9), (CHANNELS,)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


@both
@pytest.mark.parametrize("rows", [(1, 2, 3, 4), (5, 6, 7, 8), (9, 0, 37, 64)])
def test_matches_torch_on_each_utterance(rows: tuple[int, ...], per_slot: int) -> None:
    utterances = [torch.randn(n, BINS, dtype=torch.float64) for n in rows]
    parameters = _parameters()
    # What stands in the rows that are not real does not count.
    slots = [
        F.pad(x, (0, 0, 0, -len(x) % per_slot), value=torch.nan).view(-1, per_slot, BINS)
        for x in utterances
    ]
    packed = pack(slots)
    lengths = torch.tensor(rows)
    y = subsampling_stem(
        packed.values.flatten(0, 1), *parameters, packed.layout, lengths, rows_per_slot=per_slot
    )
    parts = y.split([per_slot // 4 * n for n in packed.layout.lengths])
    for x_n, y_n in zip(utterances, parts, strict=True):
        if len(x_n):
            expected = _alone(x_n, *parameters)
            torch.testing.assert_close(y_n[: len(expected)], expected)
            assert not y_n[len(expected) :].any()


@both
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_cutting_a_batch_changes_nothing(
    slots: int, per_slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PackedLayout.from_lengths((4, 1, 0, 7), rows=14)
    x = torch.randn(per_slot * 14, BINS, dtype=torch.float64, requires_grad=True)
    leaves = [x, *(p.requires_grad_() for p in _parameters())]
    lengths = torch.tensor([32, 5, 0, 50]) * per_slot // 8

    def run() -> list[Tensor]:
        y = subsampling_stem(*leaves, layout, lengths, rows_per_slot=per_slot)
        grad = torch.arange(y.numel(), dtype=y.dtype).cos().view_as(y)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    whole = run()
    reference = importlib.import_module("effasr_kernels.subsampling_stem.reference")
    monkeypatch.setattr(reference, "_SLOTS", slots)
    for got, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_lengths_beyond_the_slots_count_as_all_of_them() -> None:
    layout = PackedLayout.from_lengths((2, 1))
    x, parameters = torch.randn(24, BINS, dtype=torch.float64), _parameters()
    y = subsampling_stem(x, *parameters, layout, torch.tensor([16, 8]))
    beyond = torch.tensor([99, 8], dtype=torch.int32)
    assert torch.equal(subsampling_stem(x, *parameters, layout, beyond), y)
