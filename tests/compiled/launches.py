"""What calls of operations launch, recorded without a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from effasr_kernels import (
    OPERATIONS,
    PackedLayout,
    append_to_pages,
    audio_windows,
    decode_attention,
    mask_features,
    normalize_features,
    projected_top_k,
    update_running_statistics,
)
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.runtime.torch_op import DifferentiableOp
from tests.support.conformance import Variation, evaluate
from tests.support.operation_cases import FACTORIES

Record = Callable[..., list[Launch]]


def names(launches: list[Launch]) -> set[str]:
    return {launch.kernel.fn.__name__ for launch in launches}


def of_kernels(launches: list[Launch], *beginnings: str) -> list[Launch]:
    return [launch for launch in launches if launch.kernel.fn.__name__.startswith(beginnings)]


def _differentiated(
    name: str,
    architecture: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    *,
    lengths: tuple[int, ...] = (150, 300),
    tail: int = 62,
    **options: Any,
) -> list[Launch]:
    """Forward and backward of a case."""
    case = FACTORIES[name](lengths, **options)("triton")
    with recording(divmod(architecture, 10)) as launches:
        evaluate(case, Variation(dtype=dtype, tail=tail))
    return launches


def _append(
    architecture: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 300,
    size: int = 64,
    columns: int = 6,
) -> list[Launch]:
    k, pages = (torch.empty(*n, 8, 128, dtype=dtype) for n in ((rows,), (99, size)))
    table = torch.zeros(rows, columns, dtype=torch.int32)
    with recording(divmod(architecture, 10)) as launches:
        append_to_pages(k, k, pages, pages, table, table[:, 0], backend="triton")
    return launches


def _decode(
    architecture: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sequences: int = 32,
    hypotheses: int = 1,
    heads: int = 8,
    share: int = 1,
    width: int = 128,
    size: int = 64,
    columns: int = 6,
    new: bool = False,
    splits: int | None = None,
) -> list[Launch]:
    q = torch.empty(sequences * hypotheses, heads, width, dtype=dtype)
    pages = q.new_empty(sequences * columns + 1, size, heads // share, width)
    added = q.new_empty(sequences, heads // share, width) if new else None
    table = torch.zeros(sequences, columns, dtype=torch.int32)
    options = {"new_k": added, "new_v": added, "splits": splits, "backend": "triton"}
    with recording(divmod(architecture, 10)) as launches:
        y = decode_attention(q, pages, pages, table, table[:, 0].contiguous(), **options)
    assert y.shape == q.shape
    return launches


def _top_k(
    architecture: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 32,
    width: int = 1024,
    count: int = 5_248,
    k: int = 1,
    bias: bool = True,
) -> list[Launch]:
    hidden, weight = (torch.empty(n, width, dtype=dtype) for n in (rows, count))
    offset = hidden.new_empty(count) if bias else None
    with recording(divmod(architecture, 10)) as launches:
        results = projected_top_k(hidden, weight, bias=offset, k=k, backend="triton")
    expected = [((rows, k), torch.float32), ((rows, k), torch.int64)]
    assert [(x.shape, x.dtype) for x in results] == expected
    return launches


def _features(
    operation: str,
    architecture: int = 90,
    dtype: torch.dtype = torch.float32,
    *,
    mels: int = 128,
    slot: int = 8,
    n_fft: int = 512,
    log_guard: float = 2.0**-24,
    lengths: tuple[int, ...] = (150, 300),
    tail: int = 62,
) -> list[Launch]:
    layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + tail)
    x, real = torch.empty(slot * layout.rows, mels, dtype=dtype), torch.tensor(lengths) * slot
    options: dict[str, Any] = {"rows_per_slot": slot, "backend": "triton"}
    with recording(divmod(architecture, 10)) as launches:
        if operation == "normalize_features":
            normalize_features(x, real, layout, log_guard=log_guard, **options)
        elif operation == "mask_features":
            shares = {"freq_shares": torch.rand(2, len(lengths), 2), "freq_width": 27}
            shares |= {"time_shares": torch.rand(2, len(lengths), 10), "time_width": 0.05}
            mask_features(x, real, layout, **options, **shares)
        else:
            samples = PackedLayout.from_lengths([slot * 160 * n for n in lengths])
            given = torch.empty(samples.rows), torch.empty(400), samples, layout
            slots = tail // 2, layout.rows
            options |= {"hop": 160, "n_fft": n_fft, "preemphasis": 0.97, "slots": slots}
            audio_windows(*given, **options)
    return launches


def _update(
    architecture: int = 90,
    dtype: torch.dtype = torch.float32,
    *,
    channels: int = 512,
    lengths: tuple[int, ...] = (150, 300),
    tail: int = 62,
) -> list[Launch]:
    layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + tail)
    parameters = [torch.empty(channels, dtype=dtype) for _ in range(4)]
    with recording(divmod(architecture, 10)) as launches:
        update_running_statistics(
            *(*parameters[:2], torch.tensor(0), *parameters[2:], layout), backend="triton"
        )
    return launches


RECORD: dict[str, Record] = {
    **{
        x: partial(_differentiated, x)
        for x, op in OPERATIONS.items()
        if isinstance(op, DifferentiableOp)
    },
    **{x: partial(_features, x) for x in ("audio_windows", "mask_features", "normalize_features")},
    "append_to_pages": _append,
    "decode_attention": _decode,
    "projected_top_k": _top_k,
    "update_running_statistics": _update,
}
"""Called with architecture, dtype and options."""
