"""Cost model: predicted FLOPs of an utterance by its lengths."""

import math
from dataclasses import dataclass

import numpy as np

from effasr.checks import check
from effasr_kernels import Context

FACTORS = ("frame", "frame_pair", "token", "token_pair", "token_frame")
"""Fields of a `CostModel` that are FLOPs."""

_MOST = 2**62
"""Upper limit of a cost, so that several can be added in int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    r"""Predicted FLOPs of the forward of an utterance of f encoder frames and u decoder tokens.

    .. math:: a f + b p + c u + d u^2 + e u f

    A multiply-add is two FLOPs. `effasr.model.cost.cost_model` derives the factors of a model.
    The backward of matrix products is twice the forward, so it changes no comparison.
    """

    frame: float  # a, FLOPs per frame: convolutions, projections, feed-forward networks
    # b, FLOPs per pair of frames: self-attention of the encoder. There are p of them, f^2 without a
    # context
    frame_pair: float
    token: float  # c, FLOPs per token
    token_pair: float  # d, FLOPs per pair of tokens: self-attention of the decoder
    # e, FLOPs per pair of a token and a frame: cross-attention, transducer joint
    token_frame: float
    # Contexts of the encoder, over which p is a mean, rounded down; none for all pairs
    contexts: tuple[Context, ...] = ()

    def __post_init__(self) -> None:
        for name in FACTORS:
            value = getattr(self, name)
            rule = "be 0 or at least 1 FLOP"
            remedy = "costs are counted in whole FLOPs"
            check(value == 0 or 1 <= value < math.inf, name, rule, value, remedy)
        if not any(getattr(self, name) for name in FACTORS):
            raise ValueError("`frame` or another factor must be at least 1 FLOP, but all are 0.")

    def of(self, frames: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the FLOPs of each utterance, int64 (n,), equal on every machine.

        The factors are rounded to integers.
        """
        a, b, c, d, e = (round(getattr(self, name)) for name in FACTORS)
        f = np.asarray(frames).astype(np.int64)
        u = np.asarray(tokens).astype(np.int64)
        longest, most = int(f.max(initial=0)), int(u.max(initial=0))
        if (a + b * longest + e * most) * longest + (c + d * most) * most >= _MOST:
            raise ValueError(
                f"`frames` and `tokens` must cost less than 2**62 FLOPs, but {longest} frames and "
                f"{most} tokens may cost more under {self}."
            )
        cost = e * u
        if self.contexts:
            cost += a
            cost *= f
            cost += b * self._pairs(f)
        else:
            cost += b * f
            cost += a
            cost *= f
        u_cost = d * u
        u_cost += c
        u_cost *= u
        cost += u_cost
        return cost

    def _pairs(self, frames: np.ndarray) -> np.ndarray:
        """Return p for each number of frames, from a table of the numbers that occur."""
        table = np.zeros(int(frames.max(initial=0)) + 1, np.int64)
        table[frames] = 1
        for count in np.flatnonzero(table):
            total = sum(context.pairs(int(count)) for context in self.contexts)
            table[count] = total // len(self.contexts)
        return table[frames]


CANARY_180M_FLASH = CostModel(
    frame=239_733_760,
    frame_pair=52_224,
    token=128_196_608,
    token_pair=8_192,
    token_frame=16_384,
)
"""Cost of the preset of this name, the default for planning without a model."""
