from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels import PackedLayout, RelativeBias, Rotary, attention
from effasr_kernels.attention import reference
from effasr_kernels.runtime.launch import launch, recording
from effasr_kernels.shared.joined import unbind_parts
from effasr_kernels.shared.philox import keep_mask
from effasr_kernels.testing.conformance import (
    Case,
    Packed,
    Shared,
    Variation,
    check_kernel,
    evaluate,
)
from effasr_kernels.testing.tolerance import assert_no_worse

HEADS = 2
_WORD = 2**32 - 1


def _exact(*shape: int) -> Tensor:
    """Random numbers that every dtype holds."""
    return torch.randn(shape).to(torch.bfloat16).to(torch.float16).double()


def _case_for(
    lengths: tuple[int, ...],
    kind: str = "none",
    *,
    lengths_k: tuple[int, ...] | None = None,
    width: int = 16,
    heads: int = HEADS,
    group: int = 1,
    causal: bool = False,
    dropout: float = 0.0,
) -> Callable[[str], Case]:
    packed = {
        name: [_exact(n, count, width) for n in lengths_n]
        for name, lengths_n, count in (
            ("q", lengths, heads),
            ("k", lengths_k or lengths, heads // group),
            ("v", lengths_k or lengths, heads // group),
        )
    }
    shared = {}
    if kind == "relative":
        shared = {
            "content_bias": _exact(heads, width),
            "position_bias": _exact(heads, width),
            "table": _exact(2 * max(*lengths, *(lengths_k or ())) - 1, heads, width),
        }
    positions = {"none": None, "rotary": Rotary(100.0), "part": Rotary(100.0, 0.5)}

    def case_for(backend: str) -> Case:
        def run(packed: Packed, shared: Shared) -> Tensor:
            q, k, v = packed["q"], packed["k"], packed["v"]
            return attention(
                q.values,
                k.values,
                v.values,
                q.layout,
                k.layout if lengths_k else None,
                causal=causal,
                scale=0.7 * width**-0.5,
                position=RelativeBias(*shared.values()) if shared else positions[kind],
                dropout=dropout,
                seed=7 + 2**40,
                backend=backend,
            )

        return Case(run, packed, shared, results=("q",))

    return case_for


def _check_values(
    case_for: Callable[[str], Case], dtype: torch.dtype, device: torch.device
) -> None:
    """Results and gradients as right as the dtype allows."""
    gold = evaluate(case_for("reference"), Variation())
    baseline = evaluate(case_for("reference"), Variation(dtype=dtype))
    actual = evaluate(case_for("triton"), Variation(dtype=dtype, device=device))
    found, exact, same_dtype = (
        {name: torch.cat(pieces) for name, pieces in outcome.rows.items()} | outcome.shared
        for outcome in (actual, gold, baseline)
    )
    for name, values in found.items():
        try:
            assert_no_worse(values, exact[name], same_dtype[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize(
    ("kind", "causal", "lengths_k"),
    [("none", True, None), ("rotary", False, (7, 1, 2)), ("relative", True, None)],
    ids=["causal", "rotary_across", "relative_causal"],
)
def test_keeps_the_contract(
    kind: str,
    causal: bool,
    lengths_k: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    lengths = (2, 0, 5) if kind == "relative" else (3, 0, 18)
    case_for = _case_for(lengths, kind, causal=causal, lengths_k=lengths_k, heads=1)
    check_kernel(case_for, dtype, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.representative(causal=True)
def test_is_right_for_awkward_lengths(
    lengths: tuple[int, ...], causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    _check_values(_case_for(lengths, causal=causal), dtype, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "rotary", "relative"])
@pytest.mark.representative(kind="none", causal=False)
@pytest.mark.representative(kind=["rotary", "relative"], causal=True)
def test_is_right_across_tiles(
    kind: str, causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Several tiles of queries and keys, of unequal numbers; a query before and past all keys."""
    case_for = _case_for((38, 2), kind, lengths_k=(3, 41), causal=causal, heads=1)
    _check_values(case_for, dtype, device)


@pytest.mark.parametrize("kind", ["none", "rotary", "part"])
@pytest.mark.representative(kind="rotary")
def test_is_right_where_heads_share_keys(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Two groups of three."""
    case_for = _case_for((38, 0, 2), kind, causal=True, heads=6, group=3)
    _check_values(case_for, dtype, device)


@pytest.mark.extended
def test_heads_that_share_keys_drop_other_weights(dtype: torch.dtype, device: torch.device) -> None:
    layout = PackedLayout.from_lengths([33, 2], device)
    q, k, v = (_exact(35, heads, 16).to(device, dtype).requires_grad_() for heads in (4, 2, 2))

    def run(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y = attention(q, k, v, layout, dropout=0.25, seed=5, backend="triton")
        return y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))

    repeated = [x.detach().repeat_interleave(2, dim=1).requires_grad_() for x in (k, v)]
    y, *grads = run(*repeated)
    grads[1:] = [x.view(35, 2, 2, 16).float().sum(2) for x in grads[1:]]
    precise = dtype == torch.float32
    for found, wanted in zip(run(k, v), (y, *grads), strict=True):
        close = {"rtol": 1e-5, "atol": 1e-5} if precise else {"rtol": 2e-2, "atol": 5e-2}
        torch.testing.assert_close(found.float(), wanted.float(), **close)


def test_is_right_across_larger_tiles(dtype: torch.dtype, device: torch.device) -> None:
    _check_values(_case_for((130, 67), heads=1, causal=True), dtype, device)


@pytest.mark.parametrize("kind", ["none", "rotary", "part", "relative"])
@pytest.mark.parametrize("width", [11, 36, 96, 256])
@pytest.mark.representative(width=36, kind="relative")
@pytest.mark.representative(width=256, kind="none")
def test_pads_the_width_of_heads(
    width: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    _check_values(_case_for((3, 11), kind, width=width, heads=1), dtype, device)


@pytest.mark.parametrize("sequences", [0, 2])
def test_gives_zeros_without_rows(sequences: int, device: torch.device) -> None:
    layout = PackedLayout.from_lengths([0] * sequences, device, rows=3)
    x = torch.full((3, HEADS, 16), torch.nan, device=device, requires_grad=True)
    y = attention(x, x, x, layout, backend="triton")
    y.sum().backward()
    assert x.grad is not None
    assert not y.any()
    assert not x.grad.any()
    nothing = PackedLayout.from_lengths([0] * sequences, device)
    assert attention(x[:0], x[:0], x[:0], nothing, backend="triton").shape == (0, HEADS, 16)


def test_takes_slices_of_one_product(dtype: torch.dtype, device: torch.device) -> None:
    layout = PackedLayout.from_lengths((5, 12), device)
    qkv = torch.randn(17, 3, HEADS, 16).to(device, dtype)
    q, k, v = qkv.unbind(1)
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), layout, backend="triton")
    assert torch.equal(attention(q, k, v, layout, backend="triton"), expected)


@pytest.mark.parametrize("kind", ["none", "rotary", "partly rotary", "relative", "cross"])
@pytest.mark.representative(kind=["relative", "cross"])
def test_gradients_of_one_product_are_one_tensor(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths((5, 12), device, rows=20)
    position: Any = None
    if kind.endswith("rotary"):
        position = Rotary(fraction=1.0 if kind == "rotary" else 0.5)
    elif kind == "relative":
        tables = [torch.randn(rows, HEADS, 16).to(device, dtype) for rows in (1, 1, 23)]
        position = RelativeBias(tables[0][0], tables[1][0], tables[2])
    is_cross = kind == "cross"
    layout_q = PackedLayout.from_lengths((9, 10), device) if is_cross else layout
    whole = torch.randn(20, 2 if is_cross else 3, HEADS, 16).to(device, dtype)
    # The queries of the other kind are of another product.
    apart = [torch.randn(19, HEADS, 16).to(device, dtype).requires_grad_()] if is_cross else []
    dy = torch.randn(layout_q.rows, HEADS, 16).to(device, dtype)

    def gradients(*parts: Tensor) -> tuple[Tensor, ...]:
        given = [*apart, *parts]
        y = attention(*given, layout_q, layout, position=position, backend="triton")
        return torch.autograd.grad(y, given, dy)

    expected = gradients(*(x.contiguous().requires_grad_() for x in whole.unbind(1)))
    found = gradients(*unbind_parts(whole.clone().requires_grad_()))
    assert all(map(torch.equal, found, expected))
    joined = found[len(apart) :]
    size = HEADS * 16
    one = joined[0].untyped_storage().data_ptr()
    for number, gradient in enumerate(joined):
        if kind == "partly rotary":
            assert gradient.is_contiguous()
            continue
        assert gradient.untyped_storage().data_ptr() == one
        assert gradient.stride() == (len(joined) * size, 16, 1)
        assert gradient.storage_offset() == number * size


def _philox(key: int, counters: tuple[int, int, int, int]) -> list[int]:
    """Philox 4x32 with 7 rounds: Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405."""
    c, k = list(counters), [key & _WORD, key >> 32 & _WORD]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & _WORD, a >> 32 ^ c[3] ^ k[1], a & _WORD]
        k = [(k[0] + 0x9E3779B9) & _WORD, (k[1] + 0xBB67AE85) & _WORD]
    return c


def _kept(seed: int, n: int, head: int, i: int, j: int, probability: float) -> bool:
    counters = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2, head, n
    word = _philox(seed, counters)[i // 8 % 2 * 2 + j // 8 % 2]
    return (word >> 16 if j % 2 else word & 0xFFFF) >= int(probability * 2**16 + 0.5)


class _SameDropout:
    """Drops what the kernels drop; takes the sequences in turn, as the reference does."""

    def __init__(self, probability: float, seed: int | Tensor | None, device: torch.device):
        self.probability, self.seed, self.n = probability, int(seed or 0), -1

    def __call__(self, weights: Tensor) -> Tensor:
        self.n += 1
        heads, t_q, t_k = weights.shape
        keep = [
            _kept(self.seed, self.n, h, i, j, self.probability)
            for h in range(heads)
            for i in range(t_q)
            for j in range(t_k)
        ]
        mask = torch.tensor(keep, dtype=weights.dtype, device=weights.device)
        return weights * mask.view(weights.shape) / (1 - self.probability)


@pytest.mark.parametrize(
    ("kind", "causal"), [("none", False), ("rotary", True), ("relative", True)]
)
@pytest.mark.representative(kind=["none", "relative"])
def test_drops_what_philox_says(
    kind: str,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "Dropout", _SameDropout)
    case_for = _case_for(
        (3, 35), kind, lengths_k=(37, 20), causal=causal, dropout=0.25, heads=HEADS
    )
    _check_values(case_for, dtype, device)


def test_drops_the_same_beside_other_sequences(device: torch.device) -> None:
    """Not the lengths of the others nor a tail, but a sequence's number and the seed."""
    x = torch.randn(20, HEADS, 16, device=device)

    def dropped(before: int, after: int, tail: int, seed: int | Tensor) -> Tensor:
        rows = before + 20 + after + tail
        layout = PackedLayout.from_lengths((before, 20, after), device, rows=rows)
        packed = torch.randn(rows, HEADS, 16, device=device)
        packed[before : before + 20] = x
        y = attention(packed, packed, packed, layout, dropout=0.5, seed=seed, backend="triton")
        return y[before : before + 20]

    expected = dropped(3, 4, 0, 5)
    assert torch.equal(dropped(40, 0, 7, 5), expected)
    assert torch.equal(dropped(3, 4, 0, torch.tensor(5, device=device)), expected)
    assert not torch.equal(dropped(3, 4, 0, 6), expected)


@triton.jit
def _write_mask(
    out,
    seed,
    probability,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    keep = keep_mask(tl.load(seed), 3, 1, row, column, probability, BLOCK_M, BLOCK_N)
    rows = row + tl.arange(0, BLOCK_M)[:, None]
    columns = column + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out + rows * SIZE + columns, keep.to(tl.int8))


@pytest.mark.parametrize("blocks", [(16, 16), (64, 16), (16, 128), (128, 64)])
@pytest.mark.representative(blocks=[(64, 16), (16, 128)])
def test_draws_the_same_in_tiles_of_any_shape(
    blocks: tuple[int, int], device: torch.device
) -> None:
    size, seed, probability = 128, 2**45 + 9, 0.3
    mask = torch.empty(size, size, dtype=torch.int8, device=device)
    grid = size // blocks[0], size // blocks[1]
    seeds = torch.tensor([seed], device=device)
    launch(
        _write_mask, grid, mask, seeds, probability, SIZE=size, BLOCK_M=blocks[0], BLOCK_N=blocks[1]
    )
    for i, j in torch.randint(size, (200, 2)).tolist():
        assert mask[i, j] == _kept(seed, 3, 1, i, j, probability)
    # Three standard deviations.
    share = mask.double().mean().item()
    assert abs(share - 0.7) < 3 * (0.3 * 0.7) ** 0.5 / size


def test_refuses_what_does_not_fit_a_tile(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((2,), device)
    x = torch.zeros(2, 1, 257, device=device)
    with pytest.raises(RuntimeError, match="256 channels"):
        attention(x, x, x, layout, backend="triton")


@pytest.mark.parametrize("kind", ["none", "rotary", "part", "relative"])
@pytest.mark.representative(kind="relative")
def test_tile_tables_change_no_bit(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    lengths = (70, 0, 5)
    layout = PackedLayout.from_lengths(lengths, device, rows=90, num_sequences=5)
    narrow = {"dtype": dtype, "device": device}
    q, k, v, upstream = (torch.randn(90, HEADS, 16, **narrow) for _ in range(4))
    positions = {"none": None, "rotary": Rotary(100.0), "part": Rotary(100.0, 0.5)}
    if kind == "relative":
        biases = (torch.randn(HEADS, 16, **narrow) for _ in range(2))
        positions[kind] = RelativeBias(*biases, torch.randn(139, HEADS, 16, **narrow))
    found = []
    for of in (layout, layout.with_tile_tables()):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        options = {"position": positions[kind], "dropout": 0.25, "seed": 3, "backend": "triton"}
        y = attention(*leaves, of, **options)
        found.append([y, *torch.autograd.grad(y, leaves, upstream)])
    for plain, tabled in zip(*found, strict=True):
        assert torch.equal(plain, tabled)


def test_layers_share_tile_tables(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((70, 5), device).with_tile_tables()
    x = torch.zeros(75, HEADS, 64, device=device, requires_grad=True)
    with recording() as launches:
        y = x
        for _ in range(3):
            y = attention(y, y, y, layout, position=Rotary(), backend="triton")
        y.sum().backward()
    made = [x.constants["BLOCK"] for x in launches if x.kernel.fn.__name__ == "fill_tile_table"]
    searching = [x for x in launches if x.args.get("tiles", 0) is None]
    assert len(made) == len(set(made))
    assert made
    assert not searching
    assert sum("attention" in x.kernel.fn.__name__ for x in launches) >= 9
