"""Counter-based random numbers in kernels, independent of the tile sizes."""

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
    # 16 weights, 8 bits each, as in FlashAttention-2; ``probability`` is a multiple of 2^-8. The 16
    # are those of a 16 x 32 block that one thread holds after a product on tensor cores: rows i and
    # i + 8, columns 2 j and 2 j + 1, and those 8, 16 and 24 after them. The counters are the index
    # of i among the first rows of the pairs, the index of j likewise, the head and the sequence.
    # A word decides on the rows i and i + 8 and two columns that are 8 apart: a thread holds these
    # four in tiles of the backward, too, which are transposed, so that only words are exchanged.
    # The second and the fourth word are for odd columns, the last two for columns + 16; of the four
    # bytes, the second and the fourth are for columns + 8, the last two for row + 8.
    rows = (row // 2 + tl.arange(0, BLOCK_M // 2))[:, None]
    calls: tl.constexpr = max(BLOCK_N // 8, 4)  # type: ignore
    columns = (column // 32 * 4 + tl.arange(0, calls))[None, :]
    zero = rows * 0 + columns * 0
    w0, w1, w2, w3 = tl.philox(
        seed, rows + zero, columns + zero, head + zero, sequence + zero, _ROUNDS
    )
    if BLOCK_N < 32:
        right = tl.full((), 0, tl.uint32) - (column // 16 % 2).to(tl.uint32)
        words = tl.join(w0 ^ ((w0 ^ w2) & right), w1 ^ ((w1 ^ w3) & right))
    else:
        split = tl.join(tl.join(w0, w1), tl.join(w2, w3))
        # Dimensions: row, block and index of a column, odd column, column + 16.
        split = tl.reshape(split, (BLOCK_M // 2, BLOCK_N // 32, 4, 2, 2))
        words = tl.permute(split, (0, 1, 4, 2, 3))
    words = tl.reshape(words, (BLOCK_M // 16, 1, 8, BLOCK_N // 16, 1, 8))
    lower = tl.reshape(tl.arange(0, 2), (1, 2, 1, 1, 1, 1))
    right = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2, 1))
    keep = _is_kept(words, lower * 2 + right, probability)
    return tl.reshape(keep, (BLOCK_M, BLOCK_N))


@triton.jit
def _is_kept(words, byte, probability):
    """Whether bytes of words are at least the probability's multiple of 2^-8."""
    # Shifted to the top, where the bits below change nothing. tl.full, as the interpreter passes a
    # Python float, which has no ``to``.
    threshold = tl.full((), probability * 256, tl.float32).to(tl.uint32) << 24
    return (words << (24 - 8 * byte).to(tl.uint32)) >= threshold


@triton.jit
def keep_elements(
    seed, row, column, offset, probability, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Which elements of a tile of a matrix survive dropout: bool (BLOCK_R, BLOCK_C)."""
    # One call of Philox decides on 16 elements, as in `keep_mask`: rows 4 i to 4 i + 3, columns 4 j
    # to 4 j + 3, which one thread can hold. The counters are i, j, the offset and 2^32 - 1, where
    # attention has the number of a sequence: one seed serves both. Each of the four words is for
    # one column, and its bytes are for the rows. In PyTorch, `kept_elements` of
    # `effasr_kernels.shared.dropout` computes the same.
    among: tl.constexpr = min(BLOCK_R, 4)  # type: ignore
    groups: tl.constexpr = BLOCK_R // among
    i = (row // 4 + tl.arange(0, groups))[:, None]
    j = (column // 4 + tl.arange(0, BLOCK_C // 4))[None, :]
    zero = i * 0 + j * 0
    w0, w1, w2, w3 = tl.philox(seed, i + zero, j + zero, offset + zero, zero - 1, _ROUNDS)
    # Dimensions: i, j, odd column, last two columns.
    split = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 1, 3, 2))
    words = tl.reshape(split, (groups, 1, BLOCK_C))
    byte = tl.reshape(row % 4 + tl.arange(0, among), (1, among, 1))
    return tl.reshape(_is_kept(words, byte, probability), (BLOCK_R, BLOCK_C))
