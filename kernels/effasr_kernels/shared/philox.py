"""Counter-based random numbers in kernels, independent of the tile sizes."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

_ROUNDS = tl.constexpr(7)


@triton.jit
def keep_mask(
    seed, sequence, head, row, column, probability, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Which attention weights of a tile survive dropout: bool (BLOCK_M, BLOCK_N)."""
    # Each decision depends on the seed, the sequence's number, the head, and the row and column
    # within the sequence; it depends neither on the shape of the tile nor on the other sequences.
    # One call of Philox (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405) decides on
    # eight weights, 16 bits each, so ``probability`` is rounded to a multiple of 2^-16. The eight
    # are those of a 16 x 16 block that one thread holds after a product on tensor cores: rows i and
    # i + 8, columns 2 j, 2 j + 1, 2 j + 8 and 2 j + 9. The counters are the index of i among the
    # first rows of the pairs, the index of j likewise, the head and the sequence. Of the four
    # words, the second and the fourth are for columns + 8, the last two for row + 8, and the upper
    # half of each is for the odd column.
    rows = (row // 2 + tl.arange(0, BLOCK_M // 2))[:, None]
    columns = (column // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    zero = rows * 0 + columns * 0
    w0, w1, w2, w3 = tl.philox(
        seed, rows + zero, columns + zero, head + zero, sequence + zero, _ROUNDS
    )
    # tl.full, as the interpreter passes a Python float, which has no ``to``.
    threshold = tl.full((), probability * 65536 + 0.5, tl.float32).to(tl.uint32)
    upper = tl.join(_halves(w0, threshold), _halves(w1, threshold))
    lower = tl.join(_halves(w2, threshold), _halves(w3, threshold))
    split = tl.reshape(tl.join(upper, lower), (BLOCK_M // 16, 8, BLOCK_N // 16, 4, 2, 2, 2))
    # Dimensions: block and index of a row, block and index of a column, odd column, column + 8,
    # row + 8.
    return tl.reshape(tl.permute(split, (0, 6, 1, 2, 5, 3, 4)), (BLOCK_M, BLOCK_N))


@triton.jit
def _halves(word, threshold):
    return tl.join((word & 0xFFFF) >= threshold, (word >> 16) >= threshold)


@triton.jit
def keep_elements(
    seed, row, column, offset, probability, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Which elements of a tile of a matrix survive dropout: bool (BLOCK_R, BLOCK_C)."""
    # One call of Philox decides on eight elements, as in `keep_mask`: rows 2 i and 2 i + 1, columns
    # 4 j to 4 j + 3, which one thread can hold. The counters are i, j, the offset and 2^32 - 1,
    # where attention has the number of a sequence: one seed serves both. Of the four words, each is
    # for one column, and the upper half for the odd row. In PyTorch, `kept_elements` of
    # `effasr_kernels.shared.dropout` computes the same.
    i = (row // 2 + tl.arange(0, BLOCK_R // 2))[:, None]
    j = (column // 4 + tl.arange(0, BLOCK_C // 4))[None, :]
    zero = i * 0 + j * 0
    w0, w1, w2, w3 = tl.philox(seed, i + zero, j + zero, offset + zero, zero - 1, _ROUNDS)
    # tl.full, as the interpreter passes a Python float, which has no ``to``.
    threshold = tl.full((), probability * 65536 + 0.5, tl.float32).to(tl.uint32)
    first = tl.join(_halves(w0, threshold), _halves(w1, threshold))
    second = tl.join(_halves(w2, threshold), _halves(w3, threshold))
    # Dimensions: i, j, odd row, odd column, last two columns.
    split = tl.permute(tl.join(first, second), (0, 2, 1, 4, 3))
    return tl.reshape(split, (BLOCK_R, BLOCK_C))
