"""Text encoder: encodes a source text for the decoder to translate."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.checks import check, check_choices, check_dropouts, check_positive
from effasr.nn.experts import ExpertsConfig, named_groups
from effasr.nn.lora import route_rows
from effasr.nn.positions import decoder_sinusoids
from effasr.nn.residual import normalized, residual_stream
from effasr.nn.stack import join_skipped, run_layers, skip_branch
from effasr.nn.transformer_layer import TransformerLayer
from effasr_kernels import PackedLayout, PackedSequence

_MOMENTUM = 0.1  # of the mean frames of a token, as of batch norms
_UNIT = 2**16
"""Steps of a frame: sums of whole numbers do not depend on the order in which a GPU adds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoderConfig:
    """A pre-norm Transformer with ReLU and sinusoidal positions, as wide as the speech encoder.

    Attributes:
        layers: Transformer layers.
        heads: Attention heads; they divide the width.
        feed_forward: Channels inside a feed-forward network.
        bias: Whether the projections of attention have biases.
        input_dropout: Dropout of the embedded tokens.
        residual_dropout: Dropout of the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: Dropout of attention weights.
        experts: Experts of the feed-forward networks; null for none.
        shared_layers: Last layers of a FastConformer that texts pass, too, behind the text encoder,
            so that CTC and the transducer learn from texts: to write what they read. 0 for none.
        upsample: Rows of the shared layers for each token: about the encoder frames of one.
        durations: ``fixed``: each token has so many rows. ``learnt``: on average, and tokens that
            last longer in speech have more of them. The frames of a token are learnt from the
            length of utterances, without an alignment, so that no loss has to align first.
        mask: Part of the tokens that the shared layers do not see in training, drawn anew for each
            batch; without, the heads learn to copy.
    """

    layers: int = 6
    heads: int = 8
    feed_forward: int = 2048
    bias: bool = True
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: ExpertsConfig | None = None
    shared_layers: int = 0
    upsample: int = 3
    durations: Literal["fixed", "learnt"] = "fixed"
    mask: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "layers", "heads", "feed_forward", "upsample")
        check_choices(self, durations=("fixed", "learnt"))
        check(self.shared_layers >= 0, "shared_layers", "be at least 0", self.shared_layers)
        check(0 <= self.mask < 1, "mask", "lie in [0, 1)", self.mask)
        check_dropouts(self)

    def check_width(self, width: int) -> None:
        divides = width % self.heads == 0
        check(divides, "text_encoder.heads", f"divide encoder.width = {width}", self.heads)
        check(width >= 4, "encoder.width", "be at least 4 with a `text_encoder`", width)


class TextEncoder(nn.Module):
    """Transformer encoder of texts, whose output the decoder attends to."""

    running_duration: Tensor | None  # float32 (V,), mean encoder frames of each token

    def __init__(
        self,
        config: TextEncoderConfig,
        width: int,
        vocab_size: int,
        *,
        residual_in_fp32: bool = True,
    ):
        super().__init__()
        config.check_width(width)
        self.config, self.width, self.residual_in_fp32 = config, width, residual_in_fp32
        self.router_losses: list[Tensor] = []
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.embedding_layernorm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            TransformerLayer.of(config, width, activation="relu") for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(width)
        is_learnt = config.durations == "learnt"
        self.register_buffer("running_duration", torch.empty(vocab_size) if is_learnt else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=self.width**-0.5)
        if self.running_duration is not None:
            nn.init.constant_(self.running_duration, self.config.upsample)

    def forward(
        self,
        tokens: PackedSequence,
        idle: Iterable[nn.Module] = (),
        expert: Tensor | None = None,
    ) -> PackedSequence:
        """Encode int64 (T,) into (T, width); rows of the tail are finite.

        In training the losses of routers are left in ``router_losses``, float32 (2,) for each
        layer. ``idle``: the parts to skip first, those of the speech encoder.
        """
        # expert: int64 (N,), the expert of each text, where names choose; see `Batch.expert`
        layout = tokens.layout
        x = self.embed_tokens(tokens.values)
        x = x + decoder_sinusoids(layout.positions(), self.width).to(x.dtype)
        x = F.dropout(self.embedding_layernorm(x), self.config.input_dropout, self.training)
        skipped = skip_branch(idle, x)
        x = residual_stream(x, in_fp32=self.residual_in_fp32)
        groups = named_groups(self.config.experts, expert, layout)
        route_rows(self, expert, layout)
        self.router_losses = []
        losses = self.router_losses if self.training else None
        x = run_layers(self.layers, "text_encoder", x, layout, layout, groups, losses=losses)
        return PackedSequence(join_skipped(normalized(x, self.norm), skipped), layout)

    def upsampled(self, read: PackedSequence, tokens: Tensor) -> PackedSequence:
        """The rows that the shared layers read: ``upsample`` for each token, or on average."""
        values, repeats = read.values, self.config.upsample
        if self.training and self.config.mask:
            seen = torch.rand(len(values), 1, device=values.device) >= self.config.mask
            values = values * seen
        layout = read.layout.scaled(repeats)
        if self.running_duration is None:
            return PackedSequence(values.repeat_interleave(repeats, 0), layout)
        # Its gradient is summed in a fixed order, unlike that of an index.
        return PackedSequence(F.embedding(self._token_of_row(tokens, read.layout), values), layout)

    @torch.no_grad()
    def _token_of_row(self, tokens: Tensor, layout: PackedLayout) -> Tensor:
        """The token of each row of the shared layers, int64 (T upsample,): no token has none."""
        repeats, owner = self.config.upsample, layout.sequence_ids()
        # The tail is a further sequence.
        offsets = F.pad(layout.cu_seqlens.long(), (0, 1), value=layout.rows)
        lengths = offsets.diff()[owner]

        def sums(x: Tensor) -> tuple[Tensor, Tensor]:
            """Of each token's sequence: up to the token, and all."""
            ends = F.pad(x.cumsum(0), (1, 0))
            return ends[1:] - ends[offsets[:-1]][owner], ends[offsets].diff()[owner]

        # Each token gets a row of its own, and its share of those that are left.
        frames = self._fixed_point(tokens)
        rows = frames * (lengths * repeats * _UNIT) // sums(frames)[1].clamp(min=1)
        before, total = sums((rows - _UNIT).clamp(min=0) + 1)
        left = (2 * lengths * (repeats - 1) * before + total) // (2 * total)
        place = torch.arange(len(tokens) * repeats, device=tokens.device)
        ends = place[: len(tokens)] + 1 + offsets[:-1][owner] * (repeats - 1) + left
        return torch.searchsorted(ends, place, right=True)

    def _fixed_point(self, tokens: Tensor) -> Tensor:
        assert self.running_duration is not None
        return (self.running_duration[tokens].double() * _UNIT).round().long()

    @torch.no_grad()
    def learn_durations(self, text: PackedSequence, frames: PackedLayout) -> None:
        """Move the frames of tokens so that they add up to those of a batch's utterances.

        What an utterance has beyond is shared by its tokens equally, and of what a token gets in
        all of its places the mean counts, times a momentum. Repeated, that is the least-squares
        solution (SIRT of tomography).
        """
        # text: int64 (U,), of speech in order, and ``frames`` its layout, of as many sequences
        if self.running_duration is None or not self.training:
            return
        lengths, owner = text.layout.cu_seqlens.diff().long(), text.layout.sequence_ids()
        ends = F.pad(self._fixed_point(text.values).cumsum(0), (1, 0))
        known = ends[text.layout.cu_seqlens.long()].diff()
        beyond = frames.cu_seqlens.diff().long() * _UNIT - known
        share = F.pad(beyond // lengths.clamp(min=1), (0, 1))[owner]
        none = torch.zeros_like(self.running_duration, dtype=torch.int64)
        sums = none.index_add(0, text.values, share)
        counts = none.index_add(0, text.values, (owner < len(lengths)).long())
        mean = sums.double() / counts.clamp(min=1) / _UNIT
        self.running_duration.add_(mean.to(self.running_duration.dtype), alpha=_MOMENTUM)
        self.running_duration.clamp_(min=0.0)
