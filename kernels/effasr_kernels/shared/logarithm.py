"""A fast binary logarithm of 1 + s for log-sum-exp recursions in kernels."""

import triton
import triton.language as tl  # noqa: F401 -- Triton's interpreter looks for it


@triton.jit
def log2_of_more(s):
    """The binary logarithm of 1 + s, float32, for s in [0, 1]."""
    # It is computed as s + s R(s), with the minimax polynomial R of degree 8. The absolute error is
    # at most 9.2e-8 and the relative error 1.1e-7, as the sum 1 + s, which would round small s
    # away, is not computed. The general logarithm takes four times as many instructions, which
    # dominated the sweeps of the lattices.
    r = s * 0.007549183443188667 - 0.042567066848278046
    r = r * s + 0.11285620182752609
    r = r * s - 0.19711898267269135
    r = r * s + 0.27564141154289246
    r = r * s - 0.35840848088264465
    r = r * s + 0.48069295287132263
    r = r * s - 0.7213401794433594
    r = r * s + 0.4426949918270111
    return r * s + s
