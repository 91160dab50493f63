"""Pictures and tables of made-up rows."""

import csv
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import bench_inference
import bench_ops
import bench_training
import plot
import pytest
import transducer_memory

WHERE = {"device": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "git": "abc", "date": "2026-01"}
CPU = {"device": "cpu x86_64", "date": "2027-01"}


def write(folder: Path, name: str, columns: Sequence[str], *rows: dict) -> None:
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(dict.fromkeys(columns, "") | WHERE | row for row in rows)


def op(backend: str, p50: float, mode: str = "forward+backward", **fields: str) -> dict:
    row = {"op": "attention", "kind": "relative", "backend": backend, "mode": mode}
    return row | {"shape": "T=24 N=3/5 D=64", "p50_ms": str(p50), "error": "1e-3"} | fields


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write(
        tmp_path,
        "ops",
        bench_ops.COLUMNS,
        op("triton", 8.0, date="2025-01"),
        op("triton", 2.0),
        op("peer: slow", 9.0),
        op("peer: fast", 5.0),
        op("triton", 1.0, "forward"),
        op("peer: cheat", 0.1, error="approximate"),
        op("triton", 0.001, **CPU),
        op("triton", 1.0, op="ctc_loss", kind=""),
    )
    train = {"model": "canary_180m_flash", "frame_budget": "12000", "mode": "eager"}
    train["precision"] = "bfloat16"
    write(
        tmp_path,
        "training",
        bench_training.COLUMNS,
        train | {"system": "random", "audio_s_per_s": "100", "mfu": "0.1"},
        train | {"system": "packed_static", "audio_s_per_s": "400", "mfu": "0.5", "mode": "graph"},
    )
    loss = {"joint": "640", "classes": "1024", "dtype": "bfloat16"}
    write(
        tmp_path,
        "transducer_memory",
        transducer_memory.COLUMNS,
        loss | {"backend": "peer: torch dense", "batch": "16", "peak_bytes": str(2**33)},
        loss | {"backend": "triton", "batch": "8", "peak_bytes": str(2**29), "p50_ms": "3"},
    )
    write(
        tmp_path,
        "inference",
        bench_inference.COLUMNS,
        {"system": "effasr", "shape": "32/4", "size": "full", "batch": "16", "rtfx": "900"},
    )
    return tmp_path


def texts(path: Path) -> list[str]:
    assert "prefers-color-scheme: dark" in path.read_text()
    return [found.text or "" for found in ElementTree.parse(path).iter() if found.text]


def test_pictures(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main(["--results", str(results), "--output", str(tmp_path / "new")]) == 0
    made = {path.name: texts(path) for path in (tmp_path / "new").iterdir()}
    assert set(made) == {
        *("ops.svg", "training_canary_180m_flash.svg", "transducer_memory.svg", "inference.svg")
    }
    assert "NVIDIA H200, torch 2.11, triton 3.6, abc, 2026-01" in made["ops.svg"]
    # The newest of ours, the fastest of the peers that compute the same, and no row of a CPU.
    assert [text for text in made["ops.svg"] if "relative" in text] == [
        "attention relative, T=24 D=64; fast"
    ]
    assert "2.50x" in made["ops.svg"]
    training = made["training_canary_180m_flash.svg"]
    assert training.index("packed_static, CUDA graph") < training.index("random")
    assert {"400", "100", "50.0", "10.0"} <= set(training)
    assert not {"peak GB"} & set(training)
    memory = made["transducer_memory.svg"]
    assert memory.index("B 8, V 1024: triton") < memory.index("B 16, V 1024: torch dense")
    assert {"8,192", "512", "3.0", "-"} <= set(memory)
    assert "900" in made["inference.svg"]


def test_tables_say_where_and_how(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(results.iterdir())
    assert plot.main(["--results", str(results), "--table"]) == 0
    assert set(results.iterdir()) == before
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("| attention relative")]
    assert line == (
        "| attention relative, T=24 D=64; fast | 2.50x | NVIDIA H200, torch 2.11, triton 3.6, abc, "
        '2026-01 | `python profiling/bench_ops.py --op attention --kind "relative"` |'
    )
    (line,) = [line for line in lines if line.startswith("| packed_static")]
    assert line.endswith(
        "--systems packed_static --frame-budget 12000 --precision bfloat16 --modes graph` |"
    )


def test_rows_that_differ_in_threads_budget_or_precision_are_lines_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"model": "small", "system": "packed", "mode": "eager", "precision": "float32"}
    train |= {"frame_budget": "4000", "threads": "1", "audio_s_per_s": "9"} | CPU
    others = ({"threads": "2"}, {"frame_budget": "400"}, {"precision": "bfloat16"})
    write(tmp_path, "training", bench_training.COLUMNS, train, *(train | one for one in others))
    assert plot.main(["--results", str(tmp_path), "--device", "cpu", "--table"]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "9" in line]
    assert [line[0] for line in lines] == [
        "| packed, 4,000 frames, float32, 1 thread",
        "| packed, 4,000 frames, float32, 2 threads",
        "| packed, 400 frames, float32, 1 thread",
        "| packed, 4,000 frames, bfloat16, 1 thread",
    ]
    assert lines[3][-1] == (
        "`OMP_NUM_THREADS=1 python profiling/bench_training.py --model small --systems packed "
        "--frame-budget 4000 --precision bfloat16` |"
    )


def test_an_operation_with_a_forward_alone_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoding = {"op": "decode_attention", "kind": "", "mode": "forward"}
    rows = (op("triton", 1.0, **decoding), op("peer: a", 3.0, **decoding))
    write(tmp_path, "ops", bench_ops.COLUMNS, *rows)
    assert plot.main(["--results", str(tmp_path), "--table"]) == 0
    assert "| decode_attention, T=24 D=64; a | 3.00x |" in capsys.readouterr().out


@pytest.mark.parametrize("option", [[], ["--table"], ["--device", "A100"]])
def test_without_rows_nothing_is_written(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "ops", bench_ops.COLUMNS, op("triton", 1.0, **CPU), op("peer: a", 2.0, **CPU))
    assert plot.main(["--results", str(tmp_path), *option]) == 0
    assert "nothing to draw" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["ops.csv"]


def test_a_device_by_name(results: Path, tmp_path: Path) -> None:
    write(tmp_path, "ops", bench_ops.COLUMNS, op("triton", 1.0, **CPU), op("peer: a", 2.0, **CPU))
    options = ["--results", str(results), "--device", "cpu", "--output", str(tmp_path / "new")]
    assert plot.main(options) == 0
    assert "2.00x" in texts(tmp_path / "new" / "ops.svg")


def test_rows_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ops.csv").write_text("device,date\nNVIDIA H200,2026-01\n")
    assert plot.main(["--results", str(tmp_path)]) == 2
    assert "not of this version: 'op'" in capsys.readouterr().err
