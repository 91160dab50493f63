"""Fills micro-batches up to both budgets, at equal cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.exchange import Exchange, Quantity, slots

_ROUNDS = 16
"""Rounds of exchanges for equal cost; few micro-batches, where a round is cheap, get more."""
_ROUNDS_OF_FEW = 48
_FEW = 1024
_PATIENCE_IN_TRIALS, _PATIENCE = 8, 48
"""Rounds after which the excess over budgets must have fallen clearly, or filling fails."""
_COST_BITS = 22
"""Bits of the mean cost of a micro-batch: a much finer resolution than any imbalance."""
_FULL = 998
"""Fill of a budget in 1/1000 where a reserve is held in the last micro-batches."""
_NODE_BITS = 22
"""Bits of a node budget: sums over groups are compared in 32 bits."""
_LOOSE = 97
"""Percentage of fill below which a budget has a low weight, since it does not run out."""


@dataclass(frozen=True, slots=True, eq=False)
class Utterances:
    """Lengths and costs of the utterances to be distributed over micro-batches."""

    frames: np.ndarray  # int32 (n,), encoder frames
    tokens: np.ndarray  # int32 (n,), decoder tokens
    cost: np.ndarray | None = None  # int64 (n,), predicted FLOPs; None to leave costs unequal
    # int32 (n,), what each takes of the node budget; None without such a budget
    nodes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def totals(self) -> tuple[int, ...]:
        """Return total frames, tokens and utterances, and nodes if there are any."""
        frames, tokens = (int(v.sum(dtype=np.int64)) for v in (self.frames, self.tokens))
        if self.nodes is None:
            return frames, tokens, len(self)
        return frames, tokens, len(self), int(self.nodes.sum(dtype=np.int64))

    def take(self, places: np.ndarray) -> Utterances:
        """Return some of the utterances, without costs."""
        nodes = None if self.nodes is None else self.nodes[places]
        return Utterances(self.frames[places], self.tokens[places], nodes=nodes)


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """Utterances of each micro-batch."""

    members: np.ndarray  # int32 (n,), indices of utterances, micro-batch by micro-batch
    starts: np.ndarray  # int64 (micro-batches + 1,), index into ``members`` where each begins


def budgets(shape: StaticShape) -> tuple[int, ...]:
    """Return the most frames, tokens, utterances and, if limited, nodes of a micro-batch."""
    limits = shape.frame_budget, shape.token_budget, shape.max_sequences
    return limits if shape.node_budget is None else (*limits, shape.node_budget)


def scarcest(totals: Sequence[int], limits: Sequence[int]) -> int:
    """Return the largest quantity relative to its budget, as an index into `budgets`."""
    # Multiplies by the other limits, since quotients would be rounded.
    product = math.prod(limits)
    return max(range(len(limits)), key=lambda i: totals[i] * (product // limits[i]))


def fill(
    utterances: Utterances, shape: StaticShape, micro_batches: int, *, reserve: bool = False
) -> Filled | None:
    """Distribute all utterances over micro-batches within the budgets, with about equal costs.

    Each micro-batch gets a contiguous part of the order; then they exchange utterances.
    """
    totals, limits = utterances.totals(), budgets(shape)
    if any(total > limit * micro_batches for total, limit in zip(totals, limits, strict=True)):
        return None
    if len(utterances) <= micro_batches:
        ends = np.minimum(np.arange(micro_batches + 1), len(utterances))
        return Filled(np.arange(len(utterances), dtype=np.int32), ends)
    scarce = scarcest(totals, limits)
    aside = 0
    edges = np.arange(1, micro_batches + 1) * totals[scarce] // micro_batches
    if reserve:
        aside = _aside(totals[scarce], limits[scarce], micro_batches)
        full = micro_batches - aside
        most = min(totals[scarce], full * limits[scarce] * _FULL // 1000)
        edges[:full] = np.arange(1, full + 1) * most // max(1, full)
        edges[full:] = most + np.arange(1, aside + 1) * (totals[scarce] - most) // max(1, aside)
    group = _stretches(values_of(utterances, scarce), edges)
    quantities = _quantities(utterances, shape, group, micro_batches)
    exchange = Exchange(quantities, group, micro_batches, aside)
    if not _even_out(exchange, micro_batches):
        return None
    return Filled(*exchange.members())


def values_of(utterances: Utterances, kind: int) -> np.ndarray:
    """Return frames, tokens, ones or nodes, int32 (n,); ``kind`` as returned by `scarcest`."""
    if kind == 2:
        return np.ones(len(utterances), np.int32)
    if kind == 3:
        assert utterances.nodes is not None
        return utterances.nodes
    return utterances.tokens if kind else utterances.frames


def _aside(total: int, limit: int, micro_batches: int) -> int:
    """Return how many micro-batches are half full if the others are full."""
    room = micro_batches * limit * _FULL - 1000 * total
    return min(micro_batches - 1, max(1, room // (limit * (_FULL - 500))))


def _stretches(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the micro-batch of each utterance, int64 (n,), ascending; ``edges`` are the ends."""
    ends = np.cumsum(values, dtype=np.int64)
    # An utterance belongs to the micro-batch that holds its midpoint.
    ends *= 2
    ends -= values
    group = np.searchsorted(2 * edges, ends, side="left")
    return np.minimum(group, len(edges) - 1, out=group)


def _quantities(
    utterances: Utterances, shape: StaticShape, group: np.ndarray, micro_batches: int
) -> list[Quantity]:
    limited = [(utterances.frames, shape.frame_budget), (utterances.tokens, shape.token_budget)]
    if int(slots(np.bincount(group, minlength=micro_batches)).max()) > shape.max_sequences:
        limited.append((np.ones(len(utterances), np.int32), shape.max_sequences))
    if utterances.nodes is not None and shape.node_budget is not None:
        coarse = max(0, shape.node_budget.bit_length() - _NODE_BITS)
        # Rounded up, so that sums within the coarse budget are within the budget.
        limited.append((-(-utterances.nodes >> coarse), shape.node_budget >> coarse))
    quantities = []
    for value, limit in limited:
        loose = 100 * int(value.sum(dtype=np.int64)) < _LOOSE * limit * micro_batches
        quantities.append(Quantity(value, limit, weight=1 if loose else 8))
    if utterances.cost is not None:
        mean, most = _exact_sum(utterances.cost) // micro_batches, int(utterances.cost.max())
        coarse = max(0, mean.bit_length() - _COST_BITS, most.bit_length() - 30)
        quantities.append(Quantity((utterances.cost >> coarse).astype(np.int32), None))
    return quantities


def _exact_sum(values: np.ndarray) -> int:
    """Return the sum of int64 (n,) from 0 on; FLOPs of a large corpus exceed int64."""
    high, low = values >> 32, values & (2**32 - 1)
    return (int(high.sum()) << 32) + int(low.sum())


def _even_out(exchange: Exchange, micro_batches: int) -> bool:
    """Exchange utterances until no budget is exceeded; return whether that succeeded."""
    number = 0
    if exchange.has_wishes:
        rounds = _ROUNDS_OF_FEW if micro_batches <= _FEW else _ROUNDS
        while number < rounds and (uneven := exchange.uneven()).any():
            exchange.even_out(number, uneven, wishes=True)
            number += 1
    last = number + _ROUNDS
    while number < last and (over := exchange.over()).any():
        exchange.even_out(number, over, wishes=False)
        number += 1
    patience = _PATIENCE if exchange.has_wishes else _PATIENCE_IN_TRIALS
    before, number = 0, 0
    while (over := exchange.over()).any():
        if number % patience == 0:
            remaining = exchange.overflow()
            if number and 8 * remaining > 7 * before:
                return False
            before = remaining
        exchange.squeeze(number, over)
        number += 1
    return True
