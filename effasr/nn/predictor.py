"""Prediction networks of a transducer: stateless, or an LSTM."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.padded_view import PaddedView
from effasr.nn.recurrent import LSTM
from effasr_kernels import PackedLayout, depthwise_conv

PredictorState = tuple[Tensor, ...]
"""State of a predictor between labels: tensors (N, ...)."""


class StatelessPredictor(nn.Module):
    """The last few labels, embedded, weighted per channel and summed; then ReLU.

    References:
        Ghodsi et al., 2020, https://ieeexplore.ieee.org/document/9054419; icefall's ``Decoder``,
        whose convolution mixes four channels.
    """

    def __init__(self, vocab_size: int, width: int, context: int, dropout: float = 0.0):
        """Build the embedding and the taps."""
        super().__init__()
        self.start_id, self.context, self.dropout = vocab_size, context, dropout
        self.embedding = nn.Embedding(vocab_size + 1, width)
        self.taps = nn.Parameter(torch.empty(width, context))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the embedding with variance 1, and the taps as `torch.nn.Conv1d` does."""
        nn.init.normal_(self.embedding.weight)
        bound = 1 / math.sqrt(self.context)
        nn.init.uniform_(self.taps, -bound, bound)

    def forward(self, labels: Tensor, layout: PackedLayout) -> Tensor:
        """Read whole transcripts."""
        # labels: int64 (U,), each in [0, V) -> (U + N, P): for each sequence one row before any
        # label, and one after each label
        rows = layout.lengthened(1)
        x = self._drop(self.embedding(after_start(labels, layout, self.start_id)))
        return F.relu(depthwise_conv(x, self.taps, rows, causal=True))

    def begin(self, count: int) -> PredictorState:
        """Return the state of ``count`` sequences before the start symbol; -1 is no label."""
        seen = count, self.context - 1
        return (torch.full(seen, -1, device=self.taps.device),)

    def step(self, labels: Tensor, state: PredictorState) -> tuple[Tensor, PredictorState]:
        """Read one more label of each sequence, beginning with the start symbol."""
        # labels: int64 (N,) -> (N, P), and the next state
        seen = torch.cat([state[0], labels[:, None]], 1)
        embedded = self.embedding(seen.clamp(min=0)) * (seen >= 0)[..., None]
        return F.relu((embedded * self.taps.T).sum(1)), (seen[:, 1:],)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class LSTMPredictor(nn.Module):
    """Embedded labels, read by LSTM layers with a zero initial state.

    References:
        Graves, 2012, https://arxiv.org/abs/1211.3711; the function is that of transformers'
        ``ParakeetRNNTDecoder`` before its projection.
    """

    def __init__(self, vocab_size: int, width: int, layers: int, dropout: float = 0.0):
        """Build the embedding and the layers; see `StatelessPredictor`."""
        super().__init__()
        self.start_id, self.dropout = vocab_size, dropout
        self.embedding = nn.Embedding(vocab_size + 1, width)
        self.lstm = LSTM(width, layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the embedding with variance 1, and the layers as `LSTM` does."""
        nn.init.normal_(self.embedding.weight)
        self.lstm.reset_parameters()

    def forward(self, labels: Tensor, layout: PackedLayout) -> Tensor:
        """Read whole transcripts; see `StatelessPredictor.forward`."""
        lanes = PaddedView.of(layout.lengthened(1), layout.max_seqlen_bound + 1)
        ids = lanes.spread(after_start(labels, layout, self.start_id), self.start_id)
        x = self._drop(self.embedding(ids))
        hidden = self.lstm(x, lanes.free())
        return self._drop(lanes.collect(hidden))

    def begin(self, count: int) -> PredictorState:
        """Return the state of ``count`` sequences before the start: h and c, (N, layers, P)."""
        weight = self.embedding.weight
        zeros = weight.new_zeros(count, self.lstm.layers, self.lstm.width)
        return zeros, zeros

    def step(self, labels: Tensor, state: PredictorState) -> tuple[Tensor, PredictorState]:
        """Read one more label of each sequence; see `StatelessPredictor.step`."""
        hidden, cell = (part.transpose(0, 1).contiguous() for part in state)
        out, hidden, cell = self.lstm.step(self.embedding(labels), hidden, cell)
        return out, (hidden.transpose(0, 1), cell.transpose(0, 1))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def after_start(labels: Tensor, layout: PackedLayout, start_id: int) -> Tensor:
    """Insert the start symbol before each sequence."""
    # labels: int64 (U,) -> int64 (U + N,), under ``layout.lengthened(1)``
    rows = layout.lengthened(1)
    sequences = rows.sequence_ids()
    starts = rows.cu_seqlens.long()[sequences]
    row = torch.arange(rows.rows, device=labels.device)
    padded = F.pad(labels, (1, 0), value=start_id)
    # In sequence n, row r > 0 of the longer layout is label r - n - 1, so r - n of the padded ones.
    is_label = (row > starts) & rows.mask()
    return padded[(row - sequences).where(is_label, 0)]
