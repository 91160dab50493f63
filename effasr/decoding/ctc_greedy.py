"""Greedy CTC decoding: the likeliest symbol of each frame, repeats merged, blanks left out."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_ROWS = 4096
"""Frames whose logits are held at a time: with V = 16k, 256 MB in float32."""


def ctc_greedy(model: ASRModel, encoded: PackedSequence, blank_id: int) -> list[list[int]]:
    """Decode each sequence of encoder output.

    Args:
        model: With a CTC head; its logits have V + 1 columns.
        encoded: (T, C), from ``model.encode``.
        blank_id: The column of the blank.

    Returns:
        The tokens of each sequence; none for an empty one.
    """
    best = [model.ctc_logits(rows).argmax(-1) for rows in encoded.values.split(_ROWS)]
    symbols = encoded.with_values(torch.cat(best).cpu()).unpack()
    return [
        [symbol for symbol, _ in groupby(sequence.tolist()) if symbol != blank_id]
        for sequence in symbols
    ]


def ctc_log_probs(model: ASRModel, encoded: PackedSequence) -> Tensor:
    """Log-probabilities of every token and the blank, last, at each frame: float32 (T, V + 1)."""
    blocks = encoded.values.split(_ROWS)
    return torch.cat([model.ctc_logits(rows).float().log_softmax(-1) for rows in blocks])
