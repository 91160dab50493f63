"""Multi-head attention over packed sequences, with learned projections."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.cache.contiguous import ContiguousCache
from effasr.nn.cache.paged import PagedCache
from effasr.nn.linear import Linear, joined_linear
from effasr.nn.residual import Residual
from effasr_kernels import (
    BackendUnavailable,
    Context,
    PackedLayout,
    RelativeBias,
    Rotary,
    attention,
    guided_attention,
)
from effasr_kernels.attention.position import angles, rotate
from effasr_kernels.shared.joined import unbind_parts

_ROWS = 16
"""Rows of the call by which a backend is tried."""


class SelfAttention(nn.Module):
    """Attention within each sequence: (T, width) to (T, width)."""

    backend: str | None = None
    """In training; None for any that serves the call, as elsewhere."""
    inference_backend: str | None = None

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        causal: bool = False,
        rotary: Rotary | None = None,
        bias: bool = True,
        key_bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.causal, self.rotary, self.dropout = causal, rotary, dropout
        # Queries, keys and values from one product: rows 0:HD, HD:2HD and 2HD:3HD.
        self.qkv_proj = joined_linear(width, heads * head_dim, (bias, bias and key_bias, bias))
        self.o_proj = Linear(heads * head_dim, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        embeddings: Tensor | None = None,
        context: Context | None = None,
        *,
        residual: Residual | None = None,
    ) -> Tensor:
        # x: (T, width)
        if residual is None:
            return self.read(x, layout, embeddings, context)[0]
        y, _ = self._attend(x, layout, embeddings, context, residual.seed)
        return residual.project(self.o_proj, y)

    def read(
        self,
        x: Tensor,
        layout: PackedLayout,
        embeddings: Tensor | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend as `forward`; also return keys and values, (T, H, D) each, for the cache."""
        y, (k, v) = self._attend(x, layout, embeddings, context)
        return self.o_proj(y), (self._placed(k, layout), v)

    def _attend(
        self,
        x: Tensor,
        layout: PackedLayout,
        embeddings: Tensor | None,
        context: Context | None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Weighted values (T, H D), and keys and values, (T, H, D) each."""
        q, k, v = self._qkv(x)
        position = self._position(embeddings)
        return self._weighted((q, k, v), layout, position, context, seed).flatten(1), (k, v)

    def _weighted(
        self,
        qkv: tuple[Tensor, ...],
        layout: PackedLayout,
        position: Rotary | RelativeBias | None,
        context: Context | None,
        seed: Tensor | None,
        scale: float | None = None,
    ) -> Tensor:
        q, k, v = qkv
        return attention(
            q,
            k,
            v,
            layout,
            causal=self.causal,
            context=context,
            scale=scale,
            position=position,
            dropout=self.dropout if self.training else 0.0,
            seed=seed,
            backend=self.backend if self.training else self.inference_backend,
        )

    def keys_values(self, x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Only the keys and values of `read`."""
        _, k, v = self._qkv(x)
        return self._placed(k, layout), v

    def step(
        self, x: Tensor, cache: ContiguousCache | PagedCache, layer: int, positions: Tensor
    ) -> Tensor:
        """Attend from a new row of each sequence, whose keys and values it appends to the cache."""
        # x: (N, width), the next row of each sequence; positions: int64 (N,) -> (N, width)
        qkv = self.qkv_proj(x).view(-1, 3, self.heads, self.head_dim)
        if self.rotary is not None:
            q, k, v = qkv.unbind(1)
            qkv = torch.stack([self._placed(q, positions), self._placed(k, positions), v], 1)
        return self.o_proj(cache.attend(layer, qkv[:, 0], qkv[:, 1:]).flatten(1))

    def _placed(self, x: Tensor, positions: Tensor | PackedLayout) -> Tensor:
        """Queries or keys, (T, H, D), rotated by their positions; a cache holds such keys."""
        if self.rotary is None:
            return x
        positions = positions if isinstance(positions, Tensor) else positions.positions()
        return rotate(x, *angles(positions, self.rotary, x))

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return _parts(self.qkv_proj(x).view(-1, 3, self.heads, self.head_dim))

    def _position(self, embeddings: Tensor | None) -> Rotary | RelativeBias | None:
        return self.rotary


class RelativeSelfAttention(SelfAttention):
    """Attention by content and by distance: Transformer-XL, https://arxiv.org/abs/1901.02860."""

    def __init__(
        self, width: int, heads: int, head_dim: int, *, bias: bool = True, dropout: float = 0.0
    ):
        super().__init__(width, heads, head_dim, bias=bias, dropout=dropout)
        self.relative_k_proj = Linear(width, heads * head_dim, bias=False)
        self.bias_u = nn.Parameter(torch.empty(heads, head_dim))
        self.bias_v = nn.Parameter(torch.empty(heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias_u)
        nn.init.zeros_(self.bias_v)

    def _position(self, embeddings: Tensor | None) -> RelativeBias:
        if embeddings is None:
            raise ValueError(
                "RelativeSelfAttention: `embeddings` must be the embeddings of the distances, but "
                "is None: make them with effasr.nn.positions.relative_sinusoids."
            )
        table = self.relative_k_proj(embeddings).view(-1, self.heads, self.head_dim)
        return RelativeBias(self.bias_u, self.bias_v, table)


class GatedBiasSelfAttention(SelfAttention):
    """Attention with a bias of each distance, times a gate of the query: WavLM.

    https://arxiv.org/abs/2110.13900. The gate is a further channel of the queries, and the bias one
    of a table of relative positions, so that all backends of those compute the scores.
    """

    spare = 8  # Channels; more than one, as kernels read vectors

    def __init__(self, width: int, heads: int, head_dim: int, *, dropout: float = 0.0):
        super().__init__(width, heads, head_dim, dropout=dropout)
        self.gate = nn.Linear(head_dim, 8)
        self.gate_scale = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gate_scale)

    def table(self, bias: Tensor) -> Tensor:
        """The table of `RelativeBias`, of (2 L - 1, H)."""
        columns = (bias * self.head_dim**0.5)[..., None]
        return F.pad(columns, (self.head_dim, self.spare - 1))

    def _attend(
        self,
        x: Tensor,
        layout: PackedLayout,
        embeddings: Tensor | None,
        context: Context | None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        assert embeddings is not None
        q, k, v = self._qkv(x)
        parts = self.gate(x.view(-1, self.heads, self.head_dim)).unflatten(-1, (2, 4))
        first, second = parts.sum(-1).sigmoid().unbind(-1)
        gate = first * (second * self.gate_scale - 1.0) + 2.0
        q = torch.cat([q, F.pad(gate[..., None], (0, self.spare - 1)).to(q.dtype)], -1)
        none = q.new_zeros(self.heads, q.shape[-1])
        wide = (q, *(F.pad(part, (0, self.spare)) for part in (k, v)))
        position = RelativeBias(none, none, embeddings.to(q.dtype))
        y = self._weighted(wide, layout, position, context, seed, scale=self.head_dim**-0.5)
        return y[..., : self.head_dim].flatten(1), (k, v)


class CrossAttention(nn.Module):
    """Attention from the rows of one packed batch to the rows of another."""

    backend: str | None = None
    """In training; None for any that serves the call, as elsewhere."""
    guided_backend: str | None = None

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        key_bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        self.q_proj = Linear(width, heads * head_dim, bias=bias)
        # Keys and values from one product: rows 0:HD and HD:2HD.
        self.kv_proj = joined_linear(width, heads * head_dim, (bias and key_bias, bias))
        self.o_proj = Linear(heads * head_dim, width, bias=bias)

    def keys_values(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Project the encoder output: (T, width) to keys and values, (T, H, D) each."""
        k, v = _parts(self.kv_proj(encoded).view(-1, 2, self.heads, self.head_dim))
        return k, v

    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        encoded: Tensor,
        layout_encoded: PackedLayout,
        *,
        sigma: float | None = None,
        seed: Tensor | None = None,
        residual: Residual | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        # x: (U, width); encoded: (T, width), the encoder output -> (U, width), and the penalty of
        # each row, averaged over the heads: (U,) or None
        q = self._queries(x)
        k, v = self.keys_values(encoded)
        dropout = self.dropout if self.training else 0.0
        penalty = None
        if sigma is None:
            backend = self.backend if self.training else None
            options: dict[str, Any] = {"dropout": dropout, "seed": seed, "backend": backend}
            y = attention(q, k, v, layout, layout_encoded, **options)
        else:
            options = {"dropout": dropout, "seed": seed, "backend": self.guided_backend}
            y, by_head = guided_attention(q, k, v, layout, layout_encoded, sigma=sigma, **options)
            penalty = by_head.mean(1)
        y = y.flatten(1)
        return self.o_proj(y) if residual is None else residual.project(self.o_proj, y), penalty

    def read(
        self,
        x: Tensor,
        layout: PackedLayout,
        keys_values: tuple[Tensor, Tensor],
        layout_encoded: PackedLayout,
    ) -> Tensor:
        y = attention(self._queries(x), *keys_values, layout, layout_encoded)
        return self.o_proj(y.flatten(1))

    def step(self, x: Tensor, cache: ContiguousCache | PagedCache, layer: int) -> Tensor:
        return self.o_proj(cache.attend(layer, self._queries(x)).flatten(1))

    def weights(self, x: Tensor, keys: Tensor, lengths: Tensor) -> Tensor:
        """Attention of new rows to frames, in float64: rounding must not depend on the batch."""
        # x: (N K, width), K rows of each sequence; keys: (N, H, t, D); lengths: int64 (N,), frames
        # of each sequence, at most t -> float64 (N K, t)
        q = self._queries(x).unflatten(0, (len(keys), -1)).double() * self.head_dim**-0.5
        scores = torch.einsum("nkhd,nhtd->nkht", q, keys.double())
        past = torch.arange(keys.shape[2], device=x.device) >= lengths[:, None, None, None]
        # Softmax over nothing is NaN.
        weights = scores.masked_fill(past, -torch.inf).softmax(-1).masked_fill(past, 0)
        return weights.mean(2).flatten(0, 1)

    def head_weights(self, x: Tensor, encoded: Tensor) -> Tensor:
        """Attention of each head in one sequence, from (U, width) to (T, width): (H, U, T)."""
        keys, _ = self.keys_values(encoded)
        q = self._queries(x).double() * self.head_dim**-0.5
        return torch.einsum("uhd,thd->hut", q, keys.double()).softmax(-1)

    def _queries(self, x: Tensor) -> Tensor:
        return self.q_proj(x).view(-1, self.heads, self.head_dim)


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Split (T, P, H, D); on a GPU the gradients of the parts need no copy to be joined again."""
    if x.is_cuda and x.requires_grad and not torch.compiler.is_compiling():
        return unbind_parts(x)
    return x.unbind(1)


def try_backend(
    module: SelfAttention | CrossAttention,
    context: Context | None,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    *,
    trained: bool = True,
) -> None:
    """Attend as the module does, in one sequence; raises `BackendUnavailable`."""
    is_gated = isinstance(module, GatedBiasSelfAttention)
    sizes = module.heads, module.head_dim + (module.spare if is_gated else 0)
    q, k, v = (
        torch.zeros(_ROWS, *sizes, dtype=dtype, device=device, requires_grad=trained) for _ in "qkv"
    )
    layout, position, causal = PackedLayout.from_lengths([_ROWS], device), None, False
    layout_k = PackedLayout.from_lengths([_ROWS], device)
    if isinstance(module, SelfAttention):
        layout_k, position, causal = layout, module.rotary, module.causal
    if is_gated or isinstance(module, RelativeSelfAttention):
        bias, table = q.new_zeros(sizes), q.new_zeros(2 * _ROWS - 1, *sizes)
        position = RelativeBias(bias, bias, table)
    options = {"causal": causal, "context": context, "position": position}
    # With a seed, as drawing one would change all random numbers after it.
    options |= {"dropout": module.dropout if trained else 0.0, "seed": 0, "backend": backend}
    attention(q, k, v, layout, layout_k, **options)


def refusal(error: BackendUnavailable, backend: str) -> str:
    """Why a requested backend does not serve a call."""
    return str(error).partition(f"({backend}: ")[2].removesuffix(").")
