"""Arguments of `attention` as its implementations take them."""

from torch import Tensor

from effasr_kernels import Context, PackedLayout, RelativeBias, Rotary
from effasr_kernels.attention import AttentionArguments
from effasr_kernels.shared.dropout import seed_for


def attention_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    causal: bool = False,
    scale: float = 1.0,
    position: Rotary | RelativeBias | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    context: Context | None = None,
) -> AttentionArguments:
    """What the public function makes of these, unchecked."""
    relative = position if isinstance(position, RelativeBias) else None
    return AttentionArguments(
        *(q, k, v, layout_q, layout_k, causal, scale),
        position if isinstance(position, Rotary) else None,
        None if relative is None else relative.content_bias,
        None if relative is None else relative.position_bias,
        None if relative is None else relative.table,
        dropout,
        seed_for(dropout, seed, q.device),
        context,
    )
