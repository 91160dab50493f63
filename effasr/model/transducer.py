"""Transducer head: predictor, joint network and loss."""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from effasr.checks import check, check_choices, check_dropouts, check_positive
from effasr.nn.linear import Linear
from effasr.nn.predictor import LSTMPredictor, PredictorState, StatelessPredictor
from effasr_kernels import PackedSequence, transducer_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class TransducerConfig:
    """A predictor of labels, and the joint network that adds it to the encoder.

    Attributes:
        predictor: ``lstm`` reads all labels so far, as in published models; ``stateless`` the last
            ``context`` of them, which is cheaper and often as accurate.
        width: Channels of the predictor.
        layers: Layers of the LSTM; unused by ``stateless``.
        context: Labels that ``stateless`` reads; unused by ``lstm``.
        joint: Channels in which encoder and predictor are added.
        activation: Activation of the sum.
        fastemit: Lambda of FastEmit, which makes labels earlier; 0 for none.
        durations: Frames that a symbol may last, such as [0, 1, 2, 3, 4], for a token-and-duration
            transducer (TDT), which predicts how many to skip; null for a plain one (RNN-T).
        sigma: Under-normalization of a TDT's symbols in training, so that it skips more; usually
            0.02 to 0.05.
        dropout: Dropout of the embedded labels and of the output of the LSTM.
    """

    predictor: Literal["lstm", "stateless"] = "lstm"
    width: int = 640
    layers: int = 1
    context: int = 2
    joint: int = 640
    activation: Literal["relu", "tanh"] = "relu"
    fastemit: float = 0.0
    durations: tuple[int, ...] | None = None
    sigma: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "width", "layers", "context", "joint")
        check_dropouts(self)
        check(self.fastemit >= 0, "fastemit", "be at least 0", self.fastemit)
        check_choices(self, predictor=("lstm", "stateless"), activation=("relu", "tanh"))
        self._check_durations()

    def _check_durations(self) -> None:
        check(self.sigma >= 0, "sigma", "be at least 0", self.sigma)
        if self.durations is None:
            check(self.sigma == 0, "sigma", "be 0 without `durations`", self.sigma)
            return
        # With 0 and 1 there is a path through any frames for any text.
        starts = self.durations[:2] == (0, 1)
        increasing = all(a < b for a, b in itertools.pairwise(self.durations))
        rule = "start with 0 and 1 and increase, as [0, 1, 2, 3, 4]"
        check(starts and increasing, "durations", rule, list(self.durations))


class Transducer(nn.Module):
    r"""Scores the next label, or the blank, from a frame and the labels so far.

    .. math:: z_{tu} = W \, \mathrm{act}(A e_t + a + B p_u + b) + c

    with e the encoder's frames and p the predictor's output. With ``predictor="lstm"`` and
    ``width == joint`` this is transformers' ``ParakeetForRNNT`` after its encoder: A is its
    ``encoder_projector``, B its ``decoder_projector``, W its ``joint.head``, and the blank, its
    start symbol too, is the last class. With ``durations``, it is ``ParakeetForTDT``: W has a row
    more for each duration, after the blank's.

    References:
        Graves, 2012, https://arxiv.org/abs/1211.3711; Xu et al., 2023,
        https://arxiv.org/abs/2304.06795 (TDT).
    """

    backend: str | None = None
    """Of the loss; None for any that serves the call."""

    def __init__(self, config: TransducerConfig, encoder_width: int, vocab_size: int):
        super().__init__()
        self.config, self.blank_id = config, vocab_size
        self.predictor: StatelessPredictor | LSTMPredictor
        sizes = vocab_size, config.width
        if config.predictor == "lstm":
            self.predictor = LSTMPredictor(*sizes, config.layers, config.dropout)
        else:
            self.predictor = StatelessPredictor(*sizes, config.context, config.dropout)
        self.encoder_projection = Linear(encoder_width, config.joint)
        self.predictor_projection = Linear(config.width, config.joint)
        self.output = Linear(config.joint, vocab_size + 1 + len(config.durations or ()))

    def forward(
        self, encoded: PackedSequence, text: PackedSequence, max_nodes: int | None = None
    ) -> Tensor:
        """The loss of whole transcripts; see `transducer_loss`."""
        # encoded: (T, encoder width); text: int64 (U,), as many sequences -> (N,)
        predicted = self.predictor(text.values, text.layout)
        return transducer_loss(
            self.encoder_projection(encoded.values),
            self.predictor_projection(predicted),
            text.values,
            encoded.layout,
            text.layout,
            self.output.weight,
            self.output.bias,
            blank_id=self.blank_id,
            activation=self.config.activation,
            fastemit=self.config.fastemit,
            durations=self.config.durations,
            sigma=self.config.sigma,
            max_nodes=max_nodes,
            backend=self.backend,
            # No layer needs what it gave again. On a CPU a second forward would be the price.
            overwrite_inputs=encoded.values.is_cuda and not torch.compiler.is_compiling(),
        )

    def begin(self, count: int) -> tuple[Tensor, PredictorState]:
        """The predictor's share of the joint network (N, J) before any label, and its state."""
        starts = torch.full((count,), self.blank_id, device=self.output.weight.device)
        return self.step(starts, self.predictor.begin(count))

    def step(self, labels: Tensor, state: PredictorState) -> tuple[Tensor, PredictorState]:
        """Add a label to each transcript: int64 (N,) to (N, J), and the next state."""
        predicted, state = self.predictor.step(labels, state)
        return self.predictor_projection(predicted), state

    def logits(self, frames: Tensor, predicted: Tensor) -> Tensor:
        """Logits of every label, then the blank, then every duration."""
        # frames: (..., J), from ``encoder_projection``; predicted: (..., J), from `begin` or `step`
        joint = frames + predicted
        return self.output(joint.relu() if self.config.activation == "relu" else joint.tanh())
