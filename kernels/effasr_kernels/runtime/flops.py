"""The floating-point work of packed sequences, for `torch.utils.flop_counter.FlopCounterMode`.

Multiplications and additions of matrix products, counted sequence by sequence, as the model needs
them: neither padding, nor what an implementation computes again or in excess.
"""

from __future__ import annotations

from effasr_kernels.packed import PackedLayout


def known_lengths(layout: PackedLayout) -> tuple[int, ...]:
    """The lengths; equal shares of the rows where the layout is fake and holds none."""
    if layout.cu_seqlens_host:
        return layout.lengths
    sequences = layout.cu_seqlens.shape[0] - 1
    return (layout.rows // max(1, sequences),) * sequences


def pairs(layout_q: PackedLayout, layout_k: PackedLayout, causal: bool = False) -> int:
    """How many pairs of a query and a key attention scores."""
    total = 0
    for t_q, t_k in zip(known_lengths(layout_q), known_lengths(layout_k), strict=True):
        if causal:
            # Query i sees i + 1 keys, until it sees all.
            triangle = min(t_q, t_k)
            total += triangle * (triangle + 1) // 2 + (t_q - triangle) * t_k
        else:
            total += t_q * t_k
    return total
