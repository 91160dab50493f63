"""Reading exports of nsys and traces of torch.profiler, and naming the range of every kernel."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from analysis import kineto, nsys, sources, summary
from analysis.attribution import RULES, UNATTRIBUTED, attribute, find_launches
from analysis.kineto import nanoseconds
from analysis.steps import find
from analysis.table import Kind, Table, merge

from tests.profiling.kineto_trace import MAIN, Trace
from tests.profiling.nsys_export import COPY, FILL, GRAPH, KERNEL, Export

AUTOGRAD = 177


def labelled(table: Table) -> list[tuple[str, str, str, bool]]:
    """Range, phase, rule and direction of every row of work, in order of begin."""
    launches = find_launches(table)
    matches = {
        process: find(table, process, launches.begin)
        for process in sorted(set(table.work["process"].tolist()))
    }
    result = attribute(table, launches, matches)
    return [
        (
            result.paths[result.path[row]],
            result.paths[result.phase[row]],
            RULES[result.rule[row]],
            bool(result.is_backward[row]),
        )
        for row in table.work["start"].argsort(kind="stable")
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "export.sqlite"


def export(ranges: list[tuple], kernels: list[tuple]) -> Export:
    """Ranges (name, start, end) and kernels (launch, start, end), with options at the end."""
    made = Export()
    for name, start, end, *options in ranges:
        made.range(name, start, end, **dict(*options))
    for launch, start, end, *options in kernels:
        made.kernel(launch, start, end, **dict(*options))
    return made


ENGINE = "autograd::engine::evaluate_function: MmBackward0, seq = 7, op_id = 9"
OTHER_THREAD = {"tid": AUTOGRAD}
LABELS = {
    # Long after the range has ended on the host.
    "innermost": (
        [
            *(("step", 0, 1000), ("forward", 10, 500, {"registered": True})),
            *(("encoder", 20, 300), ("encoder", 30, 200)),
        ],
        [(40, 700, 800), (250, 800, 850), (400, 850, 900), (600, 900, 950)],
        [
            ("forward / encoder / encoder", "forward", "launch", False),
            ("forward / encoder", "forward", "launch", False),
            ("forward", "forward", "launch", False),
            ("(step)", "(step)", "launch", False),
        ],
    ),
    "a launch that outlives a range": (
        [("outer", 0, 100), ("inner", 10, 41)],
        [(40, 60, 70)],
        [("outer", "outer", "launch", False)],
    ),
    "backward without ranges of its thread": (
        [("step", 0, 1000), ("backward", 500, 900)],
        [(600, 650, 700, OTHER_THREAD), (950, 960, 970, OTHER_THREAD)],
        [("backward", "backward", "time", True), ("(step)", "(step)", "time", False)],
    ),
    # A view has no node of its own, and bears the number of the next operator that makes one. The
    # engine's range ends later than that of the node; between them, the node is backward too.
    "backward by sequence number": (
        [
            *(("step", 0, 1000), ("forward", 10, 400), ("encoder", 20, 200)),
            *(("aten::t, seq = 7, op_id = 1", 15, 18), ("aten::mm, seq = 7, op_id = 2", 30, 60)),
            *(("backward", 500, 900), (ENGINE, 600, 700, OTHER_THREAD)),
            ("MmBackward0, seq = 7, op_id = 10", 610, 690, OTHER_THREAD),
            ("aten::mm, op_id = 11", 620, 680, OTHER_THREAD),
        ],
        [(40, 50, 60), (630, 640, 690, OTHER_THREAD)],
        [
            ("forward / encoder", "forward", "launch", False),
            ("forward / encoder", "backward", "forward", True),
        ],
    ),
    "operators alone": (
        [("aten::mm, op_id = 3", 0, 100)],
        [(10, 20, 30)],
        [("(operator) aten::mm", UNATTRIBUTED, "operator", False)],
    ),
}


@pytest.mark.parametrize(("ranges", "kernels", "expected"), LABELS.values(), ids=LABELS)
def test_a_kernel_belongs_to_a_range(ranges, kernels, expected, path: Path) -> None:
    table = nsys.read(export(ranges, kernels).write(path))
    assert labelled(table) == expected
    assert not any(", seq = " in name for name in table.names)


def test_ranges_that_cross_are_searched_outwards(path: Path) -> None:
    crossing = [
        ("a", 0, 100, {"kind": 60}),
        ("b", 20, 50, {"kind": 60}),
        ("c", 40, 80, {"kind": 60}),
    ]
    made = export(crossing, [(launch, launch + 100, launch + 110) for launch in (45, 60, 90)])
    innermost = [row[0].split(" / ")[-1] for row in labelled(nsys.read(made.write(path)))]
    assert innermost == ["c", "c", "a"]


def test_missing_launches_are_reported_and_kept(path: Path) -> None:
    export = Export()
    export.range("step", 0, 1000)
    export.kernel(100, 110, 200)
    export.work(KERNEL, 300, 500, 99)
    path = export.write(path)
    assert [row[2] for row in labelled(nsys.read(path))] == ["launch", "none"]
    report = summary.analyze(sources.gather([path])).report
    assert report["attribution"]["none"] == pytest.approx(200 / 290)
    assert {entry["name"] for entry in report["ranges"]} == {"(step)", UNATTRIBUTED}
    assert any("1 of 2 kernels and copies, 69.0 %" in note["text"] for note in report["quality"])


def test_correlation_ids_of_two_processes_are_not_confused(path: Path) -> None:
    export = Export(pid=1)
    for pid, name in ((1, "first"), (2, "second")):
        export.pid, export.correlation = pid, 0
        export.range(name, 0, 100)
        export.kernel(10 + pid, 20 + pid, 30 + pid)
    table = nsys.read(export.write(path))
    assert [row[0] for row in labelled(table)] == ["first", "second"]
    launches = find_launches(table)
    assert (table.launches["process"][launches.row] == table.work["process"]).all()
    assert launches.is_known.all()
    assert sorted(process.pid for process in table.processes) == [1, 2]


def test_nodes_of_a_graph_share_a_launch(path: Path) -> None:
    export = Export()
    export.range("step", 0, 1000)
    export.range("replay", 10, 100)
    launch = export.call(20, 30, name="cudaGraphLaunch_v10000")
    for node in range(1, 4):
        export.work(KERNEL, 100 * node, 100 * node + 50, launch, graphNodeId=node)
    path = export.write(path)
    assert [row[:3] for row in labelled(nsys.read(path))] == [("replay", "replay", "launch")] * 3
    notes = [note["text"] for note in summary.analyze(sources.gather([path])).report["quality"]]
    assert any(text.startswith("100.0 % of the kernels' time is in CUDA graphs") for text in notes)


def test_a_graph_recorded_whole_is_work_of_its_own(path: Path) -> None:
    export = Export()
    export.range("step", 0, 1000)
    launch = export.call(20, 30, name="cudaGraphLaunch_v10000")
    export.work(GRAPH, 100, 600, launch, graphId=5)
    path = export.write(path)
    report = summary.analyze(sources.gather([path])).report
    assert [entry["name"] for entry in report["kernels"]["top"]] == ["CUDA graph 5 (whole)"]
    assert report["budget"]["parts"][0]["ns"] == 500
    assert any("--cuda-graph-trace=node" in note["text"] for note in report["quality"])


def test_open_ranges_last_to_the_end_of_the_capture(path: Path) -> None:
    table = nsys.read(export([("open", 0, None)], [(50, 60, 900)]).write(path))
    assert labelled(table)[0][0] == "open"
    assert table.ranges["end"].tolist() == [900]
    assert any("still open" in note.text for note in table.notes)


def test_copies_and_fills_have_names_that_say_what_memory(path: Path) -> None:
    export = Export()
    for kind, source, target in ((1, 0, 2), (1, 1, 2), (8, 2, 2)):
        launch = export.call(0, 1)
        export.work(COPY, 10, 20, launch, bytes=64, copyKind=kind, srcKind=source, dstKind=target)
    export.work(FILL, 30, 40, export.call(2, 3), bytes=16)
    table = nsys.read(export.write(path))
    assert [table.names[name] for name in table.work["name"]] == [
        *("Memcpy HtoD (pageable -> device)", "Memcpy HtoD (pinned -> device)"),
        *("Memcpy DtoD (device -> device)", "Memset"),
    ]
    assert table.work["bytes"].tolist() == [64, 64, 64, 16]


def test_a_mark_that_numbers_each_iteration_is_one_label(path: Path) -> None:
    export = Export()
    for number in range(6):
        begin = 100 * number
        export.range("step", begin, begin + 90)
        export.range(f"compute {number}", begin + 1, begin + 50)
        export.range(f"layer.{number % 2}", begin + 2, begin + 40)
        export.kernel(begin + 10, begin + 20, begin + 30)
    labels = {row[0] for row in labelled(nsys.read(export.write(path)))}
    assert labels == {"compute # / layer.0", "compute # / layer.1"}


@pytest.mark.parametrize(
    "options",
    [
        {"more_columns": ["addedFirst", "addedSecond"]},
        {"without": ["graphNodeId", "greenContextId", "int64Value", "uint64Value"]},
    ],
    ids=["newer", "older"],
)
def test_columns_come_and_go_with_versions(path: Path, options: dict) -> None:
    made = export([("step", 0, 1000, {"payload": 3})], [(10, 20, 30)])
    assert labelled(nsys.read(made.write(path, **options)))[0][0] == "(step)"


def test_absent_tables_are_said_and_no_reason_to_fail(path: Path) -> None:
    export = Export()
    export.work(KERNEL, 100, 200, 1)
    report = summary.analyze(sources.gather([export.write(path)])).report
    warnings = [note["text"] for note in report["quality"] if note["level"] == "warning"]
    assert any("no table CUPTI_ACTIVITY_KIND_RUNTIME" in text for text in warnings)
    assert any("no table NVTX_EVENTS" in text for text in warnings)
    assert any("no ranges that mark steps" in text for text in warnings)
    assert report["budget"]["wall_ns"] == 100
    export.range("of another program", 0, 300)
    report = summary.analyze(sources.gather([export.write(path)])).report
    assert any("no ranges of effasr in" in note["text"] for note in report["quality"])


def test_lost_events_and_secrets_are_pointed_out(path: Path) -> None:
    export = Export()
    export.kernel(10, 20, 30)
    export.add(
        "DIAGNOSTIC_EVENT", severity=2, text="Not all CUDA events\nmight have been collected."
    )
    export.add("DIAGNOSTIC_EVENT", severity=1, text="Profiling has started.")
    export.add("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value="TOKEN=1")
    texts = [note.text for note in nsys.read(export.write(path)).notes]
    assert "export.sqlite: Not all CUDA events might have been collected." in texts
    assert any("TARGET_INFO_SYSTEM_ENV" in text for text in texts)
    assert not any("started" in text for text in texts)


def test_the_rank_is_in_the_file_name_and_means_who_works(tmp_path: Path) -> None:
    export = Export(pid=5)
    export.range("launcher", 0, 10)
    export.pid = 6
    export.kernel(10, 20, 30)
    table = nsys.read(export.write(tmp_path / "host_rank3.sqlite"))
    assert {process.pid: process.rank for process in table.processes} == {5: None, 6: 3}


def test_tables_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    tables = []
    for rank in range(3):
        export = Export(pid=7)
        export.range("step", 0, 100)
        export.range(f"only on {rank}", 0, 90)
        export.kernel(10, 20, 30 + rank)
        tables.append(nsys.read(export.write(tmp_path / f"rank{rank}.sqlite")))
    merged = merge(tables)
    assert [process.rank for process in merged.processes] == [0, 1, 2]
    assert [row[0] for row in labelled(merged)] == [f"only on {rank}" for rank in range(3)]


def test_what_is_no_export_is_refused_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE mine (a)")
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(other.read_bytes()[:3000] + b"x" * 2000)
    report = tmp_path / "a.nsys-rep"
    report.write_bytes(b"")
    text = tmp_path / "a.txt"
    text.write_text("hello")
    for path, message in (
        (other, "has none of its tables"),
        (cut, "must be a whole SQLite file"),
        (report, "nsys export"),
        (text, "but is neither"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            sources.read(path)
        assert "\n" not in str(error.value)


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def a_step(trace: Trace) -> None:
    trace.note("step", 0, 1000)
    trace.note("forward", 10, 400)
    trace.note("encoder", 20, 200)
    trace.operator("aten::t", 15, 18, sequence=7)
    trace.operator("aten::mm", 30, 60, sequence=7)
    trace.kernel(40, 50, 60)
    trace.note("backward", 500, 900)
    engine = "autograd::engine::evaluate_function: MmBackward0"
    trace.operator(engine, 600, 700, AUTOGRAD, sequence=7, forward_thread=1)
    trace.operator("aten::mm", 620, 680, AUTOGRAD)
    trace.kernel(630, 640, 690, tid=AUTOGRAD)


def test_arrows_come_before_sequence_numbers(trace_path: Path) -> None:
    trace = Trace()
    a_step(trace)
    trace.note("decoder", 250, 350)
    # Sequence numbers are counted by thread, and so may name the operator of another.
    trace.flow(1, (MAIN, 300), (AUTOGRAD, 600))
    assert labelled(kineto.read(trace.write(trace_path)))[1][:3] == (
        *("forward / decoder", "backward", "forward"),
    )


def test_a_kernel_without_launch_is_placed_by_its_external_id(trace_path: Path) -> None:
    trace = Trace()
    trace.note("step", 0, 1000)
    trace.note("encoder", 20, 200)
    trace.kernel(None, 300, 400, external=trace.operator("aten::mm", 30, 60))
    trace.kernel(None, 500, 600)
    assert labelled(kineto.read(trace.write(trace_path))) == [
        ("encoder", "encoder", "external id", False),
        ("(unattributed)", "(unattributed)", "none", False),
    ]


def test_device_events_have_kind_device_and_stream(trace_path: Path) -> None:
    trace = Trace(
        {"deviceProperties": [{"id": 0, "name": "A GPU"}], "distributedInfo": {"rank": 5}}
    )
    trace.kernel(0, 10, 20, stream=20)
    trace.kernel(1, 20, 30, "Memcpy HtoD (Pageable -> Device)", category="gpu_memcpy")
    trace.kernel(2, 30, 40, "Memset (Device)", category="gpu_memset")
    table = kineto.read(trace.write(trace_path))
    assert table.work["kind"].tolist() == [Kind.KERNEL, Kind.COPY, Kind.FILL]
    assert table.work["stream"].tolist() == [20, 7, 7]
    assert table.facts["GPU"] == "A GPU"
    assert table.processes[0].rank == 5
    assert table.has_gpu


# Ranges (name, start, end) and operators; the parts of the step, ns, and the hidden communication.
CPU_BUDGETS = {
    "operators are the work": (
        [("step", 0, 100)],
        [("aten::linear", 10, 60), ("aten::addmm", 20, 40), ("aten::empty", 40, 45)],
        {"compute": 50, "host_gap": 50},
        0,
    ),
    "making a batch is waiting for it": (
        [("step", 0, 100), ("data", 100, 150), ("step", 150, 250)],
        [("aten::stack", 110, 140), ("aten::mm", 160, 240)],
        {"compute": 80, "data_wait": 50, "host_gap": 120},
        0,
    ),
    # Marked as by a user, on a thread of its own.
    "exchanges are communication": (
        [("step", 0, 100), ("gloo:all_reduce", 30, 90, 555)],
        [("aten::mm", 10, 40)],
        {"compute": 30, "communication": 50, "host_gap": 20},
        10,
    ),
}


@pytest.mark.parametrize(
    ("ranges", "operators", "parts", "hidden"), CPU_BUDGETS.values(), ids=CPU_BUDGETS
)
def test_budgets_without_a_gpu(ranges, operators, parts, hidden: int, trace_path: Path) -> None:
    trace = Trace()
    for item in ranges:
        trace.note(*item)
    for item in operators:
        trace.operator(*item)
    budget = summary.analyze(sources.gather([trace.write(trace_path)])).report["budget"]
    assert {part["name"]: part["ns"] for part in budget["parts"] if part["ns"]} == parts
    assert budget["hidden_communication"]["ns"] == hidden


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("4401286070104.696", 4401286070104696),
        # As a float of µs since 1970 it would be wrong by up to 125 ns.
        ("1740461679471440.123", 1740461679471440123),
        ("12.5", 12500),
        ("-3.250", -3250),
        ("-0.5", -500),
        ("0.0005", 0),
        ("1e3", 1000000),
        (7, 7000),
    ],
)
def test_times_are_read_to_the_nanosecond(written: str | int, expected: int) -> None:
    assert nanoseconds(written) == expected


def test_gz_and_a_bare_list_are_traces_too(tmp_path: Path) -> None:
    trace = Trace()
    a_step(trace)
    packed = sources.read(trace.write(tmp_path / "rank2.json.gz"))
    assert packed.processes[0].rank == 2
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(trace.events))
    assert len(sources.read(bare).work) == len(packed.work) == 2


def test_damaged_traces_are_refused_in_one_line(tmp_path: Path) -> None:
    trace = Trace()
    a_step(trace)
    whole = trace.write(tmp_path / "whole.json").read_bytes()
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole[: len(whole) // 2])
    squeezed = tmp_path / "cut.json.gz"
    squeezed.write_bytes(gzip.compress(whole)[:-40])
    settings = tmp_path / "settings.json"
    settings.write_text('{"learning_rate": 1}')
    for trace_path, message in (
        (cut, "must be a whole trace"),
        (squeezed, "must be a whole .gz file"),
        (settings, "has no list traceEvents"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            sources.read(trace_path)
        assert "\n" not in str(error.value)
