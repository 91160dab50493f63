"""The Triton backend of `decode_attention` against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from effasr_kernels import decode_attention
from effasr_kernels.decode_attention import _triton
from tests.ops.pages import Paged, draw
from tests.support.tolerance import assert_no_worse

# None, one, a page and one more, a tile of 32 keys and one more, all pages full.
AWKWARD = (0, 1, 8, 9, 33, 40)


def _kernel(batch: Paged, **options: int | Tensor | None) -> Tensor:
    return decode_attention(*batch.arguments, backend="triton", **options)  # type: ignore[arg-type]


def _reference(batch: Paged, **new: Tensor) -> Tensor:
    # By default the emulator and the interpreter serve a CPU.
    return decode_attention(*batch.arguments, backend="reference", **new)  # type: ignore[arg-type]


_CASES = [
    *((AWKWARD, {"size": 8, "hypotheses": 1, "width": 24}, n) for n in (1, 5)),
    ((), {"columns": 2}, None),
    *((AWKWARD, {"size": 8, "hypotheses": 3, "width": 24}, n) for n in (2, 1)),
    # Heads share keys.
    *(
        (AWKWARD, {"size": 8, "hypotheses": hypotheses, "share": share, "width": width}, 2)
        for hypotheses, share, width in ((1, 4, 24), (3, 2, 16), (1, 20, 16))
    ),
    # Any width and number of hypotheses.
    *(
        ((3, 20), {"size": 16, "hypotheses": hypotheses, "width": width, "heads": 1}, None)
        for hypotheses, width in ((5, 80), (2, 200), (1, 1), (1, 130), (17, 16))
    ),
    # Tiles lie within a page, or not; there are more pages than are needed.
    *(
        ((33, 70), {"size": size, "columns": columns, "hypotheses": hypotheses, "heads": 1}, 2)
        for size, columns, hypotheses in (
            *((32, 3, 1), (1, 70, 1), (75, 1, 2)),
            *((32, 3, 2), (1, 70, 2), (75, 1, 1)),
        )
    ),
]
_PUSHED = (0, 2, 3, 5, 8, 9, 13, 14, 15)


@pytest.mark.parametrize(
    ("of_keys", "options", "splits"),
    [
        pytest.param(*case, marks=[pytest.mark.extended] * (n not in _PUSHED))
        for n, case in enumerate(_CASES)
    ],
    ids=str,
)
def test_matches_the_reference(
    of_keys: tuple[int, ...],
    options: dict[str, int],
    splits: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    # What no sequence has is NaN, and its pages do not exist.
    narrow = draw(of_keys, **options).to("cpu", dtype)
    found = _kernel(narrow.to(device, dtype), splits=splits).cpu()
    assert_no_worse(found, _reference(narrow.to("cpu", torch.float64)), _reference(narrow))


@pytest.mark.parametrize(
    ("splits", "share", "width"), [(1, 1, 24), (3, 1, 24), (1, 4, 24), (3, 20, 16), (2, 2, 130)]
)
@pytest.mark.representative(width=24)
@pytest.mark.representative(share=20)
@pytest.mark.representative(width=130)
def test_new_keys_are_written_and_seen(
    splits: int, share: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    batch = draw(AWKWARD, size=8, share=share, width=width)
    new_k, new_v = torch.randn(2, len(AWKWARD), 2, width).to(dtype)
    narrow = batch.to("cpu", dtype)
    exact = batch.to("cpu", dtype).to("cpu", torch.float64)
    gold = _reference(exact, new_k=new_k.double(), new_v=new_v.double())
    baseline_batch = batch.to("cpu", dtype)
    there = replace(narrow, k_pages=narrow.k_pages.clone(), v_pages=narrow.v_pages.clone())
    there = there.to(device, dtype)
    baseline = _reference(baseline_batch, new_k=new_k, new_v=new_v)
    found = _kernel(there, new_k=new_k.to(device), new_v=new_v.to(device), splits=splits)
    assert_no_worse(found.cpu(), gold, baseline)
    for x, y in zip(there.arguments[1:3], baseline_batch.arguments[1:3], strict=True):
        assert torch.equal(x.cpu().nan_to_num(9.0), y.nan_to_num(9.0))


@pytest.mark.parametrize(("hypotheses", "splits"), [(1, 1), (1, 4), (3, 4)])
@pytest.mark.representative(splits=4)
def test_a_row_depends_on_its_sequence_alone_to_the_bit(
    hypotheses: int, splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    batch = draw((40, 0, 72, 9), size=8, hypotheses=hypotheses, heads=1).to(device, dtype)
    together = _kernel(batch, splits=splits).unflatten(0, (-1, hypotheses))
    for chosen in ([2], [3, 0], [0, 1, 2, 3]):
        alone = _kernel(batch.choose(chosen), splits=splits)
        assert torch.equal(alone.unflatten(0, (-1, hypotheses)), together[chosen])


def test_tensors_need_not_be_contiguous(dtype: torch.dtype, device: torch.device) -> None:
    batch = draw((13, 5), size=8, hypotheses=2, width=16).to(device, dtype)
    strided = Paged(
        torch.stack([batch.q, torch.full_like(batch.q, torch.nan)], dim=-1)[..., 0],
        # Heads before rows, and keys and values side by side.
        torch.stack([batch.k_pages, batch.v_pages]).transpose(2, 3).contiguous()[0].transpose(1, 2),
        torch.cat([batch.k_pages, batch.v_pages], dim=-1)[..., 16:],
        batch.page_table.t().contiguous().t(),
        batch.lengths.repeat_interleave(2)[::2],
    )
    assert torch.equal(_kernel(strided), _kernel(batch))


def test_a_page_that_does_not_exist_is_nan_and_alone(
    dtype: torch.dtype, device: torch.device
) -> None:
    batch = draw((9, 9, 9), size=8).to(device, dtype)
    table = batch.page_table.clone()
    table[0, 1], table[2, 0] = -1, batch.k_pages.shape[0]
    for hypotheses in (1, 2):
        q = batch.q.repeat_interleave(hypotheses, 0)
        found = _kernel(replace(batch, q=q, page_table=table)).unflatten(0, (3, hypotheses))
        assert found.isnan().flatten(1).all(1).tolist() == [True, False, True]
        assert not found[1].isnan().any()


def test_a_length_past_the_pages_counts_as_all(dtype: torch.dtype, device: torch.device) -> None:
    batch = draw((16,), size=8).to(device, dtype)
    longer = replace(batch, lengths=torch.full_like(batch.lengths, 17))
    assert torch.equal(_kernel(longer), _kernel(batch))


@pytest.mark.parametrize(
    ("columns", "size", "heads", "splits"),
    [
        (1, 256, 8, 1),
        (1, 257, 8, 2),
        (6, 64, 8, 2),
        (24, 64, 8, 6),
        (1000, 64, 8, 32),
        (4, 64, 1, 1),
    ],
)
def test_splits_come_from_static_shapes(columns: int, size: int, heads: int, splits: int) -> None:
    assert _triton.default_splits(columns, size, heads, 132) == splits


def test_a_graph_follows_lengths_and_pages(device: torch.device) -> None:
    """Recorded once, replayed for each token."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    batch = draw((5, 12), size=4, columns=3).to(device, torch.float32)
    assert len(batch.k_pages) == 7
    new_k, new_v = torch.randn(2, *batch.q.shape, device=device)
    call = lambda: _kernel(batch, new_k=new_k, new_v=new_v, splits=2)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for keys in ((1, 2), (6, 0), (12, 11)):
        # Each sequence takes three of the seven pages, which are filled anew.
        pages = torch.randperm(7, device=device)[:6].view(2, 3)
        batch.page_table.copy_(pages)
        batch.lengths.copy_(torch.tensor(keys))
        batch.k_pages.normal_()
        batch.v_pages.normal_()
        graph.replay()
        assert torch.equal(found, call())
