"""Greedy CTC decoding: best class of each frame, repeats merged, blanks removed."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_ROWS = 4096
"""Frames whose logits are computed at a time: with V = 16k, 256 MB in float32."""


def ctc_greedy(model: ASRModel, encoded: PackedSequence, blank_id: int) -> list[list[int]]:
    """Decode each sequence of encoder output (T, C); sequences without frames give no tokens."""
    best = [model.ctc_logits(rows).argmax(-1) for rows in encoded.values.split(_ROWS)]
    symbols = encoded.with_values(torch.cat(best).cpu()).unpack()
    return [
        [symbol for symbol, _ in groupby(sequence.tolist()) if symbol != blank_id]
        for sequence in symbols
    ]


def ctc_log_probs(model: ASRModel, encoded: PackedSequence) -> Tensor:
    """Return log-probabilities of every token and, last, the blank: float32 (T, V + 1)."""
    blocks = encoded.values.split(_ROWS)
    return torch.cat([model.ctc_logits(rows).float().log_softmax(-1) for rows in blocks])
