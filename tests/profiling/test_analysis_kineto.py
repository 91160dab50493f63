"""Reading traces of torch.profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from analysis import kineto, sources, summary
from analysis.kineto import nanoseconds
from analysis.table import Kind

from tests.profiling.kineto_trace import AUTOGRAD, MAIN, Trace
from tests.profiling.test_analysis_nsys import labelled


@pytest.fixture
def path(tmp_path: Path) -> Path:
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


def test_backward_goes_to_its_forward_by_sequence_number(path: Path) -> None:
    trace = Trace()
    a_step(trace)
    assert labelled(kineto.read(trace.write(path))) == [
        ("forward / encoder", "forward", "launch", False),
        ("forward / encoder", "backward", "forward", True),
    ]


def test_arrows_come_before_sequence_numbers(path: Path) -> None:
    trace = Trace()
    a_step(trace)
    trace.note("decoder", 250, 350)
    # Sequence numbers are counted by thread, and so may name the operator of another.
    trace.flow(1, (MAIN, 300), (AUTOGRAD, 600))
    assert labelled(kineto.read(trace.write(path)))[1][:3] == (
        *("forward / decoder", "backward", "forward"),
    )


def test_a_kernel_without_launch_is_placed_by_its_external_id(path: Path) -> None:
    trace = Trace()
    trace.note("step", 0, 1000)
    trace.note("encoder", 20, 200)
    external = trace.operator("aten::mm", 30, 60)
    trace.kernel(None, 300, 400, external=external)
    trace.kernel(None, 500, 600)
    assert labelled(kineto.read(trace.write(path))) == [
        ("encoder", "encoder", "external id", False),
        ("(unattributed)", "(unattributed)", "none", False),
    ]


def test_device_events_have_kind_device_and_stream(path: Path) -> None:
    trace = Trace(
        {"deviceProperties": [{"id": 0, "name": "A GPU"}], "distributedInfo": {"rank": 5}}
    )
    trace.kernel(0, 10, 20, stream=20)
    trace.kernel(1, 20, 30, "Memcpy HtoD (Pageable -> Device)", category="gpu_memcpy")
    trace.kernel(2, 30, 40, "Memset (Device)", category="gpu_memset")
    table = kineto.read(trace.write(path))
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
def test_budgets_without_a_gpu(ranges, operators, parts, hidden: int, path: Path) -> None:
    trace = Trace()
    for item in ranges:
        trace.note(*item)
    for item in operators:
        trace.operator(*item)
    budget = summary.analyze(sources.gather([trace.write(path)])).report["budget"]
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
    for path, message in (
        (cut, "must be a whole trace"),
        (squeezed, "must be a whole .gz file"),
        (settings, "has no list traceEvents"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            sources.read(path)
        assert "\n" not in str(error.value)
