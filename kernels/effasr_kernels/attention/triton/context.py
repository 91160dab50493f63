"""The keys that a query sees and the queries that see a key, for `effasr_kernels.Context`.

Kernels take ``left``, ``right`` and ``chunk`` as numbers, so that all contexts share a binary;
without a context they are None, which is a constant. A context changes the bounds of the loops, so
that work falls with it, and masks what the tiles at the bounds see too much of.

The buffer of relative scores is used from the first to the last key that a row sees, rounded to
groups of 8 columns (`groups_seen`), which a load reads. The rest of it is not written.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def keys_seen(query, left, right, chunk):
    """First key and one past the last key that a query sees, not limited to its sequence."""
    first = query // chunk * chunk
    return first - left, first + chunk + right


@triton.jit
def groups_seen(query, left, right, chunk):
    """`keys_seen`, rounded to whole groups of 8 keys; the first is at least 0."""
    first, end = keys_seen(query, left, right, chunk)
    return tl.maximum(first, 0) // 8 * 8, (end + 7) // 8 * 8


@triton.jit
def keys_of_tile(start, last, length, left, right, chunk, BLOCK: tl.constexpr):
    """First key and one past the last key that the queries from ``start`` to ``last`` see."""
    first, _ = keys_seen(start, left, right, chunk)
    _, end = keys_seen(last, left, right, chunk)
    return tl.maximum(first, 0) // BLOCK * BLOCK, tl.minimum(end, length)


@triton.jit
def queries_of_tile(start, last, length, left, right, chunk, BLOCK: tl.constexpr):
    """First query and one past the last query that see one of the keys ``start`` to ``last``."""
    # The same arguments as of `keys_of_tile`, with keys and queries exchanged.
    first = tl.maximum(start - right, 0) // chunk * chunk
    end = ((last + left) // chunk + 1) * chunk
    return first // BLOCK * BLOCK, tl.minimum(end, length)


@triton.jit
def diagonals_of_tile(last, keys, shift, left, right, chunk, BLOCK: tl.constexpr):
    """Range of the diagonals of a tile of queries that hold a group that a query sees."""
    # Diagonal g holds key g of the last query, and for each query before it one key less.
    first = tl.maximum(last - left - chunk - 7, 0) // BLOCK * BLOCK
    return first, tl.minimum(last + chunk + right + 7, keys + shift)
