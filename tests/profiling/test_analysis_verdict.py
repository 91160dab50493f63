"""From figures to a sentence: what limits a run, what to do, padding, ranks, comparison."""

import json
from pathlib import Path
from typing import Any

import pytest
from analysis import sources, summary
from analysis.sources import Subject, gather, read_metrics
from analysis.verdict import compare

from tests.profiling.nsys_export import Export

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def line(**values: Any) -> dict[str, Any]:
    return {"step": 10, "step_s": 0.5, "data_wait_s": 0.1} | values


def report(
    export: Export, path: Path, metrics: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    subject = gather([export.write(path)])
    subject.metrics = metrics or []
    return summary.analyze(subject).report


def limited_by(part: str, path: Path) -> dict[str, Any]:
    """A step of 1 ms, 600 µs of which go into one part and the rest into compute."""
    export = Export()
    ms = 1_000_000
    export.range("step", 0, ms)
    export.kernel(0, 2, 400_000)
    if part == "data_wait":
        export.range("data", 400_000, ms)
    elif part == "communication":
        export.kernel(3, 400_000, ms, NCCL, stream=9)
    elif part == "copies":
        export.work(
            "CUPTI_ACTIVITY_KIND_MEMCPY", 400_000, ms, export.call(3, 4), copyKind=1, bytes=1
        )
    elif part == "compute":
        export.kernel(3, 400_000, ms)
    elif part == "synchronizing":
        export.call(400_000, ms, name="cudaDeviceSynchronize_v3020")
    return report(export, path)


@pytest.mark.parametrize(
    ("part", "limit", "words"),
    [
        ("data_wait", "data_wait", "Waiting for data takes 0.6 ms of a step of 1 ms (60.0 %)"),
        ("communication", "communication", "Communication that nothing hides takes 0.6 ms"),
        ("copies", "copies", "Memory copies that nothing hides take 0.6 ms"),
        ("host_gap", "host_gap", "The host does not launch work fast enough"),
        ("synchronizing", "idle", "while the host waits in a synchronizing call"),
        ("compute", "compute", "Compute limits the run: 100.0 % of a step of 1 ms"),
    ],
)
def test_the_verdict_names_what_limits_the_run(
    part: str, limit: str, words: str, tmp_path: Path
) -> None:
    verdict = limited_by(part, tmp_path / "export.sqlite")["verdict"]
    assert verdict["limit"] == limit
    assert words in verdict["text"]
    bound = "at most 1.00 times as fast" if part == "compute" else "at most 2.50 times as fast"
    assert bound in verdict["text"]


def test_what_compute_hides_is_not_what_limits_the_run(tmp_path: Path) -> None:
    export = Export()
    export.range("step", 0, 1000)
    export.kernel(0, 2, 700)
    export.kernel(3, 700, 1000, "void layer_norm<float>(float*)")
    export.kernel(5, 10, 990, NCCL, stream=9)
    result = report(export, tmp_path / "e.sqlite")
    assert result["categories"][0]["name"] == "communication"
    assert "most of all matmul (69.9 % of it)" in result["verdict"]["text"]


def test_padding_is_worth_the_compute_that_it_takes(tmp_path: Path) -> None:
    export = Export()
    export.range("step", 0, 1000)
    export.kernel(0, 2, 1000)
    result = report(
        export, tmp_path / "e.sqlite", [line(padding_frames=0.25), line(padding_frames=0.35)]
    )
    (action,) = [a for a in result["actions"] if a["basis"] == "compute on padded frames"]
    assert action["share"] == pytest.approx(0.998 * 0.3)


def test_without_a_capture_the_log_still_says_something() -> None:
    result = summary.analyze(Subject("run", metrics=[line(), line(data_wait_s=0.3)])).report
    assert result["verdict"]["text"].startswith("A step takes 500 ms, and 40.0 % of it is waiting")
    assert result["actions"][0]["speedup_at_most"] == pytest.approx(1 / 0.6)
    assert any("no capture was given" in note["text"] for note in result["quality"])


def ranks(tmp_path: Path) -> dict[str, Any]:
    """Two ranks, of which one computes for 800 and the other for 500 of every 1000."""
    paths = []
    for rank, work in enumerate((500, 800)):
        export = Export(pid=20 + rank)
        for begin in range(0, 4000, 1000):
            export.range("step", begin, begin + 1000, payload=begin // 1000)
            export.kernel(begin, begin + 2, begin + work)
            export.kernel(begin + 3, begin + work, begin + 1000, NCCL)
        paths.append(export.write(tmp_path / f"rank{rank}.sqlite"))
    return summary.analyze(gather(paths)).report


def test_the_slowest_rank_is_the_one_that_does_not_wait(tmp_path: Path) -> None:
    result = ranks(tmp_path)
    assert result["ranks"]["slowest"] == "rank 1"
    assert result["ranks"]["steps"] == [0, 1, 2, 3]
    assert result["ranks"]["ranks"][0]["own_ms"] == pytest.approx([500e-6] * 4)
    assert result["ranks"]["waiting_ms"] == pytest.approx(150e-6)
    (action,) = [a for a in result["actions"] if "slowest rank" in a["basis"]]
    assert action["how"].startswith("rank 1 is slowest")
    assert action["share"] == pytest.approx(0.15)


def test_the_waterfall_falls() -> None:
    bars = sources.waterfall([line(mfu=0.4, mfu_with_padding=0.5, hfu=0.6)], {})["bars"]
    assert [bar["share"] for bar in bars] == [1.0, 0.6, 0.5, 0.4]
    estimate = sources.waterfall([line(mfu=0.4)], {"padding_frames": {"mean": 0.2}})
    assert estimate["is_estimate"]
    assert [bar["share"] for bar in estimate["bars"]] == [1.0, pytest.approx(0.5), 0.4]


def test_a_log_that_was_cut_short_loses_its_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line()) + "\n" + '{"step": 2')
    assert read_metrics(path) == [line()]
    path.write_text('{"step"\n' + json.dumps(line()) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .* must be JSON"):
        read_metrics(path)


def test_a_comparison_says_where_the_difference_comes_from(tmp_path: Path) -> None:
    before = limited_by("host_gap", tmp_path / "before.sqlite")
    export = Export()
    export.range("step", 0, 500_000)
    export.kernel(0, 2, 400_000)
    result = compare(before, report(export, tmp_path / "after.sqlite"))
    assert result["step_ms"]["ratio"] == pytest.approx(0.5)
    assert {row["name"]: row["delta"] for row in result["parts"]}["host_gap"] == pytest.approx(-0.5)
    assert result["text"].endswith(
        "0.50 times as long. Most of the change is in host gaps (-0.5 ms)."
    )


def test_a_kernel_with_little_work_is_compared_too(tmp_path: Path) -> None:
    """Of 45 kernels the report lists 40; which ones are not listed differs from run to run."""
    reports = []
    for name, slower in (("before", 0), ("after", 1_000)):
        export = Export()
        export.range("step", 0, 45 * 100_000)
        for number in range(45):
            work = 50_000 - 10 * number + (slower if number == 42 else 0)
            start = number * 100_000
            export.kernel(start, start + 10, start + 10 + work, f"kernel_{number}(float*)")
        reports.append(report(export, tmp_path / f"{name}.sqlite"))
    listed = [{entry["name"] for entry in made["kernels"]["top"]} for made in reports]
    assert len(listed[0]) == len(listed[1]) == 40
    assert listed[0] != listed[1]
    changed = {row["name"]: row["delta"] for row in compare(*reports)["kernels"] if row["delta"]}
    assert changed == {"kernel_42": pytest.approx(1e-3)}
