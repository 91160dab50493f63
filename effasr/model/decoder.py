"""The Transformer decoder over packed transcripts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr import ranges
from effasr.checks import check, check_choices, check_dropouts, check_positive
from effasr.nn.attention import CrossAttention, SelfAttention
from effasr.nn.cache.contiguous import CacheSizes
from effasr.nn.cache.decoder_state import DecoderState, KeysValues
from effasr.nn.experts import (
    EncoderOutput,
    ExpertsConfig,
    GroupedLinear,
    Groups,
    build_feed_forward,
    expert_of,
    named_expert,
    named_experts_of,
    named_groups,
    run_feed_forward,
)
from effasr.nn.linear import shared_input
from effasr.nn.lora import adapt_alike, has_languages, route_rows
from effasr.nn.positions import PositionTables, decoder_sinusoids
from effasr.nn.residual import Residual, draw_layer_seeds, is_fused, normalized, residual_stream
from effasr.nn.stack import Layer, checkpointed_forward, is_empty, is_sharded, skip_layers
from effasr_kernels import PackedLayout, PackedSequence, Rotary, projected_top_k

_MOST_BARRED = 15
"""Greedy search looks at one token more than may be suppressed, of 16 at most."""

_MOST_ROWS = 4096
"""Largest table of sinusoids: of more positions few are used, and are computed at each use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A pre-norm Transformer decoder; by default with ReLU and sinusoidal positions, as Canary's.

    Attributes:
        width: Channels; even, at least 4.
        layers: Decoder layers.
        heads: Heads of self- and cross-attention.
        head_dim: Channels of a head; by default ``width / heads``.
        feed_forward: Channels inside a feed-forward network.
        max_positions: Most tokens of a sequence, the prompt included.
        positions: Canary's sinusoids, a learned embedding, as Whisper's, or rotary embedding, as
            Moonshine's, whose norms have no biases.
        rotary_fraction: Fraction of the channels of a head that rotate.
        activation: Activation of the feed-forward networks; GELU is the exact one, and swiglu
            multiplies values by gates after SiLU.
        embedding_norm: Whether a LayerNorm follows the embedding.
        bias: Whether the projections of attention have biases.
        key_bias: Whether the key projection has one, too.
        tie_embeddings: Whether the output layer shares the weights of the token embedding.
        output_bias: Whether the output layer has a bias.
        suppress: Tokens that are never decoded, such as Whisper's for noises.
        begin_suppress: Tokens that no transcript begins with.
        alignment_heads: Layer and head of each cross-attention that transformers finds the times of
            words by; of a Whisper, for its export.
        max_initial_timestamp: Largest number of the first timestamp in transformers' generation
            with timestamps, null for no limit; of a Whisper, for its export.
        input_dropout: Dropout of the embedded tokens.
        residual_dropout: Dropout of the output of each module, before it is added.
        activation_dropout: Inside the feed-forward networks.
        attention_dropout: Dropout of attention weights.
        experts: Experts of the feed-forward networks; null for none.
    """

    width: int = 1024
    layers: int = 4
    heads: int = 8
    head_dim: int | None = None
    feed_forward: int = 4096
    max_positions: int = 1024
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    rotary_fraction: float = 1.0
    activation: Literal["relu", "gelu", "swiglu"] = "relu"
    embedding_norm: bool = True
    bias: bool = True
    key_bias: bool = True
    tie_embeddings: bool = True
    output_bias: bool = True
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    max_initial_timestamp: int | None = None
    input_dropout: float = 0.0
    residual_dropout: float = 0.0
    activation_dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        check_positive(self, "width", "layers", "heads", "feed_forward", "max_positions")
        check_dropouts(self)
        dense = ("swiglu",) if self.experts is None else ()  # experts have no gates
        check_choices(self, positions=("sinusoidal", "learned", "rotary"))
        check_choices(self, activation=("relu", "gelu", *dense))
        for name in ("suppress", "begin_suppress"):
            least = min(getattr(self, name), default=0)
            check(least >= 0, name, "be token ids, at least 0", least)
        rule = f"be below layers = {self.layers} and heads = {self.heads}"
        for layer, head in self.alignment_heads:
            inside = 0 <= layer < self.layers and 0 <= head < self.heads
            check(inside, "alignment_heads", rule, [layer, head], "or leave them out")
        most = len(self.begin_suppress)
        check(most <= _MOST_BARRED, "begin_suppress", f"be at most {_MOST_BARRED} tokens", most)
        even = self.width % 2 == 0 and self.width >= 4
        check(even, "width", "be even and at least 4", self.width)
        if self.head_dim is None:
            rule = f"be a multiple of heads = {self.heads}"
            check(self.width % self.heads == 0, "width", rule, self.width, "or set `head_dim`")
        else:
            check_positive(self, "head_dim")

    @property
    def head_width(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim


class DecoderLayer(Layer):
    """Causal self-attention, cross-attention and a feed-forward network, each after a LayerNorm."""

    seeds = 2

    def __init__(self, config: DecoderConfig):
        super().__init__()
        sizes = config.width, config.heads, config.head_width
        attention = {
            "bias": config.bias,
            "key_bias": config.key_bias,
            "dropout": config.attention_dropout,
        }
        self.dropout = config.residual_dropout
        norm = {"bias": config.positions != "rotary"}
        rotary = Rotary(fraction=config.rotary_fraction) if config.positions == "rotary" else None
        self.input_layernorm = nn.LayerNorm(config.width, **norm)
        self.self_attn = SelfAttention(*sizes, causal=True, rotary=rotary, **attention)
        self.post_attention_layernorm = nn.LayerNorm(config.width, **norm)
        self.encoder_attn = CrossAttention(*sizes, **attention)
        self.final_layernorm = nn.LayerNorm(config.width, **norm)
        self.mlp = build_feed_forward(
            config.width,
            config.feed_forward,
            config.experts,
            activation=config.activation,
            dropout=config.activation_dropout,
        )

    @property
    def dropouts(self) -> tuple[float, ...]:
        return self.dropout, self.mlp.dropout, self.self_attn.dropout

    @checkpointed_forward
    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        encoded: PackedSequence,
        sigma: float | None,
        groups: Groups | None = None,
        seeds: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, ...]:
        """Transform (U, width); also return the guided penalty, (U,) or None, and router losses."""
        self_attn, cross = self.self_attn, self.encoder_attn
        residual = Residual.of(self, x, layout, self.dropout, seeds)
        y, x = residual.norm(x, self.input_layernorm)
        y = self_attn(y, layout, residual=residual)
        y, x = residual.add_norm(x, y, self_attn.o_proj, self.post_attention_layernorm, offset=0)
        y, penalty = cross(
            *(y, layout, encoded.values, encoded.layout),
            sigma=sigma,
            # With the same one it would drop what self-attention drops.
            seed=seeds[1] if seeds else None,
            residual=residual,
        )
        y, x = residual.add_norm(x, y, cross.o_proj, self.final_layernorm, offset=1)
        y, losses = run_feed_forward(self.mlp, y, residual, offset=3, groups=groups)
        x = residual.add(x, y, self.mlp.linear2, offset=2)
        return (x, penalty) if losses is None else (x, penalty, losses)

    def read(
        self,
        x: Tensor,
        layout: PackedLayout,
        speech: KeysValues,
        layout_speech: PackedLayout,
        groups: Groups | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Transform first rows as `forward`, in inference; also return their keys and values."""
        # x: (U, width) -> (U, width)
        y, keys_values = self.self_attn.read(self.input_layernorm(x), layout)
        x = x + y
        normed = self.post_attention_layernorm(x)
        x = x + self.encoder_attn.read(normed, layout, speech, layout_speech)
        return self._after_network(x, groups), keys_values

    def step(
        self, x: Tensor, state: DecoderState, number: int, groups: Groups | None = None
    ) -> Tensor:
        """Transform the next row of each sequence in this layer: (N, width) to (N, width)."""
        y = self.input_layernorm(x)
        x = x + self.self_attn.step(y, state.self_cache, number, state.positions)
        normed = self.post_attention_layernorm(x)
        if number == state.watched:
            state.weights = self.encoder_attn.weights(normed, *state.speech(number))
        x = x + self.encoder_attn.step(normed, state.cross_cache, number)
        return self._after_network(x, groups)

    def _after_network(self, x: Tensor, groups: Groups | None) -> Tensor:
        y = self.final_layernorm(x)
        return x + (self.mlp(y) if groups is None else self.mlp(y, groups=groups))


class Decoder(nn.Module):
    """Transformer decoder: tokens and encoder frames to hidden states, and these to logits.

    By default the function is that of the decoder of transformers'
    ``CanaryForConditionalGeneration``; with options that of ``WhisperForConditionalGeneration``.
    """

    def __init__(self, config: DecoderConfig, vocab_size: int, *, residual_in_fp32: bool = True):
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
        self.norm = nn.LayerNorm(config.width, bias=config.positions != "rotary")
        self.untied_weight = (
            None if config.tie_embeddings else nn.Parameter(torch.empty(vocab_size, config.width))
        )
        self.output_bias = nn.Parameter(torch.empty(vocab_size)) if config.output_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Variance 1 / width for embedding and output; half for positions, as sinusoids have."""
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
        """(V, width), tied or not."""
        return self.embed_tokens.weight if self.untied_weight is None else self.untied_weight

    def forward(
        self, tokens: PackedSequence, encoded: PackedSequence, sigma: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states (U, width) of whole transcripts, and the penalty of each token or None.

        The penalty of guided attention is averaged over layers and heads. Rows of the tail are
        finite. In training the losses of routers are left in ``router_losses``, float32 (2,) for
        each layer.
        """
        # tokens: int64 (U,); encoded: (T, width), as many sequences; an `EncoderOutput` where names
        # choose the experts -> (U, width), (U,)
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
            return normalized(x, self.norm), None if sigma is None else x.new_zeros(len(x))
        x = residual_stream(x, in_fp32=self.residual_in_fp32)
        groups = named_groups(self.config.experts, expert_of(encoded), layout)
        self._route(encoded, layout)
        penalties, self.router_losses = [], []
        all_seeds = draw_layer_seeds(self.decoder_layers(), x)
        if is_fused(x):
            encoded = encoded.with_values(shared_input(encoded.values))
        for number, (layer, seeds) in enumerate(zip(self.layers, all_seeds, strict=True)):
            with ranges.range(f"decoder.{number}"):
                x, penalty, *losses = layer(x, layout, encoded, sigma, groups, seeds=seeds)
            penalties.append(penalty)
            self.router_losses += losses if self.training else ()
        mean = None if sigma is None else torch.stack(penalties).mean(0)
        return Residual(layout, 0.0, None).norm(x, self.norm)[0], mean

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output_weight, self.output_bias)

    def likeliest(
        self, hidden: Tensor, classes: int | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """The best of the first ``classes`` tokens (all): (N, width) to int64 (N,).

        ``bias`` (V,) replaces `output_bias`.
        """
        bias = self.output_bias if bias is None else bias
        _, indices = projected_top_k(hidden, self.output_weight, bias=bias, classes=classes)
        return indices[:, 0]

    def start(
        self,
        encoded: PackedSequence,
        max_tokens: int,
        read: Sequence[Sequence[int]] | None = None,
    ) -> DecoderState:
        """Prepare to decode sequences token by token, together.

        ``read`` has the tokens of each sequence before the first step, equally many each; further
        sequences are left out. ``encoded`` is an `EncoderOutput` where names choose the experts.
        """
        # encoded: (T, width); an `EncoderOutput` where names choose the experts
        layout = encoded.layout
        read = [()] * layout.num_sequences if read is None else read
        count, lengths = len(read), [len(tokens) for tokens in read]
        rule = f"be of at most {layout.num_sequences} sequences, as `encoded` is"
        check(count <= layout.num_sequences, "read", rule, count)
        offsets, host = layout.cu_seqlens[: count + 1], layout.cu_seqlens_host[: count + 1]
        layout = PackedLayout(offsets, host, layout.rows, layout.static_max_seqlen)
        expert = self._expert(encoded)
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
        """A state for sequences that start at different times; paged on a GPU by default."""
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
        """Start sequences of at most ``tokens`` in rows; one forward reads the first of all."""
        # encoded: (T, width), as many sequences; an `EncoderOutput` where names choose the experts
        expert = self._expert(encoded)
        lengths = [len(tokens_read) for tokens_read in read]
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
        route_rows(self, state.expert, None)
        for number, layer in enumerate(self.decoder_layers()):
            x = layer.step(x, state, number, groups)
        state.advance()
        return self.norm(x)

    def cast(self, dtype: torch.dtype) -> "Decoder":
        """A decoder with matrix product weights of this dtype, for many steps of autocast.

        It shares everything else. Autocast would cast the weights at every step, and in a CUDA
        graph the recording would keep casts that are freed before it is replayed.
        """
        with torch.device("meta"):
            other = Decoder(replace(self.config, tie_embeddings=False), len(self.output_weight))
            adapt_alike(other, self)
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
        if not any(map(len, read)):
            route_rows(self, expert_of(encoded), encoded.layout, "encoded")
            for layer in self.decoder_layers():
                yield (layer.encoder_attn.keys_values(encoded.values),)
            return
        layout = sizes.layout([len(prefix) for prefix in read])
        tail = [0] * (layout.rows - layout.total)
        tokens = sizes.integers([*(token for prefix in read for token in prefix), *tail])
        x = self.embed(tokens, layout.positions())
        groups = named_groups(self.config.experts, expert_of(encoded), layout)
        self._route(encoded, layout)
        *earlier, last = self.decoder_layers()
        for layer in earlier:
            speech = layer.encoder_attn.keys_values(encoded.values)
            x, keys_values = layer.read(x, layout, speech, encoded.layout, groups)
            yield speech, keys_values
        # No step needs the last layer's output for these tokens.
        keys_values = last.self_attn.keys_values(last.input_layernorm(x), layout)
        yield last.encoder_attn.keys_values(encoded.values), keys_values

    def _route(self, encoded: PackedSequence, layout: PackedLayout) -> None:
        route_rows(self, expert_of(encoded), layout)
        route_rows(self, expert_of(encoded), encoded.layout, "encoded")

    def _expert(self, encoded: PackedSequence) -> Tensor | None:
        number = expert_of(encoded)
        return number if has_languages(self) else named_expert(self.config.experts, number)

    def decoder_layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.layers))

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens at their positions: int64 (U,) and (U,) to (U, width)."""
        x = self.embed_tokens(tokens)
        if self.config.positions != "rotary":
            x = x + self._places(positions).to(x.dtype)
        if self.embedding_layernorm is not None:
            x = self.embedding_layernorm(x)
        return F.dropout(x, self.config.input_dropout, self.training)

    def position_table(self) -> Tensor:
        """The position embeddings that `embed` adds to tokens: (max_positions, width)."""
        weight = self.embed_tokens.weight
        return self._places(torch.arange(self.config.max_positions, device=weight.device))

    def _places(self, positions: Tensor) -> Tensor:
        config = self.config
        is_large = config.max_positions > _MOST_ROWS
        if self.embed_positions is None and (is_large or torch.compiler.is_compiling()):
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
