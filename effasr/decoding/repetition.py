"""Tokens that would repeat an n-gram of a hypothesis."""

from __future__ import annotations

import torch
from torch import Tensor


def repeats_ngram(labels: Tensor, symbols: Tensor, size: int) -> Tensor:
    """Return whether each symbol would end an n-gram that its hypothesis has already.

    Args:
        labels: int64 (N, K, steps), the tokens so far; -1 in steps that read a prompt, which are
            part of no n-gram.
        symbols: int64 (N, K, C), tokens that may come next.
        size: n, at least 1.

    Returns:
        bool (N, K, C).
    """
    if labels.shape[-1] < size:
        return torch.zeros_like(symbols, dtype=torch.bool)
    ngrams = labels.unfold(-1, size, 1)
    context = labels[..., None, labels.shape[-1] - size + 1 :]
    # The context is the last steps, so if it contains a -1, the n-gram contains one as well.
    begins = (ngrams[..., :-1] == context).all(-1) & (ngrams >= 0).all(-1)
    ends = ngrams[..., -1][..., None] == symbols[..., None, :]
    return (begins[..., None] & ends).any(-2)
