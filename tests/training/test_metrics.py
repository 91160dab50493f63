"""Figures of a step and the work that they stand for, and how they are shown."""

import io
import random

import numpy as np
import pytest
import torch
from rich.console import Console

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.sampling.cost import CostModel
from effasr.distributed.process_group import DistributedContext
from effasr.training import metrics as meters
from effasr.training.flops import peak_flops, peak_of, work_of
from effasr.training.metrics import TrainingMetrics
from effasr.training.run_dir import run_log
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.run_dir.run_log import ProgressDisplay, SilentDisplay, describe
from effasr.training.step import StepReport
from effasr.training.step_stats import HostCopy, StepCosts, StepCounts
from effasr.training.trainer import run

CPU = torch.device("cpu")


def report(
    step: int, loss: float = 1.0, *, finite: bool = True, stopping: int = 0, splits: int = 0
) -> StepReport:
    counts = StepCounts(
        targets=9, monotonic_targets=9, audio_seconds=10.0 + step, frames=90, frame_rows=100,
        tokens=8, token_rows=10, stopping=stopping, due=5, useful_flops=60e12,
        recomputed_flops=30e12, work=(50e12, 40e12),
    )  # fmt: skip
    values = torch.tensor([loss, 2.0, 3.0, 4.5, 4.0, 3.0, 5.0, float(finite), 1.0, splits])
    return StepReport(step, 0.1 * step, HostCopy(counts.tensor(CPU)), HostCopy(values), [])


def test_a_line_holds_means_per_step_since_the_one_before():
    meter = TrainingMetrics(CPU)
    for step, loss in enumerate([1.0, 3.0]):
        meter.add(report(step, loss))
        meter.time(0.5, 0.1)
    assert meter.collect(keep_pending=0) == []
    line = meter.line(2, 0)
    expected = {
        "step": 2, "epoch": 0, "loss": 2.0, "cross_entropy": 2.0, "ctc": 3.0, "transducer": 4.5,
        "guided": 4.0, "consistency": 3.0, "grad_norm": 5.0, "guided_on": True, "lr": 0.1,
        "audio_seconds": 10.5,
        "tokens": 8.0, "mfu": None, "mfu_with_padding": None, "hfu": None,
        "useful_tflops": 120.0,
        "padding_frames": pytest.approx(0.1), "padding_tokens": pytest.approx(0.2),
        "data_wait_s": 0.1, "step_s": 0.5, "rank_imbalance": pytest.approx(50 / 45 - 1),
        "skipped": 0, "oom_splits": 0, "peak_memory_bytes": line["peak_memory_bytes"],
    }  # fmt: skip
    assert line == expected
    assert line["peak_memory_bytes"] > 10_000_000
    meter.add(report(2, 7.0))
    meter.collect(keep_pending=0)
    assert meter.line(3, 0)["loss"] == 7.0


def test_the_newest_report_is_left_for_the_device_to_finish():
    meter = TrainingMetrics(CPU)
    meter.add(report(0, finite=False))
    with pytest.raises(RuntimeError, match="collect"):
        meter.state_dict()
    assert meter.collect() == []
    assert not meter.stopping
    meter.add(report(1, stopping=1))
    # A request to stop reaches every rank by the counts, which are known at once.
    assert meter.stopping
    assert [skipped.step for skipped in meter.collect()] == [0]
    assert meter.collect(keep_pending=0) == []


def test_steps_without_an_update_do_not_spoil_the_means():
    meter = TrainingMetrics(CPU)
    meter.add(report(0, float("nan"), finite=False))
    meter.add(report(1, 3.0))
    meter.collect(keep_pending=0)
    line = meter.line(2, 0)
    assert (line["loss"], line["skipped"]) == (3.0, 1)
    meter.add(report(2, float("inf"), finite=False))
    meter.collect(keep_pending=0)
    line = meter.line(3, 0)
    assert (line["loss"], line["grad_norm"], line["skipped"]) == (None, None, 2)


def test_counts_survive_the_trip_over_the_device():
    counts = StepCounts(2**40 + 1, 7, 0.1, 3, 4, 5, 6, 1, 4, 2e15, 1e15, (1.0, 2.0, 6.0))
    assert StepCounts.from_values(HostCopy(counts.tensor(CPU)).read()) == counts
    assert counts.rank_imbalance == pytest.approx(1.0)


COST = CostModel(frame=100, frame_pair=3, token=50, token_pair=2, token_frame=7)


def example(name: str, frames: int, tokens: int) -> Example:
    audio = np.zeros(frames * 1280, dtype=np.float32)
    return Example(name, audio, [1], list(range(tokens - 1)), True)


EXAMPLES = [example("a", 10, 4), example("b", 3, 2)]


def by_hand(frames: int, tokens: int) -> int:
    return 100 * frames + 3 * frames**2 + 50 * tokens + 2 * tokens**2 + 7 * tokens * frames


USEFUL = by_hand(10, 4) + by_hand(3, 2)
SHAPE = StaticShape(20, 9, 4)


@pytest.mark.parametrize(
    ("examples", "shape", "padded", "computed"),
    [
        (EXAMPLES, None, False, USEFUL),
        # The tail of a static shape is linear.
        (EXAMPLES, SHAPE, False, USEFUL + 100 * 7 + 50 * 3),
        # Padded utterances cost as much as the longest.
        (EXAMPLES, None, True, 2 * by_hand(10, 4)),
        ([], SHAPE, False, 100 * 20 + 50 * 9),
    ],
)
def test_useful_and_computed_work(examples, shape, padded, computed):
    batch = collate(examples, shape, eos_id=0, pad_id=0, padded=padded)
    assert work_of([batch] * 2, COST) == (6 * USEFUL if examples else 0, 6 * computed)


def test_what_is_computed_again_counts_once_with_its_padding():
    batches = [collate(EXAMPLES, SHAPE, eos_id=0, pad_id=0)] * 2
    context = DistributedContext(0, 1, torch.device("cpu"))
    again = CostModel(frame=10, frame_pair=0, token=0, token_pair=0, token_frame=0)
    for recomputed, expected in ((None, 0), ((again, None), 2 * 10 * 20)):
        costs = StepCosts(COST, None, recomputed)
        counts = StepCounts.from_batches(batches, context, False, costs)
        assert counts.recomputed_flops == expected
        assert counts.work == (work_of(batches, COST)[1],)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-32GB", 125),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("Some Accelerator 3000", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peaks_by_name(name, tflops):
    assert peak_of(name) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(torch.device("cpu")) is None


def test_a_line_of_metrics_has_the_share_of_the_peak(monkeypatch):
    monkeypatch.setattr(meters, "peak_flops", lambda device: 100e12)
    meter = TrainingMetrics(torch.device("cpu"), ranks=2)
    flops = {"useful_flops": 160e12, "computed_flops": 240e12, "hardware_flops": 320e12}
    meter._sums = {"steps": 2} | flops
    meter.time(0.5, 0.0)
    meter.time(1.5, 0.0)
    line = meter.line(2, 0)
    assert line["mfu"] == pytest.approx(0.4)
    assert line["mfu_with_padding"] == pytest.approx(0.6)
    assert line["hfu"] == pytest.approx(0.8)
    assert line["useful_tflops"] == pytest.approx(40)


def test_a_run_logs_what_it_computes_again(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(meters, "peak_flops", lambda device: 1e12)
    shares = []
    for name, recomputed in (("plain", False), ("all", True)):
        training = {"max_steps": 2, "activation_checkpointing": recomputed}
        assert run(make_config(name=name, training=training)) == 0
        lines = read_lines(tmp_path / name / "metrics.jsonl")
        shares.append([line["hfu"] / line["mfu_with_padding"] for line in lines])
    assert shares[0] == [1, 1]
    # A whole forward more would be a third.
    assert all(1.01 < share < 4 / 3 for share in shares[1])


LINE = {
    "step": 50,
    "loss": 1.23456,
    "step_s": 0.5,
    "audio_seconds": 200.0,
    "padding_frames": 0.004,
    "data_wait_s": 0.01,
}


def test_the_figures_are_those_of_the_line():
    text = describe(LINE, ranks=2)
    assert text == "loss 1.2346  RTFx 200 per rank  padding 0.4 %  data wait 2 %"
    hybrid = describe(LINE | {"transducer": 2.34567}, ranks=2)
    assert hybrid.startswith("loss 1.2346 (transducer 2.3457)  RTFx 200")
    assert describe(LINE | {"transducer": LINE["loss"]}, ranks=2) == text
    assert describe(LINE | {"loss": None}, ranks=1).startswith("loss -  RTFx 400")


def test_without_a_terminal_there_is_one_plain_line_per_entry(monkeypatch):
    now = 0.0
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now)
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=40)
    with ProgressDisplay(170, 0, 1, console, validate_every=30) as display:
        display.metrics(LINE)
        display.show("validation: [WER] 0.1")
        display.validation_s = 30.0
        # The first step here compiles, and is not one of those to come.
        for step in range(51, 91):
            now += 100.0 if step == 51 else 0.5
            display.advance(step)
        now, display.validated_s = now + 40.0, 40.0
        display.validating("dev", 3, 9)
        display.metrics(LINE | {"step": 110})
        now += 5.0
        display.validating("dev", 4, 9)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 50/170  loss 1.2346")
    assert lines[0].endswith("ETA 0:01:00")
    assert lines[1:3] == ["validation: [WER] 0.1", "step 51/170  ETA -:--:--"]
    assert lines[3:5] == ["3/9 utterances of dev are decoded", lines[4]]
    assert lines[4].endswith("ETA 0:01:20")  # 60 steps and two validations
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("total", "every", "first_s", "step_s", "validation_s", "checkpoint_s"),
    [
        (11_000, 1000, 0.3, 0.14, 8.0, 0.2),  # small, on a CPU
        (480, 120, 2.0, 1.5, 45.0, 3.0),  # a Whisper, whose first validation is before training
        (20_000, 2000, 240.0, 0.31, 90.0, 20.0),  # with torch.compile, on a GPU
    ],
)
def test_the_time_left_is_within_a_fifth_after_a_twentieth_of_the_steps(
    monkeypatch, total, every, first_s, step_s, validation_s, checkpoint_s
):
    now, left, ends = 0.0, {}, {}
    monkeypatch.setattr(run_log.time, "monotonic", lambda: now)
    console, lengths = Console(file=io.StringIO()), random.Random(0)
    with ProgressDisplay(total, 0, 1, console, validate_every=every) as display:
        display.validation_s = validation_s if total == 480 else 0.0
        monkeypatch.setattr(display, "show", lambda line: left.update({step: line}))
        for step in range(1, total + 1):
            now += first_s if step == 1 else step_s * lengths.uniform(0.6, 1.4)
            display.advance(step)
            display.metrics(LINE | {"step": step, "step_s": step_s})
            ends[step] = now
            if step % every == 0:
                now += validation_s + checkpoint_s
                display.validation_s = validation_s
                display.validated_s += validation_s
    hours, minutes, seconds = map(int, left[total // 20].rpartition("ETA ")[2].split(":"))
    expected = now - ends[total // 20]
    assert abs(3600 * hours + 60 * minutes + seconds - expected) < 0.2 * expected


def test_the_line_of_progress_fits_80_columns():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with ProgressDisplay(total=2_200, done=0, ranks=1, console=console) as display:
        display.metrics(LINE | {"data_wait_s": 0.05})
    assert "50/2200" in out.getvalue()
    assert "padding 0.4 %  data wait 10 % ETA" in out.getvalue()


def test_other_ranks_say_nothing(capsys):
    with SilentDisplay() as display:
        display.metrics(LINE)
        display.show("hello")
    assert capsys.readouterr() == ("", "")
