"""The table at the end of the GPU suite: targets against made-up rows."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import bench_inference
import bench_ops
import bench_training
import memory_trace
import pytest
import transducer_memory
from suite import summary
from suite.steps import Result

COLUMNS = {
    "ops": bench_ops.COLUMNS,
    "training": bench_training.COLUMNS,
    "inference": bench_inference.COLUMNS,
    "memory": memory_trace.COLUMNS,
    "transducer_memory": transducer_memory.COLUMNS,
}
NOTHING: dict[str, list[summary.Row]] = {name: [] for name in COLUMNS}


def op(name: str, kind: str, backend: str, p50: float, **fields: str) -> dict[str, str]:
    row = {"op": name, "kind": kind, "backend": backend, "p50_ms": str(p50), "shape": "D=64"}
    return row | {"mode": "forward+backward", "peak_bytes": "100"} | fields


def training(system: str, speed: float, **fields: str) -> dict[str, str]:
    row = {
        "system": system,
        "audio_s_per_s": str(speed),
        "mfu": "0.2",
        "tflops_useful": "200",
        "device": "NVIDIA H200",
        "model": "canary_180m_flash",
    }
    row |= {"frame_budget": "8448"}
    return row | {"padding_frames": "0.001", "padding_tokens": "0.01"} | fields


def memory(step: int, peak: int) -> dict[str, str]:
    return {"step": str(step), "peak_bytes": str(peak), "reserved_bytes": "9"}


LARGE = {"shape": "B=1024 T=1000 U=200 J=640 V=1024", "peak_bytes": "1900000000"}
WIDER = LARGE | {"shape": "B=1024 T=1000 U=200 J=640 V=4096", "peak_bytes": "5000000000"}
ROWS = {
    "ops": [
        op("attention", "", "triton", 2.0),
        op("attention", "", "peer: torch varlen_attn", 1.9),
        op("attention", "", "peer: torch sdpa padded", 0.1),
        op("attention", "relative", "triton", 2.8),
        op("attention", "relative", "triton", 1.0, shape="D=128"),
        op("attention", "relative", "peer: NeMo (sdpa with bias)", 28.0),
        # Wider heads are measured too, but have no target.
        op("attention", "", "triton", 2.0, shape="T=9 D=256"),
        op("attention", "", "peer: torch varlen_attn", 1.0, shape="T=9 D=256"),
        op("attention", "relative", "triton", 20.0, shape="T=9 D=256"),
        op("attention", "relative", "peer: NeMo (sdpa with bias)", 1.0, shape="T=9 D=256"),
        op("linear_cross_entropy", "smoothing 0.1", "triton", 2.0, peak_bytes="30"),
        op("linear_cross_entropy", "smoothing 0.1", "peer: torch eager", 8.0),
        op("linear_cross_entropy", "smoothing 0.1", "peer: Liger", 3.0),
        op("linear_cross_entropy", "", "peer: Liger", 1.0),
        op("depthwise_conv", "", "triton", 1.0),
        op("depthwise_conv", "", "triton", 9.0, mode="forward"),
        op("depthwise_conv", "", "peer: torch conv1d padded", 1.6),
        op("transducer_loss", "large 4x", "triton", 50.0, **LARGE),
        op("transducer_loss", "large 4x", "triton", 90.0, **WIDER),
        op("transducer_loss", "large 4x", "peer: torchaudio float16", 60.0, **LARGE),
    ],
    "training": [
        training("packed_static", 300.0),
        training("packed_static", 400.0, tflops_useful="395", graph="True"),
        training("packed_static", 90.0, tflops_useful="316", model="canary_1b_flash"),
        training("random", 100.0),
        training("transformers", 160.0),
    ],
    "inference": [
        {"system": "effasr", "shape": "24/24", "rtfx": "100"},
        {"system": "effasr", "shape": "32/4", "rtfx": "310"},
        {"system": "transformers", "shape": "32/4", "rtfx": "1"},
    ],
    "memory": [memory(n, min(n, 4)) for n in range(1, 9)],
    "transducer_memory": [],
}
EXPECTED = {
    "padding of frames, packed, static": ("0.1 %", "met"),
    "padding of tokens, packed, static": ("1 %", "missed"),
    "attention against torch varlen_attn": ("0.95 x", "missed"),
    "relative attention against NeMo's way": ("10 x", "met"),
    "relative attention, times plain attention": ("1.4 x", "met"),
    "linear cross-entropy against the fastest peer": ("1.5 x", "met"),
    "linear cross-entropy, share of eager's memory": ("0.3", "missed"),
    "transducer, B 1024, 40 s, V 1024: memory": ("1.9 GB", "met"),
    "transducer, same, against the fastest peer": ("1.2 x", "met"),
    "depthwise convolution against cuDNN, padded": ("1.6 x", "missed"),
    "training, packed against random batches": ("4 x", "met"),
    "canary_1b_flash, useful share of 790 TFLOP/s": ("40 %", "missed"),
    "canary_180m_flash, useful share of 790 TFLOP/s": ("50 %", "met"),
    "training against Hugging Face Canary": ("2.5 x", "missed"),
    "growth of the peak after step 5": ("0 bytes", "met"),
    "inference RTFx, 32/4 against 24/24": ("3.1 x", "met"),
}


def test_each_target_against_rows() -> None:
    found = {what: (measured, verdict) for what, _, measured, verdict in summary.figures(ROWS)}
    assert found == EXPECTED


def test_what_has_no_rows_is_not_measured() -> None:
    assert {verdict for *_, verdict in summary.figures(NOTHING)} == {"not measured"}
    alone = NOTHING | {"ops": [op("attention", "", "triton", 1.0)]}
    assert {verdict for *_, verdict in summary.figures(alone)} == {"not measured"}


def test_throughput_is_compared_for_the_same_model_and_budget() -> None:
    large = {"model": "canary_1b_flash"}
    rows = NOTHING | {
        "training": [
            training("packed_static", 400.0),
            training("packed_static", 90.0, **large),
            training("packed_static", 80.0, **large, frame_budget="12000"),
            training("random", 100.0),
        ]
    }
    found = {what: measured for what, _, measured, _ in summary.figures(rows)}
    assert found["training, packed against random batches"] == "4 x"
    others = [row | {"frame_budget": "12000"} for row in rows["training"][1:2]]
    rows = NOTHING | {"training": [*rows["training"], *others, training("random", 30.0, **large)]}
    found = {what: measured for what, _, measured, _ in summary.figures(rows)}
    assert found["training, packed against random batches"] == "3 x"


def test_the_peak_of_another_gpu_or_of_a_part_is_not_that_of_an_h200() -> None:
    other = training("packed_static", 1.0, device="NVIDIA A100")
    part = training("packed_static", 1.0, device="NVIDIA H200 MIG 1g.18gb", mfu="")
    shares = [
        line
        for line in summary.figures(NOTHING | {"training": [other, part]})
        if "useful share" in line[0]
    ]
    assert [verdict for *_, verdict in shares] == ["not measured"] * 2


def test_memory_that_grows_misses() -> None:
    rows = NOTHING | {"memory": [memory(n, n) for n in range(1, 9)]}
    (line,) = [line for line in summary.figures(rows) if line[0].startswith("growth")]
    assert line[1:] == ("<= 0 bytes", "3 bytes", "missed")
    # Without an account of a GPU's memory nothing can be said.
    plain = [row | {"reserved_bytes": ""} for row in rows["memory"]]
    (line,) = [x for x in summary.figures(NOTHING | {"memory": plain}) if x[0].startswith("growth")]
    assert line[-1] == "not measured"


def test_a_dry_run_meets_nothing() -> None:
    assert {verdict for *_, verdict in summary.figures(ROWS, dry=True)} == {"dry run"}


def write(path: Path, columns: tuple[str, ...], *rows: Mapping[str, str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(dict.fromkeys(columns, "") | row for row in rows)


def test_only_rows_of_this_run_count(tmp_path: Path) -> None:
    old = training("packed_static", 1.0, date="2026-01-01T00:00:00+00:00")
    new = training("packed_static", 2.0, date="2026-01-01T00:00:01+00:00")
    write(tmp_path / "training.csv", tuple(COLUMNS["training"]), old, new)
    found = summary.recent(tmp_path, "2026-01-01T00:00:01+00:00")
    assert [row["audio_s_per_s"] for row in found["training"]] == ["2.0"]
    assert found["ops"] == []
    # A process was killed while it wrote the last one; the next row was appended to another.
    lines = (tmp_path / "training.csv").read_text().splitlines()
    glued = f"{lines[-1][:40]}{lines[-1]}"
    (tmp_path / "training.csv").write_text("\n".join([*lines, glued, lines[-1][:40]]))
    assert summary.recent(tmp_path, "2026-01-01T00:00:01+00:00") == found


@pytest.mark.parametrize("dry", [False, True])
def test_the_tables(dry: bool) -> None:
    results = [Result("ops", "out of time", 90.4, "ended after 90 s", well=False)]
    where = {"device": "NVIDIA H200", "torch": "2.11", "git": "abc", "date": "2026-01-01"}
    text = summary.markdown(results, ROWS, where, dry=dry)
    assert text.startswith("# GPU suite, dry run: no figure" if dry else "# GPU suite\n")
    assert "NVIDIA H200, torch 2.11, git abc, 2026-01-01" in text
    assert "| ops  | out of time | 90 | ended after 90 s |" in text
    verdict = "dry run" if dry else "met"
    assert (
        f"| canary_180m_flash, useful share of 790 TFLOP/s | >= 35 %    | 50 %     | {verdict} |"
        in text
    )
    assert "missed" not in text if dry else "missed" in text
