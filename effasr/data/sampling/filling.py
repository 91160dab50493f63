"""Fills micro-batches up to both budgets, at equal cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.plan import shuffled

# Exchanges utterances between groups until their sums reach the targets.


_SPARE_SLOTS = 4
"""Empty slots of each group beyond its initial or the mean size, so that it can grow."""
_UNIT_BITS = 20
"""A full group has 2**20 units of each quantity, so that quantities can be compared."""
_RATIO_BITS = 10
_MOST = 2**26
"""Units at which excesses are clipped; sums over five quantities stay inside int32."""
_NO_MEMBER = 2**29
"""Value of a choice beyond a group's slots: worse than any other."""
_AT_ONCE = 2**18
"""Choices evaluated at a time, so that their arrays stay in the processor's cache."""
_CHOOSERS = 16
"""Groups over a limit that choose a partner in a round."""
_PARTNERS = 32
"""Candidate partners of each of these groups."""
_FEW_GROUPS = 64
"""Up to this many pairs get more choices, or groups choose partners."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantity:
    """A quantity whose sums are to be equal over groups."""

    values: np.ndarray  # int32 (n,), the value of each utterance
    limit: int | None  # Upper limit of a group's sum; None if equality is only an objective
    slack: int = 2  # Tolerated deviation from the mean in 1/1024 of it, where there is no limit
    weight: int = 8  # Weight relative to the other quantities, in eighths


class Exchange:
    """Utterances in groups; each group owns a range of slots, some of which are empty.

    In each round groups with too much are paired with groups with too little, and each pair makes
    the one exchange, out of a thousand, that brings all its sums closest to each other. All pairs
    do so at once, in whole arrays, so that millions of utterances take seconds. Decisions use
    integers, because those of floats could differ between machines.
    """

    def __init__(
        self, quantities: Sequence[Quantity], group: np.ndarray, groups: int, aside: int = 0
    ) -> None:
        self._groups, self._members, self._alike = groups, len(group), groups - aside
        count = np.bincount(group, minlength=groups)
        self._size = slots(count)
        self._start = np.cumsum(self._size) - self._size
        self._slots = np.full(int(self._size.sum()), len(group), np.int32)
        bounds = np.append(0, np.cumsum(count))
        places = np.arange(len(group))
        places += np.repeat(self._start - bounds[:-1], count)
        self._slots[places] = np.arange(len(group), dtype=np.int32)
        del places
        # An empty slot holds index n, whose values are 0.
        self._values = [np.append(q.values, np.int32(0)) for q in quantities]
        self._limited = sum(q.limit is not None for q in quantities)
        self._turn = np.zeros(groups, np.int64)
        self._excess = np.empty((len(quantities), groups), np.int64)
        self._ratio, low, high = [], [], []
        for row, quantity in enumerate(quantities):
            ends = np.append(0, np.cumsum(quantity.values, dtype=np.int64))
            sums = np.diff(ends[bounds])
            mean = int(sums[: self._alike].sum()) // max(1, self._alike)
            self._excess[row] = sums - mean
            unit = max(1, mean if quantity.limit is None else quantity.limit)
            scaled = (quantity.weight << _UNIT_BITS + _RATIO_BITS) // (8 * unit)
            self._ratio.append(scaled)
            slack = mean * quantity.slack // 1024
            high.append(slack if quantity.limit is None else quantity.limit - mean)
            low.append(-slack if quantity.limit is None else -(2**62))
        self._low, self._high = np.array(low)[:, None], np.array(high)[:, None]
        self._buffers = np.empty((3, _AT_ONCE), np.int32)

    @property
    def has_wishes(self) -> bool:
        """Whether a quantity has no limit."""
        return self._limited < len(self._values)

    def over(self) -> np.ndarray:
        """Return bool (groups,): which groups exceed a limit."""
        over = self._excess[: self._limited] > self._high[: self._limited]
        return np.asarray(over.any(axis=0))

    def overflow(self) -> int:
        """Return the excess over limits in units, over all groups and quantities."""
        over = self._excess[: self._limited] - self._high[: self._limited]
        np.maximum(over, 0, out=over)
        return sum(int(_units(row, r).sum()) for row, r in zip(over, self._ratio, strict=False))

    def uneven(self) -> np.ndarray:
        """Return bool (groups,): which groups exceed a limit or differ too much from the mean."""
        outside = (self._excess > self._high) | (self._excess < self._low)
        uneven = np.asarray(outside.any(axis=0))
        uneven[self._alike :] = False
        return uneven

    def even_out(self, number: int, wanting: np.ndarray, *, wishes: bool) -> None:
        """Let every pair with a group marked in ``wanting`` make its best exchange.

        With ``wishes``, quantities without a limit count too.
        """
        rows = len(self._values) if wishes else self._limited
        self._round(number, wanting, rows, squeeze=False)

    def squeeze(self, number: int, wanting: np.ndarray) -> None:
        """Let groups reduce their excess over limits; see `even_out`.

        Where few groups are marked, each may choose among many partners.
        """
        few = np.roll(np.flatnonzero(wanting), -number * _CHOOSERS)
        helping = np.roll(np.arange(self._alike, self._groups), number)
        if len(few) > _CHOOSERS and helping.size:
            ones = few[few < self._alike][: len(helping)]
            self._pairs(ones, helping[: len(ones)], number, self._limited, squeeze=True)
            return
        if len(few) > _FEW_GROUPS:
            self._round(number, wanting, self._limited, squeeze=True)
            return
        some = shuffled(self._groups, number, 0)[:_PARTNERS]
        some = np.concatenate([some[some < self._alike], helping[:_PARTNERS]])
        choices = self._choices(number, few=False)
        for group in few[:_CHOOSERS].tolist():
            other_items = some[some != group]
            ones = np.full(len(other_items), group)
            self._exchange(ones, other_items, choices, self._limited, squeeze=True, best_only=True)
        self._turn[few[:_CHOOSERS]] += int(choices.max())
        self._turn[some] += 1

    def _round(self, number: int, wanting: np.ndarray, rows: int, *, squeeze: bool) -> None:
        order = self._order(number, rows)
        half = self._alike // 2
        ones, other_items = order[::-1][:half], order[:half]
        active = wanting[ones] | wanting[other_items]
        self._pairs(ones[active], other_items[active], number, rows, squeeze=squeeze)

    def _pairs(
        self, ones: np.ndarray, others: np.ndarray, number: int, rows: int, *, squeeze: bool
    ) -> None:
        """Let each group of ``ones`` make an exchange with the group of ``others`` at its index."""
        choices = self._choices(number, few=len(ones) <= _FEW_GROUPS)
        at_once = max(1, _AT_ONCE // len(choices) ** 2)
        for begin in range(0, len(ones), at_once):
            end = begin + at_once
            self._exchange(ones[begin:end], others[begin:end], choices, rows, squeeze=squeeze)
        for some in (ones, others):
            self._turn[some] += int(choices.max())

    def members(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the utterances, group by group, and where each group begins.

        Returns:
            int32 (n,), and int64 (groups + 1,).
        """
        used = self._slots < self._members
        ends = np.concatenate([[0], np.cumsum(used)])
        starts = ends[np.append(self._start, len(used))]
        return self._slots[used], starts

    def _order(self, number: int, rows: int) -> np.ndarray:
        """Order the groups so that the first should exchange with the last, and so on inwards."""
        alike = self._excess[:, : self._alike]
        excess = [_units(row, ratio) for row, ratio in zip(alike, self._ratio, strict=True)]
        # Differences between quantities first: random exchanges do not reduce them.
        keys = [item - excess[0] for item in excess[1:rows]] + excess[:rows]
        which = number % (len(keys) + 1)
        if which == len(keys):
            return shuffled(self._alike, number, 0)
        return np.argsort(keys[which], kind="stable")

    def _choices(self, number: int, *, few: bool) -> np.ndarray:
        """Return the slots a group may give, relative to its turn: one, two, or at first a run."""
        slots = len(self._slots) // self._groups
        run = slots // 32 >> number // 2
        if run > 2:
            return np.arange(32 * run).reshape(32, run)
        if number % 3 == 0:
            return np.arange(96 if few else 32)[: 2 * slots, None]
        return np.stack(np.triu_indices(min(15 if few else 9, 2 * slots), 1), axis=1)

    def _exchange(
        self,
        ones: np.ndarray,
        others: np.ndarray,
        choices: np.ndarray,
        rows: int,
        *,
        squeeze: bool,
        best_only: bool = False,
    ) -> None:
        """Let each pair, or only the best one, make its best exchange if it is an improvement."""
        count = len(choices)
        slots_one, beyond_one = self._choices_of(ones, choices)
        slots_other, beyond_other = self._choices_of(others, choices)
        chosen_one, chosen_other = self._slots[slots_one], self._slots[slots_other]
        shape = len(ones), count, count
        miss, moved, spare = (b[: len(ones) * count**2].reshape(shape) for b in self._buffers)
        now = np.zeros(len(ones), np.int64)
        for row in range(rows):
            values, ratio = self._values[row], self._ratio[row]
            provided = _units(values[chosen_one].sum(axis=2, dtype=np.int64), ratio)
            used = _units(values[chosen_other].sum(axis=2, dtype=np.int64), ratio)
            if not row:
                provided[beyond_one], used[beyond_other] = _NO_MEMBER, -_NO_MEMBER
            target = moved if row else miss
            excess_one, excess_other = self._excess[row, ones], self._excess[row, others]
            if squeeze:
                np.subtract(provided[:, :, None], used[:, None, :], out=target)
                over_one = _units(excess_one - self._high[row], ratio)
                over_other = _units(excess_other - self._high[row], ratio)
                now += np.maximum(over_one, 0) + np.maximum(over_other, 0)
                np.subtract(over_one[:, None, None], target, out=spare)
                np.maximum(spare, 0, out=spare)
                target += over_other[:, None, None]
                np.maximum(target, 0, out=target)
                target += spare
            else:
                # Moving this much from one group to the other makes their sums equal.
                requested = _units((excess_one - excess_other) // 2, ratio)
                now += np.abs(requested)
                provided -= requested[:, None]
                np.subtract(provided[:, :, None], used[:, None, :], out=target)
                np.abs(target, out=target)
            if row:
                miss += moved
        flat = miss.reshape(len(ones), -1)
        best = flat.argmin(axis=1)
        gain = now - flat[np.arange(len(ones)), best]
        if best_only:
            gain[np.arange(len(ones)) != gain.argmax()] = 0
        better = np.flatnonzero(gain > 0)
        item, other = np.divmod(best[better], count)
        places_one, places_other = slots_one[better, item], slots_other[better, other]
        moved_one, moved_other = self._slots[places_one], self._slots[places_other]
        self._slots[places_one], self._slots[places_other] = moved_other, moved_one
        for row, values in enumerate(self._values):
            change = values[moved_one].sum(axis=1, dtype=np.int64)
            change -= values[moved_other].sum(axis=1, dtype=np.int64)
            self._excess[row, ones[better]] -= change
            self._excess[row, others[better]] += change

    def _choices_of(self, groups: np.ndarray, choices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of each choice, (groups, choices, slots); and which are out of range."""
        size = self._size[groups, None, None]
        slots = (self._turn[groups, None, None] + choices) % size
        return slots + self._start[groups, None, None], choices.max(axis=1) >= size[:, :, 0]


def slots(members: np.ndarray) -> np.ndarray:
    """Return the number of slots of groups with these initial sizes: int (groups,)."""
    mean = -(-int(members.sum()) // len(members))
    return np.maximum(members, mean) + _SPARE_SLOTS


def _units(values: np.ndarray, ratio: int) -> np.ndarray:
    # Two calls, since np.clip first asks for the limits of the dtype, which takes longer than both.
    units = np.maximum((values * ratio) >> _RATIO_BITS, -_MOST)
    return np.minimum(units, _MOST).astype(np.int32)


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

    def take(self, places: np.ndarray) -> "Utterances":
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
        # How many micro-batches are half full if the others are full.
        room = micro_batches * limits[scarce] * _FULL - 1000 * totals[scarce]
        aside = min(micro_batches - 1, max(1, room // (limits[scarce] * (_FULL - 500))))
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
