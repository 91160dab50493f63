"""The budget of a step: by hand, and what must hold for every capture."""

import copy
from pathlib import Path

import numpy as np
import pytest
from analysis import attribution, intervals, nsys, steps, summary
from analysis.budget import Lane, categorize, classes, lanes
from analysis.sources import Subject, gather
from analysis.summary import by_range, cut
from analysis.table import LAUNCH, RANGE, WORK, Kind, Process, Table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.profiling.nsys_export import COPY, Export
from tests.profiling.test_analysis_nsys import export

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def budget(table: Table, **options) -> list[Lane]:
    launches = attribution.find_launches(table)
    result = {
        process: steps.find(table, process, launches.begin, **options)
        for process in sorted(set(table.work["process"].tolist()))
    }
    labels = attribution.attribute(table, launches, result)
    part = classes(table, [categorize(name) for name in table.names])
    return lanes(table, launches, result, labels, part)


def parts(lane: Lane) -> dict[str, list[int]]:
    return {
        name: result.tolist() for name, result in (lane.parts | lane.idle).items() if result.any()
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "export.sqlite"


def test_every_part_by_hand(path: Path) -> None:
    capture = Export()
    capture.range("data", 0, 100)
    capture.range("step", 100, 1000)
    # Launched at 150, begins at 200: 50 to launch, and the wait for it after the call's end.
    capture.kernel(150, 200, 300)
    # Two streams at once: 300 to 450 is busy once.
    capture.kernel(210, 300, 400)
    capture.kernel(220, 350, 450, stream=8)
    # Half hidden.
    capture.kernel(230, 420, 500, NCCL, stream=9)
    launch = capture.call(240, 245, name="cudaMemcpyAsync_v3020")
    capture.work(COPY, 480, 520, launch, copyKind=1, srcKind=1, dstKind=2, bytes=8, stream=10)
    # Nothing from 520 on, while the host waits from 530 to 600, then launches at 700.
    capture.call(530, 600, name="cudaStreamSynchronize_v3020")
    capture.kernel(700, 710, 1000)
    (lane,) = budget(nsys.read(capture.write(path)))
    assert lane.wall.tolist() == [1000]
    assert parts(lane) == {
        "compute": [100 + 150 + 290],
        "communication": [50],
        "copies": [20],
        "data_wait": [100],
        # 100 to the end of the first launch at 152; 520 to 530; 600 to 702.
        "host_gap": [52 + 10 + 102],
        "idle": [48 + 70 + 8],
        "queued": [48 + 8],
        "synchronizing": [70],
    }
    assert lane.hidden.tolist() == [30]


# Ranges (name, start, end), kernels (launch, start, end), and the windows of the steps.
WINDOWS = {
    # The host is ahead: it needs 100 for a step, and the GPU 1000.
    "end with their work": (
        [("step", 100 * n, 100 * n + 100, {"payload": 40 + n}) for n in range(3)],
        [(100 * n + 10, 20 + 1000 * n, 1020 + 1000 * n) for n in range(3)],
        [[0, 1020], [1020, 2020], [2020, 3020]],
    ),
    "without work from before": (
        [("step", 100, 200)],
        [(0, 10, 150), (110, 150, 180)],
        [[150, 200]],
    ),
    "without validation and interruptions": (
        [
            *(("step", 0, 100), ("data", 130, 150), ("step", 150, 250), ("validation", 260, 900)),
            *(("step", 920, 1000), ("step", 5000, 5100)),
        ],
        [(launch, launch + 10, launch + 50) for launch in (10, 160, 930, 5010)],
        [[0, 100], [100, 250], [900, 1000], [5000, 5100]],
    ),
    "one for nested marks": (
        [(f"ProfilerStep#{n + 7}", 1000 * n, 1000 * n + 1000) for n in range(2)]
        + [("step", 1000 * n + 100, 1000 * n + 900) for n in range(2)],
        [(1000 * n + 110, 1000 * n + 120, 1000 * n + 130) for n in range(2)],
        [[100, 900], [900, 1900]],
    ),
}


@pytest.mark.parametrize(("ranges", "kernels", "windows"), WINDOWS.values(), ids=WINDOWS)
def test_windows_of_steps(ranges, kernels, windows, path: Path) -> None:
    table = nsys.read(export(ranges, kernels).write(path))
    (lane,) = budget(table)
    assert lane.steps.windows.tolist() == windows
    numbers = [options[0]["payload"] for _, _, _, *options in ranges if options]
    assert not numbers or lane.steps.numbers.tolist() == numbers
    assert not numbers or lane.parts["compute"].tolist() == [1000, 1000, 1000]
    interruptions = [note.text for note in table.notes if "1 interruptions between" in note.text]
    assert len(interruptions) == (windows[-1] == [5000, 5100])


def test_steps_may_be_named_and_skipped(path: Path) -> None:
    capture = Export()
    for number in range(3):
        capture.range("my loop", 100 * number, 100 * number + 100)
        capture.kernel(100 * number + 10, 100 * number + 20, 100 * number + 30)
    table = nsys.read(capture.write(path))
    assert not budget(table)[0].steps.is_found
    assert len(budget(table, name="my loop", skip=1)[0].wall) == 2
    with pytest.raises(ValueError, match="`skip` must leave a step, but is 3"):
        budget(table, name="my loop", skip=3)
    with pytest.raises(ValueError, match="`step_range` must be the name of a range"):
        summary.analyze(gather([path]), step_range="no such")


def test_two_devices_of_a_process_have_a_budget_each(path: Path) -> None:
    kernels = [(10, 20, 60, {"device": 0}), (12, 20, 90, {"device": 1})]
    path = export([("step", 0, 100)], kernels).write(path)
    report = summary.analyze(gather([path])).report
    assert [rank["name"] for rank in report["budget"]["per_rank"]] == [
        *("process 100 GPU 0", "process 100 GPU 1"),
    ]
    assert [rank["parts_ms"]["compute"] for rank in report["budget"]["per_rank"]] == [4e-5, 7e-5]


@st.composite
def captures(draw: st.DrawFn) -> Table:
    """Captures with anything in them: overlaps, lost launches, graphs, crossing ranges."""
    names = ["step", "data", "encoder", "backward", "aten::mm", NCCL, "gemm", "cudaLaunchKernel"]
    names += ["cudaStreamSynchronize", "validation", "MmBackward0"]
    time = st.integers(0, 400)
    length = st.integers(0, 120)
    table = Table(names, [Process("a", 1), Process("b", 2)])
    ranges = [
        (
            *(start, start + n, process, thread, names.index(name)),
            *(name.startswith(("aten", "Mm")), name.startswith("Mm"), sequence, -1, -1, 0),
        )
        for start, n, process, thread, name, sequence in draw(
            st.lists(
                st.tuples(
                    *(time, length, st.integers(0, 1), st.integers(1, 2)),
                    st.sampled_from(
                        ["data", "encoder", "backward", "aten::mm", "validation", "MmBackward0"]
                    ),
                    st.integers(-1, 2),
                ),
                max_size=8,
            )
        )
    ]
    for process in range(2):
        at = 0
        for n in draw(st.lists(st.integers(1, 120), max_size=4)):
            ranges.append((at, at + n, process, 1, 0, False, False, -1, -1, -1, 0))
            at += n + draw(st.integers(0, 40))
    table.ranges = np.array(ranges, RANGE)
    launches = draw(
        st.lists(
            st.tuples(time, st.integers(0, 20), st.integers(0, 1), st.integers(1, 2), st.booleans())
        )
    )
    table.launches = np.array(
        [
            (start, start + n, process, thread, 8 if blocks else 7, number // 2 + 1)
            for number, (start, n, process, thread, blocks) in enumerate(launches)
        ],
        LAUNCH,
    )
    work = draw(
        st.lists(
            st.tuples(time, length, st.integers(0, 1), st.integers(0, 1), st.sampled_from([5, 6]),
                      st.sampled_from([Kind.KERNEL, Kind.COPY, Kind.GRAPH]), st.integers(0, 6)),
            max_size=14,
        )
    )  # fmt: skip
    table.work = np.array(
        [
            (start, start + n, process, device, device, name, int(kind), correlation, -1, 0, -1, 0)
            for start, n, process, device, name, kind, correlation in work
        ],
        WORK,
    )
    return table


class _Given(Subject):
    def __init__(self, table: Table) -> None:
        super().__init__("given")
        self.given = table

    def table(self) -> Table:
        return copy.deepcopy(self.given)


def figures(table: Table) -> dict:
    report = summary.analyze(_Given(table)).report
    # The picture is at the resolution of a screen, and may round another way.
    report.pop("timeline", None)
    return report


many = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(captures())
def test_parts_are_the_step_exactly_and_unions_fit_in_it(table: Table) -> None:
    for lane in budget(table):
        assert sum(lane.parts.values()).tolist() == lane.wall.tolist()
        assert sum(lane.idle.values()).tolist() == lane.parts["idle"].tolist()
        assert all((result >= 0).all() for result in (*lane.parts.values(), *lane.idle.values()))
        assert (lane.hidden <= lane.parts["compute"]).all()
        assert (np.diff(lane.steps.windows.ravel()) >= 0).all()


@many
@given(captures())
def test_exclusive_sums_are_the_total(table: Table) -> None:
    launches = attribution.find_launches(table)
    result = {p: steps.find(table, p, launches.begin) for p in set(table.work["process"].tolist())}
    labels = attribution.attribute(table, launches, result)
    part = classes(table, [categorize(name) for name in table.names])
    for lane in lanes(table, launches, result, labels, part):
        pieces = cut(table, [lane], part)
        rows = by_range(pieces, labels, 1)
        total = sum(row["forward_ms"] + row["backward_ms"] for row in rows)
        assert total == pytest.approx(pieces.work.sum() / 1e6)
        busy = sum(int(lane.parts[name].sum()) for name in ("compute", "communication", "copies"))
        assert pieces.wall.sum() == busy
        assert (pieces.wall <= pieces.work).all()


@many
@given(captures(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(table: Table, random) -> None:
    mixed = copy.deepcopy(table)
    for column in ("work", "launches", "ranges"):
        rows = getattr(mixed, column)
        order = list(range(len(rows)))
        random.shuffle(order)
        setattr(mixed, column, rows[order])
    assert figures(mixed) == figures(table)


spans = st.lists(st.tuples(st.integers(-30, 60), st.integers(0, 15)), max_size=12)


def moments(found: list[tuple[int, int]]) -> set[int]:
    return {time for begin, length in found for time in range(begin, begin + length)}


def made(found: list[tuple[int, int]]) -> np.ndarray:
    begins = np.array([begin for begin, _ in found], np.int64)
    return intervals.union(begins, begins + np.array([n for _, n in found], np.int64))


@given(spans, spans)
def test_sets_are_those_of_their_moments(one: list, other: list) -> None:
    a, b = made(one), made(other)
    for result, expected in (
        (a, moments(one)),
        (intervals.subtract(a, b), moments(one) - moments(other)),
        (intervals.intersect(a, b), moments(one) & moments(other)),
        (intervals.join(a, b), moments(one) | moments(other)),
        (intervals.clip(a, -5, 20), moments(one) & set(range(-5, 20))),
    ):
        assert result.dtype == np.int64
        assert (np.diff(result.ravel()) > 0).all()
        assert {time for begin, end in result.tolist() for time in range(begin, end)} == expected
        assert intervals.measure(result) == len(expected)


@given(spans, spans)
def test_what_is_covered_is_counted_exactly(one: list, asked: list) -> None:
    a = made(one)
    begins = np.array([begin for begin, _ in asked], np.int64)
    ends = begins + np.array([n for _, n in asked], np.int64)
    expected = [len(moments(one) & set(range(b, e))) for b, e in zip(begins, ends, strict=True)]
    assert intervals.covered(a, begins, ends).tolist() == expected
    assert intervals.within(a, begins).tolist() == [b in moments(one) for b in begins.tolist()]


def test_two_that_begin_together_count_the_shorter_first() -> None:
    begins, ends = np.array([0, 0]), np.array([10, 4])
    added = intervals.increments(begins, ends, np.array([0, 1]), np.array([[0, 20]]))
    assert added.tolist() == [6, 4]
