"""Position encodings of attention scores: rotary and relative."""

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.attention.context import Context
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.checks import wrong


@dataclass(frozen=True, slots=True)
class Rotary:
    r"""Rotate queries and keys by their position in their own sequence (RoPE).

    Of the D channels of a head the first R = ``fraction`` D rotate, in pairs (c, c + R/2), by the
    angle position times ``base ** (-2c / R)``: the "halves" convention of GPT-NeoX.

    Attributes:
        base: Base of the wavelengths; the longest is about 2 pi ``base`` positions.
        fraction: Fraction of the channels that rotate, in (0, 1].

    References:
        Su et al., 2021, https://arxiv.org/abs/2104.09864.
    """

    base: float = 10000.0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if not self.base > 0:
            raise ValueError(f"Rotary: `base` must be positive, but is {self.base}.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"Rotary: `fraction` must be in (0, 1], but is {self.fraction}.")

    def rotated(self, head_width: int) -> int:
        """R, the number of rotated channels among ``head_width``: even."""
        return 2 * int(head_width * self.fraction / 2)


@dataclass(frozen=True, slots=True)
class RelativeBias:
    r"""Relative position scores of Transformer-XL: by content and by distance.

    .. math::
        s_{ij} = \mathrm{scale} \, \bigl( (q_i + u)^\top k_j + (q_i + v)^\top r_{i-j} \bigr)

    NeMo's Conformer and Hugging Face's Parakeet compute the same scores; their position embeddings
    are ordered from the largest distance to the smallest, the reverse of this table.

    Attributes:
        content_bias: u, (H, D).
        position_bias: v, (H, D).
        table: r, (2 L - 1, H, D). Row ``L - 1 + d`` belongs to distance d = i - j; L is at least
            the longest sequence, or `Context.reach` if that is less.

    References:
        Dai et al., 2019, https://arxiv.org/abs/1901.02860.
    """

    content_bias: Tensor
    position_bias: Tensor
    table: Tensor

    def reach(self, *layouts: PackedLayout, context: Context | None = None) -> int:
        """Return L, checked against the longest sequence of the layouts, or what a context sees.

        Raises:
            ValueError: The table is too short.
        """
        reach = (self.table.shape[0] + 1) // 2
        longest = max(layout.max_seqlen_bound for layout in layouts)
        sees = "the longest sequence"
        if context is not None and context.reach < longest:
            longest, sees = context.reach, "all distances in the context"
        if reach < longest:
            rule = f"have at least 2 * {longest} - 1 rows, for {sees}"
            raise wrong("attention", "position.table", rule, tuple(self.table.shape))
        return reach


def angles(positions: Tensor, rotary: Rotary, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of each row's position, (T,): two of (T, 1, R / 2)."""
    width = rotary.rotated(like.shape[-1])
    exponents = torch.arange(0, width, 2, device=like.device, dtype=torch.float64) / width
    phases = positions[:, None, None] * rotary.base**-exponents
    return phases.cos().to(like.dtype), phases.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, unrotated = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, unrotated], dim=-1)
