"""A picture of one step: which phase the host is in, what each stream does, what is idle.

Drawn at the resolution of a screen: of every column, what fills most of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis import intervals
from analysis.attribution import Attribution
from analysis.budget import PARTS, Lane
from analysis.categories import CATEGORIES
from analysis.readers.table import Table

COLUMNS = 900
_MOST_ROWS = 6


def picture(
    table: Table, lane: Lane, attribution: Attribution, category: np.ndarray
) -> dict[str, Any]:
    """Return the step of median length of a lane.

    Args:
        table: The capture.
        lane: Device to draw.
        attribution: Attribution of the work.
        category: Category for each row of work, a number into `CATEGORIES`.

    Returns:
        ``rows``: a name, and segments (begin, end, label) in ms from the start of the step.
    """
    step = int(np.argsort(lane.wall, kind="stable")[(len(lane.wall) - 1) // 2])
    begin, end = (int(edge) for edge in lane.steps.windows[step])
    rows = [_row("budget", *_of_parts(lane, begin, end), list(PARTS), begin, end)]
    phases = _of_host(table, lane, begin, end)
    if phases is not None:
        rows.append(_row("host", *phases, begin, end))
    work = table.work[lane.rows]
    inside = (work["end"] > begin) & (work["start"] < end)
    kind = "stream" if table.has_gpu else "thread"
    streams, counts = np.unique(work["stream"][inside], return_counts=True)
    busiest = streams[np.lexsort((streams, -counts))][:_MOST_ROWS]
    for stream in sorted(busiest.tolist()):
        own = np.flatnonzero(inside & (work["stream"] == stream))
        rows.append(
            _row(
                f"{kind} {stream & 0xFFFFFF}",
                *(work["start"][own], work["end"][own], category[lane.rows[own]]),
                *(list(CATEGORIES), begin, end),
            )
        )
    return {
        "process": table.processes[lane.process].label,
        "step": int(lane.steps.numbers[step]),
        "length_ms": (end - begin) / 1e6,
        "rows": rows,
        "streams_left_out": len(streams) - len(busiest),
    }


def _of_parts(lane: Lane, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sets = [intervals.clip(lane.moments[name], begin, end) for name in PARTS]
    labels = np.concatenate([np.full(len(own), number) for number, own in enumerate(sets)])
    everything = np.concatenate(sets)
    return everything[:, 0], everything[:, 1], labels.astype(np.int64)


def _of_host(
    table: Table, lane: Lane, begin: int, end: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]] | None:
    """Return the outermost ranges below the step on its thread."""
    ranges, steps = table.ranges, lane.steps
    chosen = (ranges["process"] == lane.process) & ~ranges["is_op"]
    chosen &= (ranges["end"] > begin) & (ranges["start"] < end)
    if steps.is_found:
        chosen &= ranges["thread"] == steps.thread
    marks = np.array([text.startswith("ProfilerStep#") for text in table.names], bool)
    rows = np.setdiff1d(np.flatnonzero(chosen), steps.containers)
    rows = rows[~marks[ranges["name"][rows]]]
    if not len(rows):
        return None
    rows = rows[np.lexsort((-ranges["end"][rows], ranges["start"][rows]))]
    reached = np.maximum.accumulate(ranges["end"][rows])
    top = np.append(True, ranges["start"][rows][1:] >= reached[:-1])
    rows = rows[top]
    used, place = np.unique(ranges["name"][rows], return_inverse=True)
    texts = [table.names[name] for name in used]
    return ranges["start"][rows], ranges["end"][rows], place, texts


def _row(
    name: str,
    begins: np.ndarray,
    ends: np.ndarray,
    labels: np.ndarray,
    texts: list[str],
    begin: int,
    end: int,
) -> dict[str, Any]:
    edges = np.linspace(begin, end, COLUMNS + 1).round().astype(np.int64)
    columns = np.stack([edges[:-1], edges[1:]], axis=1)
    columns = columns[columns[:, 1] > columns[:, 0]]
    item, column, first, last = intervals.split(begins, ends, columns)
    filled = np.zeros((len(columns), len(texts)), np.int64)
    np.add.at(filled, (column, labels[item]), last - first)
    # A column that nothing fills to a third shows nothing.
    enough = filled.sum(1) * 3 >= columns[:, 1] - columns[:, 0]
    shown = np.where(enough, filled.argmax(1), -1)
    changes = np.flatnonzero(np.diff(shown)) + 1
    segments = []
    for group in np.split(np.arange(len(shown)), changes):
        if len(group) and shown[group[0]] >= 0:
            span = columns[group[0], 0] - begin, columns[group[-1], 1] - begin
            segments.append([span[0] / 1e6, span[1] / 1e6, texts[shown[group[0]]]])
    return {"name": name, "segments": segments}
