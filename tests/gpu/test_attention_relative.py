"""The buffer of relative scores and its gradients, against dense matrices."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from effasr_kernels.attention._relative import bias_width, relative_backward, relative_scores
from effasr_kernels.packed import PackedLayout
from effasr_kernels.testing import assert_no_worse

_SCALE = 0.3


@dataclass(frozen=True)
class Problem:
    """Arguments of `relative_scores`, and a gradient for what it gives."""

    q: Tensor
    position_bias: Tensor
    table: Tensor
    layout_q: PackedLayout
    layout_k: PackedLayout
    ds: Tensor

    @property
    def defined(self) -> Tensor:
        """Which elements of the buffer have a meaning: bool (T_q, 1, W)."""
        lengths = torch.tensor((*self.layout_k.lengths, 0), device=self.q.device)
        keys = lengths[self.layout_q.sequence_ids()]
        return torch.arange(self.ds.shape[-1], device=self.q.device) < keys[:, None, None]

    def solve(self) -> dict[str, Tensor]:
        """By the kernels; what is undefined is set to zero."""
        arguments = self.q, self.position_bias, self.table, self.layout_q, self.layout_k, _SCALE
        scores = relative_scores(*arguments)
        grads = relative_backward(self.ds.clone(), *arguments)
        return self._named(scores.masked_fill(~self.defined, 0), *grads)

    def dense(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """By matrices, in another dtype."""
        leaves = [x.to(dtype).detach() for x in (self.q, self.position_bias, self.table)]
        leaves[0][self.layout_q.total :] = 0
        q, position_bias, table = (x.requires_grad_() for x in leaves)
        shifted = (q + position_bias).to(torch.promote_types(dtype, torch.float32))
        reach, pieces = (table.shape[0] + 1) // 2, []
        sequences = shifted[: self.layout_q.total].split(self.layout_q.lengths)
        for rows, keys in zip(sequences, self.layout_k.lengths, strict=True):
            i = torch.arange(rows.shape[0], device=rows.device)[:, None]
            j = torch.arange(keys, device=rows.device)
            by_key = table.to(shifted.dtype)[reach - 1 + i - j]
            scores = torch.einsum("ihd,ijhd->ihj", rows, by_key) * _SCALE
            pieces.append(F.pad(scores, (0, self.ds.shape[-1] - keys)))
        tail = self.layout_q.rows - self.layout_q.total
        scores = F.pad(torch.cat(pieces), (0, 0, 0, 0, 0, tail)).to(dtype)
        ds = self.ds.masked_fill(~self.defined, 0).to(dtype)
        grads = torch.autograd.grad(scores, (q, position_bias, table), ds, materialize_grads=True)
        return self._named(scores.detach(), *grads)

    def _named(self, *tensors: Tensor) -> dict[str, Tensor]:
        return dict(zip(("scores", "q", "position_bias", "table"), tensors, strict=True))

    def check(self) -> None:
        """The kernels err as little as the dtype allows."""
        gold, baseline = self.dense(torch.float64), self.dense(self.q.dtype)
        for name, actual in self.solve().items():
            assert_no_worse(actual, gold[name], baseline[name])


def problem(
    dtype: torch.dtype,
    device: torch.device,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    heads: int = 2,
    width: int = 20,
    spare: int = 3,
) -> Problem:
    """Random numbers; NaN in the tail and where nothing is defined; slices of larger tensors."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    layout_q, layout_k = (
        PackedLayout.from_lengths(
            x, device, rows=sum(x) + more, num_sequences=len(x) + 2, longest=max(x) + 1
        )
        for x, more in ((lengths_q, 3), (lengths_k, 2))
    )
    reach = max(*lengths_q, *lengths_k, 1) + spare
    columns = bias_width(layout_k.bound)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)
    q = draw(layout_q.rows, 3, heads, width)[:, 1]
    q[layout_q.total :] = torch.nan
    table = draw(2 * reach - 1, heads, 2, width)[:, :, 1]
    ds = draw(layout_q.rows, heads, columns)
    made = Problem(q, draw(heads, width), table, layout_q, layout_k, ds)
    ds.masked_fill_(~made.defined, torch.nan)
    return made


def test_lengths(lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    problem(dtype, device, lengths).check()


def test_more_than_one_tile(dtype: torch.dtype, device: torch.device) -> None:
    problem(dtype, device, (2, 150, 65), heads=1).check()


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [((5, 70, 0, 2, 1), (40, 3, 4, 0, 1)), ((1, 3), (75, 0))],
    ids=["either", "few_queries"],
)
def test_from_one_layout_to_another(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    problem(dtype, device, lengths_q, lengths_k, heads=1).check()


@pytest.mark.parametrize("width", [1, 16, 36, 64, 100, 128, 256])
def test_head_widths(width: int, dtype: torch.dtype, device: torch.device) -> None:
    problem(dtype, device, (3, 9), heads=1, width=width).check()


def test_a_table_as_short_as_can_be(dtype: torch.dtype, device: torch.device) -> None:
    problem(dtype, device, (33, 6), heads=1, spare=0).check()


def test_distances_that_none_has_get_no_gradient(device: torch.device) -> None:
    given = problem(torch.float32, device, (3, 5), (4, 2), spare=60)
    table = given.solve()["table"]
    used = torch.zeros(table.shape[0], dtype=torch.bool, device=device)
    used[given.table.shape[0] // 2 - 3 :][:8] = True
    assert not table[~used].any()
    assert table[used].abs().sum((1, 2)).all()


def test_no_rows(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((), device)
    nothing = torch.empty(0, 2, 16, device=device)
    bias, table = torch.ones(2, 16, device=device), torch.ones(7, 2, 16, device=device)
    scores = relative_scores(nothing, bias, table, layout, layout, _SCALE)
    assert scores.shape == (0, 2, 8)
    q, position_bias, by_distance = relative_backward(
        scores, nothing, bias, table, layout, layout, _SCALE
    )
    assert q.shape == nothing.shape
    assert not position_bias.any()
    assert not by_distance.any()


def test_columns_apart(device: torch.device) -> None:
    given = problem(torch.float32, device, (4, 3))
    spread = lambda x: torch.stack([x, x], -1)[..., 0]
    apart = Problem(
        spread(given.q),
        spread(given.position_bias),
        spread(given.table),
        given.layout_q,
        given.layout_k,
        given.ds,
    )
    actual = apart.solve()
    for name, expected in given.solve().items():
        assert torch.equal(actual[name], expected), name


def test_a_repeat_is_bitwise_equal(dtype: torch.dtype, device: torch.device) -> None:
    given = problem(dtype, device, (70, 5), heads=1)
    first, second = given.solve(), given.solve()
    for name, expected in first.items():
        assert torch.equal(second[name], expected), name


def test_nan_stays_in_its_sequence(device: torch.device) -> None:
    given = problem(torch.float32, device, (5, 7, 3))
    plain = given.solve()
    given.q[5:12] = torch.nan
    given.ds[5:12] = torch.nan
    poisoned = given.solve()
    for name in ("scores", "q"):
        for rows in (slice(0, 5), slice(12, None)):
            assert torch.equal(poisoned[name][rows], plain[name][rows]), name


def test_buffer_past_two_billion_elements(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU with 24 GB")
    length, count, heads, width = 4096, 17, 8, 16
    layout = PackedLayout.from_lengths((length,) * count, device)
    alone = PackedLayout.from_lengths((length,), device)
    q = torch.randn(layout.rows, heads, width, device=device, dtype=torch.bfloat16)
    bias, table = torch.randn_like(q[0]), torch.randn_like(q[: 2 * length - 1])
    scores = relative_scores(q, bias, table, layout, layout, _SCALE)
    assert scores.numel() > 2**31
    last = q[-length:]
    expected = relative_scores(last, bias, table, alone, alone, _SCALE)
    assert torch.equal(scores[-length:], expected)
    grad_q, _, _ = relative_backward(scores, q, bias, table, layout, layout, _SCALE)
    expected, _, _ = relative_backward(expected, last, bias, table, alone, alone, _SCALE)
    assert torch.equal(grad_q[-length:], expected)
