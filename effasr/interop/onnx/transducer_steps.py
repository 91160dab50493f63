"""Steps of a transducer in plain PyTorch, for export to other formats.

Functions and weights are those of `effasr.model.transducer.Transducer` in evaluation mode. States
have the layout of NeMo's exported predictors, layers before the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.model.transducer import Transducer
from effasr.nn.predictor import LSTMPredictor, PredictorState, StatelessPredictor


@dataclass(frozen=True, slots=True)
class StateTensor:
    """State of a predictor between labels."""

    description: str  # Meaning of the tensor
    dtype: torch.dtype  # Data type
    shape: tuple[int | None, ...]  # Sizes; None stands for the batch
    initial: int  # Fill value before the first label

    @property
    def batch_axis(self) -> int:
        return self.shape.index(None)

    def begin(self, count: int) -> Tensor:
        sizes = [count if size is None else size for size in self.shape]
        return torch.full(sizes, self.initial, dtype=self.dtype)


class LSTMStep(nn.Module):
    """One more label of each transcript, read by LSTM layers."""

    def __init__(self, head: Transducer):
        super().__init__()
        self.predictor = cast(LSTMPredictor, head.predictor)
        self.projection = head.predictor_projection
        sizes = self.predictor.lstm.layers, None, self.predictor.lstm.width
        self.states = tuple(
            StateTensor(name, torch.float32, sizes, 0) for name in ("hidden state", "cell state")
        )

    def forward(
        self, tokens: Tensor, input_states_1: Tensor, input_states_2: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # tokens: int64 (B,), the blank at first; input_states_1: (layers, B, P), the hidden state;
        # input_states_2: (layers, B, P), the cell -> (B, J)
        x, lstm = self.predictor.embedding(tokens), self.predictor.lstm
        hidden, cells = [], []
        for layer in range(lstm.layers):
            w_ih, w_hh, b_ih, b_hh = lstm.weights()[4 * layer : 4 * layer + 4]
            gates = F.linear(x, w_ih, b_ih) + F.linear(input_states_1[layer], w_hh, b_hh)
            i, f, g, o = gates.chunk(4, -1)
            cells.append(f.sigmoid() * input_states_2[layer] + i.sigmoid() * g.tanh())
            x = o.sigmoid() * cells[-1].tanh()
            hidden.append(x)
        return self.projection(x), torch.stack(hidden), torch.stack(cells)


class StatelessStep(nn.Module):
    """One more label of each transcript, where only the last few are seen."""

    def __init__(self, head: Transducer):
        super().__init__()
        self.predictor = cast(StatelessPredictor, head.predictor)
        self.projection = head.predictor_projection
        before = self.predictor.context - 1
        state = StateTensor("the labels before, -1 for none", torch.int64, (None, before), -1)
        self.states = (state,) if before else ()

    def forward(self, tokens: Tensor, input_states_1: Tensor | None = None) -> tuple[Tensor, ...]:
        # tokens: int64 (B,), the blank at first; input_states_1: int64 (B, context - 1), the labels
        # before it -> (B, J)
        seen = tokens[:, None]
        if input_states_1 is not None:
            seen = torch.cat([input_states_1, seen], 1)
        embedded = self.predictor.embedding(seen.clamp(min=0)) * (seen >= 0)[..., None]
        predicted = self.projection(F.relu((embedded * self.predictor.taps.T).sum(1)))
        return (predicted,) if input_states_1 is None else (predicted, seen[:, 1:])


class JointStep(nn.Module):
    """The scores of one frame of each utterance, given the labels so far."""

    def __init__(self, head: Transducer):
        super().__init__()
        self.activation, self.output = head.config.activation, head.output
        self.symbols = head.blank_id + 1

    def forward(self, encoder_projected: Tensor, predictor_projected: Tensor) -> tuple[Tensor, ...]:
        # encoder_projected: (B, J), a frame of each utterance; predictor_projected: (B, J), from
        # the predictor -> (B, V + 1), (B, D)
        joint = encoder_projected + predictor_projected
        scores = self.output(joint.relu() if self.activation == "relu" else joint.tanh())
        if scores.shape[-1] == self.symbols:
            return (scores,)
        return scores[:, : self.symbols], scores[:, self.symbols :]


def predictor_step(head: Transducer) -> LSTMStep | StatelessStep:
    return LSTMStep(head) if isinstance(head.predictor, LSTMPredictor) else StatelessStep(head)


def in_model_layout(state: tuple[Tensor, ...]) -> PredictorState:
    """States of a step in the layout of `Transducer.step`, the batch first."""
    return tuple(part.transpose(0, 1) if part.ndim == 3 else part for part in state)
