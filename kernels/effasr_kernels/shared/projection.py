"""Projections to a vocabulary that never store all logits: row statistics and gradients for losses.

The forward is one fused kernel: it computes tiles of logits and reduces them to a few numbers per
row. The backward recomputes the logits in chunks of rows, so that its three products run at the
speed of cuBLAS and its memory does not grow with the number of rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import capability, ceil_div, launch

_FINISHED_ROWS = 32
_PROGRAMS = 1024
"""Target number of programs: several waves on a GPU, so that a partial last wave costs little."""
_WORKSPACE = 2**24
"""Size of the backward's buffer of logits, in elements of float32: 64 MiB."""

_FEWEST_ROWS = 1024
"""Minimum rows of a chunk in the backward: products with fewer rows would be slow."""


class RowStatistics(NamedTuple):
    """Statistics of each row of logits z (R, V); zero in ignored rows."""

    log_normalizer: Tensor  # L = log sum_v exp z_v, float32 (R,)
    class_logit: Tensor | None  # logit z_y of the row's class y, float32 (R,); None without classes
    mean: Tensor | None  # mean of z_v over v, float32 (R,); None unless requested


def row_statistics(
    hidden: Tensor,  # (R, C), float32, float16 or bfloat16
    weight: Tensor,  # (V, C), the dtype of `hidden`
    bias: Tensor | None,  # (V,), the dtype of `hidden`, or None
    classes: Tensor | None = None,  # (R,), int32 or int64; outside [0, V) ``class_logit`` is NaN
    *,
    ignore_index: int | None = None,  # the class of ignored rows
    total: Tensor | None = None,  # int32 (1,), on the device: rows from ``total`` on are ignored
    with_mean: bool = False,  # whether to compute the mean; it needs no classes
    # Output, (R, V), the dtype of ``hidden``, with a row stride that is a multiple of 16: receives
    # the logits of rows that are not ignored, rounded (the statistics are computed before
    # rounding). The elements between rows are undefined.
    logits: Tensor | None = None,
) -> RowStatistics:
    """Reduce each row of ``hidden @ weight.T + bias`` to a few numbers; see `RowStatistics`."""
    # Ignored rows may hold any values, and a tile of ignored rows is skipped. The vocabulary is
    # divided among programs by shapes alone, and its parts are merged in order, so results are
    # bitwise reproducible.
    config = product_tiles(hidden.dtype, capability(hidden.device))
    rows, count = hidden.shape[0], weight.shape[0]
    hidden, weight = aligned(hidden, config["BLOCK_C"]), aligned(weight, config["BLOCK_C"])
    bias = None if bias is None else bias.contiguous()
    classes = None if classes is None else classes.contiguous()
    selection = classes, total, ignore_index, rows
    strides = hidden.stride(0), weight.stride(0)
    per_split, splits = _split(rows, count, config["BLOCK_R"], config["BLOCK_V"])
    # Two tensors, as the second half of a single one would not be aligned for all numbers of rows.
    largest = hidden.new_empty(splits, rows, dtype=torch.float32)
    mass = torch.empty_like(largest)
    launch(
        _partial_normalizers,
        (ceil_div(rows, config["BLOCK_R"]), splits),
        *(hidden, weight, bias, *selection, largest, mass, logits),
        *(count, *strides, 0 if logits is None else logits.stride(0), per_split),
        WIDTH=hidden.shape[1],
        **config,
    )
    # The mean of the logits is the logit of the mean weight; both are rounded to float32.
    average = weight.mean(0, dtype=torch.float32) if with_mean else None
    average_bias = bias.mean(dtype=torch.float32) if with_mean and bias is not None else None
    results = [
        hidden.new_empty(rows, dtype=torch.float32) if is_requested else None
        for is_requested in (True, classes is not None, with_mean)
    ]
    launch(
        _finish_statistics,
        (ceil_div(rows, _FINISHED_ROWS),),
        *(hidden, weight, bias, *selection, largest, mass),
        *(average, average_bias, *results),
        *(count, *strides, splits),
        num_warps=4,
        num_stages=2,
        WIDTH=hidden.shape[1],
        BLOCK_R=_FINISHED_ROWS,
        BLOCK_C=config["BLOCK_C"],
    )
    return RowStatistics(*results)  # type: ignore[arg-type]


def project_backward(
    hidden: Tensor,  # (R, C), float32, float16 or bfloat16
    weight: Tensor,  # (V, C), the dtype of `hidden`
    bias: Tensor | None,  # (V,), the dtype of `hidden`, or None
    counted: Tensor,  # (R,), bool: False for ignored rows, which may hold NaN
    # Called with ``first``, ``logits``, float32 (n, V), of the rows ``first:first + n``, without
    # the bias, and ``d_logits``. It writes the gradient of these logits to all of ``d_logits``,
    # (n, V), in the dtype of ``hidden``, with zeros in ignored rows; there ``logits`` is zero. Both
    # have the row stride ``logits.stride(0)``, and it may write between the rows. For float32
    # ``d_logits`` is ``logits``, so that an element must depend only on its own logit.
    write_grad_logits: Callable[[int, Tensor, Tensor], None],
    *,
    padded: bool = False,  # whether ``logits.stride(0)`` may be V up to a multiple of 16 (faster)
    rounded: bool = True,  # whether to round the gradients to the dtypes of the arguments
    frozen: bool = False,  # whether to leave out the gradients of weight and bias
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of a projection from a function of its logits."""
    # Rows are processed in chunks of `chunk_rows`, which depends on shapes alone. The logits are
    # float32, without rounding; their gradient is rounded to the dtype of ``hidden`` for the next
    # products; the gradients of weight and bias are summed in float32 and rounded once. The memory
    # beside the results is 4 bytes for each element of weight and, if V is at least C, 4 + b bytes
    # for each logit of a chunk, with b the bytes of an element of ``hidden`` (4 bytes for float32).
    # Returns the gradients of hidden, weight and bias, in their dtypes or, if not ``rounded``,
    # float32; None for those that are left out.
    (rows, width), count = hidden.shape, weight.shape[0]
    pitch = ceil_div(count, 16) * 16 if padded else count
    step = min(rows, chunk_rows(max(count, width)))
    is_narrow = hidden.dtype != torch.float32
    d_hidden = hidden.new_empty(hidden.shape, dtype=None if rounded else torch.float32)
    # The clean rows are stored where their gradient will be, so they need no further memory.
    in_place = d_hidden.dtype == hidden.dtype
    spare = d_hidden if in_place else hidden.new_empty(step, width)
    d_weight = d_bias = None
    if not frozen:
        # The first chunk writes them.
        make = torch.empty_like if rows else torch.zeros_like
        contiguous = torch.contiguous_format
        d_weight = make(weight, dtype=torch.float32, memory_format=contiguous)
        d_bias = bias if bias is None else make(bias, dtype=torch.float32)
    buffer = hidden.new_empty(step * max(pitch, width), dtype=torch.float32)
    logits = d_logits = buffer[: step * pitch].view(step, pitch)[:, :count]
    if is_narrow:
        d_logits = hidden.new_empty(step, pitch)[:, :count]
    zero = hidden.new_zeros(())
    for first in range(0, rows, step or 1):
        n = min(step, rows - first)
        # Ignored rows are zeroed, as zero times NaN would put NaN in the weight's gradient.
        clean = spare[first : first + n] if in_place else spare[:n]
        torch.where(counted[first : first + n, None], hidden[first : first + n], zero, out=clean)
        multiply(clean, weight.t(), logits[:n])
        write_grad_logits(first, logits[:n], d_logits[:n])
        if d_weight is not None:
            (multiply_add if first else multiply)(d_logits[:n].t(), clean, d_weight)
        if d_bias is not None and first:
            d_bias += d_logits[:n].sum(0, dtype=torch.float32)
        elif d_bias is not None:
            torch.sum(d_logits[:n], 0, dtype=torch.float32, out=d_bias)
        if is_narrow and in_place:
            # A product into a narrow dtype may round its partial sums. The logits' buffer is free.
            wide = buffer[: n * width].view(n, width)
            multiply(d_logits[:n], weight, wide)
            clean.copy_(wide)
        else:
            multiply(d_logits[:n], weight, d_hidden[first : first + n])
    if rounded:
        d_weight, d_bias = (x if x is None else x.to(weight.dtype) for x in (d_weight, d_bias))
    return d_hidden, d_weight, d_bias


def chunk_rows(width: int) -> int:
    """Rows of a chunk in `project_backward`, where ``width`` is the larger of V and C."""
    # A multiple of 128 keeps each chunk's first row aligned, so that all chunks use one binary.
    return max(_FEWEST_ROWS, _WORKSPACE // max(1, width) // 128 * 128)


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``out = left @ right`` for a float32 ``out`` with any row stride."""
    # cuBLAS takes the row stride, and neither reads ``out`` nor writes between its rows.
    if left.dtype == torch.float32:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        # On the CPU, where the interpreter runs, torch has no product with a wider result.
        out.copy_(torch.mm(left.float(), right.float()))


def multiply_add(left: Tensor, right: Tensor, out: Tensor) -> None:
    """``out += left @ right`` for a float32 ``out``."""
    # On CUDA torch 2.10 and later add narrow factors to a float32 sum; torch 2.9 refuses it
    # (https://github.com/pytorch/pytorch/pull/167931).
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    else:
        torch.addmm(out, left.float(), right.float(), out=out)


def aligned(x: Tensor, block: int) -> Tensor:
    """Return the matrix, or a copy with rows of whole blocks, aligned for vector loads."""
    # A copy is padded with zeros, which change no logit.
    missing = -x.shape[1] % block
    if missing:
        return F.pad(x, (0, missing))
    if x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _split(rows: int, count: int, block_r: int, block_v: int) -> tuple[int, int]:
    """Number of vocabulary tiles per program, and of programs per row."""
    tiles = ceil_div(count, block_v)
    splits = ceil_div(_PROGRAMS, max(1, ceil_div(rows, block_r)))
    per_split = ceil_div(tiles, max(1, min(splits, tiles)))
    return per_split, ceil_div(tiles, max(1, per_split))


def product_tiles(dtype: torch.dtype, gpu: tuple[int, int]) -> dict[str, int]:
    """Tile sizes, ``num_warps`` and ``num_stages`` of a product of rows with a vocabulary."""
    if dtype == torch.float32:
        # Without tensor cores, which would round float32 to TF32, registers limit the tile.
        return {"BLOCK_R": 64, "BLOCK_V": 64, "BLOCK_C": 32, "num_warps": 4, "num_stages": 2}
    # With 128 registers a thread and half of the shared memory, two programs share a
    # multiprocessor, and the exponentials of one overlap with the products of the other. These are
    # the sizes that fit on each generation.
    block_c, stages = (64, 3) if gpu[0] == 9 else (32, 4)
    tile = {"BLOCK_R": 128, "BLOCK_V": 128, "BLOCK_C": block_c}
    return {**tile, "num_warps": 8, "num_stages": stages}


@triton.jit
def _is_counted(row, classes, total, ignore_index, rows):
    counted = row < rows
    if total is not None:
        counted = counted & (row < tl.load(total))
    if classes is not None and ignore_index is not None:
        counted = counted & (tl.load(classes + row, mask=counted, other=0) != ignore_index)
    return counted


@triton.jit(do_not_specialize=["ignore_index", "rows", "tiles_per_split"])
def _partial_normalizers(
    hidden,
    weight,
    bias,
    classes,
    total,
    ignore_index,
    rows,
    partial_largest,
    partial_mass,
    logits,
    count,
    hidden_stride,
    weight_stride,
    logits_stride,
    tiles_per_split,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Reduce the logits of a tile of rows and one part of the vocabulary."""
    # Program (r, s) writes, for each of its rows, the largest logit m over the classes of part s
    # and the sum over v of exp(z_v - m).
    first_row = tl.program_id(0) * BLOCK_R
    split = tl.program_id(1)
    in_rows = tl.arange(0, BLOCK_R)
    in_classes = tl.arange(0, BLOCK_V)
    in_width = tl.arange(0, BLOCK_C)
    row = first_row + in_rows
    counted = _is_counted(row, classes, total, ignore_index, rows)
    if tl.max(counted.to(tl.int32), axis=0) == 0:
        return

    # Rows and classes past the end load the last one instead, and their results are masked, so that
    # the loads of the inner loop need no mask.
    h_tile = hidden + first_row.to(tl.int64) * hidden_stride + in_width[None, :]
    h_tile += tl.minimum(in_rows, rows - 1 - first_row)[:, None] * hidden_stride
    largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_R,), tl.float32)
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tl.cdiv(count, BLOCK_V))
    for tile in range(begin, end):
        first_class = tile * BLOCK_V
        v = first_class + in_classes
        w_tile = weight + first_class.to(tl.int64) * weight_stride + in_width[None, :]
        w_tile += tl.minimum(in_classes, count - 1 - first_class)[:, None] * weight_stride
        # The sum starts from the bias, and from -inf for classes past the end.
        start = tl.zeros((BLOCK_V,), tl.float32)
        if bias is not None:
            start = tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)
        start = tl.where(v < count, start, float("-inf"))
        z = tl.zeros((BLOCK_R, BLOCK_V), tl.float32) + start[None, :]
        for c in range(0, WIDTH, BLOCK_C):
            h = tl.load(h_tile + c)
            w = tl.load(w_tile + c)
            z = tl.dot(h, tl.trans(w), z, input_precision="ieee")
        if logits is not None:
            z_tile = logits + first_row.to(tl.int64) * logits_stride + first_class
            z_tile += in_rows[:, None] * logits_stride + in_classes[None, :]
            # A mask at V instead of the stride would store single elements.
            stored = counted[:, None] & (v < logits_stride)[None, :]
            tl.store(z_tile, z.to(logits.dtype.element_ty), mask=stored)
        larger = tl.maximum(largest, tl.max(z, axis=1))
        # If all logits so far are -inf, their difference to the maximum would be NaN.
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - pivot) + tl.sum(tl.exp(z - pivot[:, None]), axis=1)
        largest = larger

    index = split.to(tl.int64) * rows + row
    tl.store(partial_largest + index, largest, mask=counted)
    tl.store(partial_mass + index, mass, mask=counted)


@triton.jit(do_not_specialize=["ignore_index", "rows", "splits"])
def _finish_statistics(
    hidden,
    weight,
    bias,
    classes,
    total,
    ignore_index,
    rows,
    partial_largest,
    partial_mass,
    mean_weight,
    mean_bias,
    log_normalizer,
    class_logit,
    mean,
    count,
    hidden_stride,
    weight_stride,
    splits,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merge the parts of the vocabulary, and compute the class's logit and the mean."""
    first_row = tl.program_id(0) * BLOCK_R
    in_rows = tl.arange(0, BLOCK_R)
    in_width = tl.arange(0, BLOCK_C)
    row = first_row + in_rows
    counted = _is_counted(row, classes, total, ignore_index, rows)
    largest = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_R,), tl.float32)
    index = row.to(tl.int64)
    for _ in range(0, splits):
        part = tl.load(partial_largest + index, mask=counted, other=float("-inf"))
        part_mass = tl.load(partial_mass + index, mask=counted, other=0.0)
        larger = tl.maximum(largest, part)
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - pivot) + part_mass * tl.exp(part - pivot)
        largest = larger
        index += rows
    normalizer = tl.where(counted, largest + tl.log(tl.where(counted, mass, 1.0)), 0.0)
    tl.store(log_normalizer + row, normalizer, mask=row < rows)

    h_tile = hidden + first_row.to(tl.int64) * hidden_stride
    h_tile += in_rows[:, None] * hidden_stride + in_width[None, :]
    if class_logit is not None:
        label_class = tl.load(classes + row, mask=counted, other=0).to(tl.int64)
        exists = counted & (label_class >= 0) & (label_class < count)
        logit = tl.zeros((BLOCK_R,), tl.float32)
        if bias is not None:
            logit = tl.load(bias + label_class, mask=exists, other=0.0).to(tl.float32)
        w_tile = weight + label_class[:, None] * weight_stride + in_width[None, :]
        for c in range(0, WIDTH, BLOCK_C):
            h = tl.load(h_tile + c, mask=exists[:, None], other=0.0).to(tl.float32)
            w = tl.load(w_tile + c, mask=exists[:, None], other=0.0).to(tl.float32)
            logit += tl.sum(h * w, axis=1)
        logit = tl.where(exists, logit, float("nan"))
        tl.store(class_logit + row, tl.where(counted, logit, 0.0), mask=row < rows)
    if mean is not None:
        logit = tl.zeros((BLOCK_R,), tl.float32)
        if mean_bias is not None:
            logit += tl.load(mean_bias)
        for c in range(0, WIDTH, BLOCK_C):
            h = tl.load(h_tile + c, mask=counted[:, None], other=0.0).to(tl.float32)
            logit += tl.sum(h * tl.load(mean_weight + c + in_width)[None, :], axis=1)
        tl.store(mean + row, tl.where(counted, logit, 0.0), mask=row < rows)
