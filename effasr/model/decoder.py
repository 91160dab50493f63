"""The Transformer decoder over packed transcripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr import ranges
from effasr.model.checks import check
from effasr.model.decoder_layer import DecoderConfig, DecoderLayer
from effasr.nn.cache.contiguous import CacheSizes
from effasr.nn.cache.decoder_state import DecoderState, KeysValues
from effasr.nn.experts.config import named_experts_of
from effasr.nn.experts.encoder_output import EncoderOutput, expert_of
from effasr.nn.experts.feed_forward import GroupedLinear
from effasr.nn.experts.grouping import Groups, named_expert, named_groups
from effasr.nn.positions import PositionTables, decoder_sinusoids
from effasr.nn.residual import draw_layer_seeds, residual_stream
from effasr.nn.stack import is_empty, is_sharded, skip_layers
from effasr_kernels import PackedLayout, PackedSequence, projected_top_k


class Decoder(nn.Module):
    """Transformer decoder: tokens and encoder frames to hidden states, and these to logits.

    By default the function is that of the decoder of transformers'
    ``CanaryForConditionalGeneration``; with options that of ``WhisperForConditionalGeneration``.
    """

    def __init__(self, config: DecoderConfig, vocab_size: int, *, residual_in_fp32: bool = True):
        """Build the layers for V = ``vocab_size`` tokens.

        ``residual_in_fp32`` is as in `effasr.model.config.ModelConfig`.
        """
        super().__init__()
        self.config, self.residual_in_fp32 = config, residual_in_fp32
        self.router_losses: list[Tensor] = []
        self._tables = PositionTables()
        for name in ("suppress", "begin_suppress"):
            most = max(getattr(config, name), default=0)
            check(most < vocab_size, name, f"be in the vocabulary of {vocab_size}", most)
        self.embed_tokens = nn.Embedding(vocab_size, config.width)
        learned = config.positions == "learned"
        self.embed_positions = nn.Embedding(config.max_positions, config.width) if learned else None
        self.embedding_layernorm = nn.LayerNorm(config.width) if config.embedding_norm else None
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.untied_weight = (
            None if config.tie_embeddings else nn.Parameter(torch.empty(vocab_size, config.width))
        )
        self.output_bias = nn.Parameter(torch.empty(vocab_size)) if config.output_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the embedding and the output layer with variance 1 / width.

        Learned positions have half of it, and so start as large as the sinusoids would be.
        """
        std = self.config.width**-0.5
        for weight in (self.embed_tokens.weight, self.untied_weight):
            if weight is not None:
                nn.init.normal_(weight, std=std)
        if self.embed_positions is not None:
            nn.init.normal_(self.embed_positions.weight, std=std / math.sqrt(2))
        if self.output_bias is not None:
            nn.init.zeros_(self.output_bias)

    @property
    def output_weight(self) -> Tensor:
        """Weights of the output layer, (V, width)."""
        return self.embed_tokens.weight if self.untied_weight is None else self.untied_weight

    def forward(
        self, tokens: PackedSequence, encoded: PackedSequence, sigma: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Decode whole transcripts with a causal mask."""
        # tokens: int64 (U,); encoded: (T, width), as many sequences; an `EncoderOutput` where names
        # choose the experts -> Hidden states (U, width), and the penalty of each token, averaged
        # over layers and heads: (U,) or None
        layout, positions = tokens.layout, self.config.max_positions
        if layout.max_seqlen_bound > positions:
            raise ValueError(
                f"`tokens` must have at most max_positions = {positions} tokens per sequence, but "
                f"has {layout.max_seqlen_bound}: raise `model.decoder.max_positions` or drop the "
                "utterance."
            )
        x = self.embed(tokens.values, layout.positions())
        if is_empty(layout, encoded.layout) and is_sharded(self.layers):
            x = skip_layers(self.layers, x)
            return self.norm(x), None if sigma is None else x.new_zeros(len(x))
        x = residual_stream(x, in_fp32=self.residual_in_fp32)
        groups = named_groups(self.config.experts, expert_of(encoded), layout)
        penalties, self.router_losses = [], []
        all_seeds = draw_layer_seeds(self.decoder_layers(), x)
        for number, (layer, seeds) in enumerate(zip(self.layers, all_seeds, strict=True)):
            with ranges.range(f"decoder.{number}"):
                x, penalty, *losses = layer(x, layout, encoded, sigma, groups, seeds=seeds)
            penalties.append(penalty)
            self.router_losses += losses if self.training else ()
        mean = None if sigma is None else torch.stack(penalties).mean(0)
        return self.norm(x), mean

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of every token: (..., width) to (..., V)."""
        return F.linear(hidden, self.output_weight, self.output_bias)

    def likeliest(self, hidden: Tensor, classes: int | None = None) -> Tensor:
        """Return the best of the first ``classes`` tokens (all): (N, width) to int64 (N,)."""
        _, indices = projected_top_k(
            hidden, self.output_weight, bias=self.output_bias, classes=classes
        )
        return indices[:, 0]

    def start(
        self,
        encoded: PackedSequence,
        max_tokens: int,
        read: Sequence[Sequence[int]] | None = None,
    ) -> DecoderState:
        """Prepare to decode sequences token by token, together."""
        # encoded: (T, width); an `EncoderOutput` where names choose the experts
        layout = encoded.layout
        read = [()] * layout.num_sequences if read is None else read
        count, lengths = len(read), [len(tokens) for tokens in read]
        rule = f"be of at most {layout.num_sequences} sequences, as `encoded` is"
        check(count <= layout.num_sequences, "read", rule, count)
        offsets, host = layout.cu_seqlens[: count + 1], layout.cu_seqlens_host[: count + 1]
        layout = PackedLayout(offsets, host, layout.rows, layout.static_max_seqlen)
        expert = named_expert(self.config.experts, expert_of(encoded))
        expert = None if expert is None else expert[:count]
        encoded = EncoderOutput(encoded.values, layout, expert)
        state = self.new_state(count, max_tokens, layout.max_seqlen_bound)
        longest = max(lengths, default=0)
        rule = f"have equally many tokens for each sequence, at most max_tokens = {max_tokens}"
        check(longest <= max_tokens and len(set(lengths)) <= 1, "read", rule, lengths)
        state.admit_all(layout, self._keys_values(encoded, read, state.sizes), longest, expert)
        return state

    def new_state(
        self,
        sequences: int,
        max_tokens: int,
        max_frames: int,
        *,
        paged: bool | None = None,
        pages: tuple[int, int] | None = None,
    ) -> DecoderState:
        """Return a state for sequences that start and end at different times; see `DecoderState`.
        """
        positions = self.config.max_positions
        rule = f"be in 1 to max_positions = {positions}"
        check(1 <= max_tokens <= positions, "max_tokens", rule, max_tokens)
        weight = self.decoder_layers()[0].encoder_attn.kv_proj.weight
        kind, dtype = weight.device.type, weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        config = self.config
        sizes = CacheSizes(config.layers, config.heads, config.head_width, dtype, weight.device)
        paged = kind != "cpu" if paged is None else paged
        return DecoderState(sizes, sequences, max_tokens, max_frames, paged=paged, pages=pages)

    def admit(
        self,
        state: DecoderState,
        rows: Sequence[int],
        encoded: PackedSequence,
        read: Sequence[Sequence[int]],
        tokens: Sequence[int],
    ) -> None:
        """Start sequences in a state, in place of what these rows held.

        One forward reads the first tokens of all of them.
        """
        # encoded: (T, width), as many sequences; an `EncoderOutput` where names choose the experts
        expert = named_expert(self.config.experts, expert_of(encoded))
        lengths = [len(one) for one in read]
        keys_values = self._keys_values(encoded, read, state.sizes)
        state.admit(rows, encoded.layout.lengths, tokens, keys_values, lengths, expert)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Decode one more token of each row of a state: int64 (N,) to hidden states (N, width)."""
        count = state.num_rows
        check(tokens.shape == (count,), "tokens", f"be ({count},)", tuple(tokens.shape))
        state.look()
        x = self.embed(tokens, state.positions)
        experts = named_experts_of(self.config)
        groups = None if experts is None else Groups.of(state.expert, experts.count)
        for number, layer in enumerate(self.decoder_layers()):
            x = layer.step(x, state, number, groups)
        state.advance()
        return self.norm(x)

    def cast(self, dtype: torch.dtype) -> Decoder:
        """Return a decoder with matrix product weights of this dtype, for many steps of autocast.

        It shares everything else. Autocast would cast the weights at every step, and in a CUDA
        graph the recording would keep casts that are freed before it is replayed.
        """
        with torch.device("meta"):
            other = Decoder(replace(self.config, tie_embeddings=False), len(self.output_weight))
        state = self.state_dict() | {"untied_weight": self.output_weight.to(dtype)}
        if self.output_bias is not None:
            state["output_bias"] = self.output_bias.to(dtype)
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, GroupedLinear)):
                for part, value in module.named_parameters(name):
                    state[part] = value.to(dtype)
        other.load_state_dict(state, assign=True)
        return other.eval()

    def _keys_values(
        self, encoded: PackedSequence, read: Sequence[Sequence[int]], sizes: CacheSizes
    ) -> Iterator[Sequence[KeysValues]]:
        """Yield keys and values of each layer for `DecoderState.admit`."""
        if not any(map(len, read)):
            for layer in self.decoder_layers():
                yield (layer.encoder_attn.keys_values(encoded.values),)
            return
        layout = sizes.layout([len(one) for one in read])
        tail = [0] * (layout.rows - layout.total)
        tokens = sizes.integers([*(token for one in read for token in one), *tail])
        x = self.embed(tokens, layout.positions())
        groups = named_groups(self.config.experts, expert_of(encoded), layout)
        *others, last = self.decoder_layers()
        for layer in others:
            speech = layer.encoder_attn.keys_values(encoded.values)
            x, own = layer.read(x, layout, speech, encoded.layout, groups)
            yield speech, own
        # No step needs the last layer's output for these tokens.
        own = last.self_attn.keys_values(last.input_layernorm(x))
        yield last.encoder_attn.keys_values(encoded.values), own

    def decoder_layers(self) -> list[DecoderLayer]:
        """Return the layers, in order."""
        return cast("list[DecoderLayer]", list(self.layers))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens at their positions: int64 (U,) and (U,) to (U, width)."""
        x = self.embed_tokens(tokens)
        x = x + self._places(positions).to(x.dtype)
        if self.embedding_layernorm is not None:
            x = self.embedding_layernorm(x)
        return F.dropout(x, self.config.input_dropout, self.training)

    def position_table(self) -> Tensor:
        """Return the position embeddings that `embed` adds to tokens: (max_positions, width)."""
        weight = self.embed_tokens.weight
        return self._places(torch.arange(self.config.max_positions, device=weight.device))

    def _places(self, positions: Tensor) -> Tensor:
        config = self.config
        if self.embed_positions is None and torch.compiler.is_compiling():
            # The compiler fuses it with what follows.
            return decoder_sinusoids(positions, config.width)
        # Positions past the last one belong to rows without a sequence.
        positions = positions.clamp(max=config.max_positions - 1)
        if self.embed_positions is not None:
            return self.embed_positions(positions)

        def make() -> Tensor:
            places = torch.arange(config.max_positions, device=positions.device)
            return decoder_sinusoids(places, config.width)

        return F.embedding(positions, self._tables.get(make, positions))
