"""Floating-point operations of packed sequences for `torch.utils.flop_counter.FlopCounterMode`.

The counts are the multiplications and additions of matrix products, summed over sequences. They
include neither padding nor work that an implementation repeats or does in excess.
"""

from effasr_kernels.packed import PackedLayout


def known_lengths(layout: PackedLayout) -> tuple[int, ...]:
    """The lengths of the sequences; for a fake layout, equal shares of the rows."""
    if layout.cu_seqlens_host:
        return layout.lengths
    sequences = layout.cu_seqlens.shape[0] - 1
    return (layout.rows // max(1, sequences),) * sequences


def pairs(layout_q: PackedLayout, layout_k: PackedLayout, causal: bool = False) -> int:
    """Number of pairs of a query and a key that attention scores."""
    total = 0
    for t_q, t_k in zip(known_lengths(layout_q), known_lengths(layout_k), strict=True):
        if causal:
            # Query i attends to min(i + 1, t_k) keys.
            triangle = min(t_q, t_k)
            total += triangle * (triangle + 1) // 2 + (t_q - triangle) * t_k
        else:
            total += t_q * t_k
    return total
