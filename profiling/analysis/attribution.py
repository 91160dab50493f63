"""Which range made each kernel: exactly one for each, so that tables add up.

In this order; the share of each rule is part of the report:

    forward      a backward operator launched it, whose forward operator is known by sequence number
                 or flow: the range around the forward operator, on its thread
    launch       the innermost range around the launch, on the launching thread
    time         no range on that thread (autograd's has none of ours): the innermost one that was
                 open on the main thread when it was launched
    external id  its launch is not in the trace, but it bears the number of its operator
    operator     no range at all was open, but an operator of PyTorch: the innermost one
    none         unattributed: no record of the launch, or no range was open

The phase is the outermost range below the step, by the same launch: a kernel of the backward has
phase ``backward`` and the range of the forward that made it.
"""

import re
from dataclasses import dataclass

import numpy as np

from analysis import steps as step_ranges
from analysis.table import NONE, Kind, Names, Nest, Table, busiest_thread

RULES = ("none", "launch", "forward", "time", "external id", "operator")
_NO_RULE, _LAUNCH, _FORWARD, _TIME, _EXTERNAL, _OPERATOR = range(6)
UNATTRIBUTED = "(unattributed)"
STEP = "(step)"  # directly in the step, in no range of it
_NUMBER = re.compile(r"\d+")
_MANY = 5
_BACKWARD = re.compile(r"^backward", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Launches:
    """Host times and threads at which each row of work was launched."""

    row: np.ndarray
    thread: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    is_known: np.ndarray


@dataclass(frozen=True, slots=True)
class Attribution:
    paths: list[str]
    path: np.ndarray
    phase: np.ndarray
    rule: np.ndarray
    is_backward: np.ndarray


def find_launches(table: Table) -> Launches:
    """Join work and launches by process and correlation id, which repeats between processes."""
    work, launches = table.work, table.launches
    row = np.full(len(work), -1, np.int64)
    if len(launches) and len(work):
        key = _keys(launches["process"], launches["correlation"])
        # The first of several: a runtime call holds the driver call that it makes.
        order = np.lexsort((-launches["end"], launches["start"], key))
        key = key[order]
        keys = _keys(work["process"], work["correlation"])
        position = np.minimum(np.searchsorted(key, keys), len(key) - 1)
        is_match = (key[position] == keys) & (work["correlation"] > 0)
        is_match &= work["kind"] != Kind.OPERATOR
        row[is_match] = order[position[is_match]]
    is_known, start = row >= 0, work["start"]
    placed = work["thread"] != NONE
    take = lambda column, default: (
        np.where(is_known, launches[column][row], default) if len(launches) else default
    )
    return Launches(
        row,
        take("thread", work["thread"]),
        take("start", np.where(placed, work["called"], start)),
        take("end", np.where(placed, work["called"], start)),
        is_known,
    )


def attribute(table: Table, launches: Launches, steps: dict[int, step_ranges.Steps]) -> Attribution:
    work, ranges = table.work, table.ranges
    place_of_name = np.empty(len(table.names), np.int64)
    place_of_name[np.argsort(np.array(table.names, object), kind="stable")] = np.arange(
        len(table.names)
    )
    annotated = Nest(ranges, np.flatnonzero(~ranges["is_op"]), place_of_name)
    operators = Nest(ranges, np.flatnonzero(ranges["is_op"]), place_of_name)
    labels = _Labels(table, annotated.parent, steps)
    process, has_place = work["process"], launches.thread != NONE
    main = np.full(len(work), NONE, np.int64)
    for number in range(len(table.processes)):
        # The thread of the steps or, without them, the one with the longest ranges.
        has_steps = number in steps and steps[number].is_found
        longest = busiest_thread(table.ranges[table.annotations(number)])
        main[process == number] = steps[number].thread if has_steps else longest
    on_thread = annotated.find(process, launches.thread, launches.begin, launches.end)
    on_thread[~has_place] = -1
    on_main = annotated.find(process, main, launches.begin, launches.end)
    on_main[~has_place] = -1
    operator = operators.find(process, launches.thread, launches.begin, launches.end)
    operator[~has_place] = -1
    backward, linked = _backward(ranges, operators.parent, operator)

    label_range = np.where(on_thread >= 0, on_thread, on_main)
    rule = np.where(on_thread >= 0, _LAUNCH, np.where(on_main >= 0, _TIME, _NO_RULE))
    phase = labels.phase[np.where(on_main >= 0, on_main, on_thread)]
    made = np.flatnonzero(linked >= 0)
    forward = annotated.find(
        process[made],
        ranges["forward_thread"][linked[made]],
        ranges["forward_time"][linked[made]],
        ranges["forward_time"][linked[made]],
    )
    made, forward = made[forward >= 0], forward[forward >= 0]
    label_range[made], rule[made] = forward, _FORWARD
    rule[(rule != _NO_RULE) & ~launches.is_known & (work["kind"] != Kind.OPERATOR)] = _EXTERNAL
    is_backward = backward | labels.is_backward[phase]
    phase = np.where(backward & (phase <= labels.step), labels.backward, phase)
    path = labels.path[label_range]
    bare = np.flatnonzero((rule == _NO_RULE) & (operator >= 0))
    path[bare], rule[bare] = labels.of_operators(ranges["name"][operator[bare]]), _OPERATOR
    return Attribution(labels.texts, path, phase, rule, is_backward)


class _Labels:
    """Texts for ranges; row -1 is `UNATTRIBUTED`."""

    step, backward = 1, 2

    def __init__(
        self, table: Table, parent: np.ndarray, steps: dict[int, step_ranges.Steps]
    ) -> None:
        self._labels = Names(UNATTRIBUTED, STEP, "backward")
        self.texts = self._labels.list
        ranges, names = table.ranges, _without_counters(table)
        self._names = names
        containers = {int(row) for each in steps.values() for row in each.containers}
        # One more at the end, for row -1.
        self.path = np.zeros(len(ranges) + 1, np.int64)
        self.phase = np.zeros(len(ranges) + 1, np.int64)
        order = np.lexsort((-ranges["end"], ranges["start"]))
        for row in order[~ranges["is_op"][order]].tolist():
            self._label(row, names[ranges["name"][row]], int(parent[row]), containers)
        self.is_backward = np.array([_BACKWARD.match(text) is not None for text in self.texts])

    def of_operators(self, names: np.ndarray) -> np.ndarray:
        """Return the numbers of the labels of operators, by the numbers of their names."""
        numbers, position = np.unique(names, return_inverse=True)
        labels = [self._labels.number(f"(operator) {self._names[number]}") for number in numbers]
        return np.array(labels, np.int64)[position]

    def _label(self, row: int, name: str, around: int, containers: set[int]) -> None:
        is_top = around < 0 or self.path[around] == self.step
        if row in containers or (step_ranges.STEP.match(name) and is_top):
            self.path[row] = self.phase[row] = self.step
        elif is_top:
            self.path[row] = self.phase[row] = self._labels.number(name)
        else:
            self.path[row] = self._labels.number(f"{self.texts[self.path[around]]} / {name}")
            self.phase[row] = self.phase[around]


def _without_counters(table: Table) -> list[str]:
    """Return names of ranges, where a number that is another each time is left out.

    ``Compute 30`` of iteration 30 is one of many; ``layers.3`` comes again in every step.
    """
    rows = table.ranges["name"][~table.ranges["is_op"]]
    used, times = np.unique(rows, return_counts=True)
    families: dict[str, list[tuple[int, int]]] = {}
    for name, count in zip(used.tolist(), times.tolist(), strict=True):
        family = _NUMBER.sub("#", table.names[name])
        families.setdefault(family, []).append((name, count))
    names = list(table.names)
    for family, members in families.items():
        if len(members) >= _MANY and all(count == 1 for _, count in members):
            for name, _ in members:
                names[name] = family
    return names


def _backward(
    ranges: np.ndarray, parent: np.ndarray, operator: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return if an operator around each is backward, and the innermost with a forward."""
    backward = np.zeros(len(operator), bool)
    linked = np.full(len(operator), -1, np.int64)
    current = operator.copy()
    while (open_rows := np.flatnonzero(current >= 0)).size:
        at = current[open_rows]
        backward[open_rows] |= ranges["is_backward"][at]
        has_link = (ranges["forward_thread"][at] != NONE) & (linked[open_rows] < 0)
        linked[open_rows[has_link]] = at[has_link]
        current[open_rows] = parent[at]
    return backward, linked


def _keys(process: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    # Correlation ids are 32 bit.
    return process.astype(np.int64) << 40 | (correlation & (1 << 40) - 1)
