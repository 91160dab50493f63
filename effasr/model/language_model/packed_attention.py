"""Attention of transformers' models over packed sequences, by their attention interface.

A model calls the function that is registered as its ``attn_implementation`` with queries, keys and
values of shape (1, H, T, D), and with the keyword arguments of its own forward. One of these,
`CONTEXT`, has the boundaries of the sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from effasr_kernels import PackedLayout, attention

IMPLEMENTATION = "effasr_packed"
"""Name of the attention in transformers."""

CONTEXT = "effasr_context"
"""Keyword argument of a forward with the `AttentionContext`."""


class AttentionContext(Protocol):
    """How the rows of a forward attend."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attend causally: queries (T, H, D), keys and values (T, H_k, D), to (T, H, D)."""
        ...

    @property
    def longest(self) -> int:
        """Upper bound of the distance of a query to the first key that it reads, plus 1."""
        ...


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Each row attends to itself and to the earlier rows of its sequence."""

    layout: PackedLayout
    observe: Callable[[int, Tensor, Tensor], None] | None = field(default=None)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        dropout: float = 0.0,
    ) -> Tensor:
        if self.observe is not None:
            self.observe(layer, k, v)
        return attention(q, k, v, self.layout, causal=True, scale=scale, dropout=dropout)

    @property
    def longest(self) -> int:
        return self.layout.max_seqlen_bound


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do, within the sequences of a context."""
    # query: (1, H, T, D); key: (1, H_k, T, D); H_k divides H
    context: AttentionContext | None = kwargs.get(CONTEXT)
    name = type(module).__name__
    if context is None:
        raise ValueError(
            f"{name}: `{CONTEXT}` must be passed from the model's forward to its attention, but is "
            "missing: this family of language models cannot be packed."
        )
    if softcap is not None or kwargs.get("s_aux") is not None or attention_mask is not None:
        feature = "soft-capped scores" if softcap is not None else "attention sinks or masks"
        raise ValueError(
            f"{name}: packed attention must be plain, but this family of language models has "
            f"{feature}: choose another language model."
        )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ValueError(f"{name}: attention must be causal, but is not: choose another model.")
    if sliding_window is not None and context.longest > sliding_window:
        raise ValueError(
            f"{name}: a sequence must have at most {sliding_window} rows, the sliding window of "
            f"this layer, but may have {context.longest}: drop longer conversations with a smaller "
            "`data.token_budget`."
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    options = {"dropout": dropout} if dropout else {}
    y = context.attend(module.layer_idx, q, k, v, scaling, **options)  # type: ignore[arg-type]
    return y.unsqueeze(0), None


def register() -> str:
    """Register the attention with transformers, which must be installed; return its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    return IMPLEMENTATION
