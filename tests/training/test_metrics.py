import pytest
import torch

from effasr.training.metrics import TrainingMetrics
from effasr.training.step import StepReport
from effasr.training.step_stats import HostCopy, StepCounts

CPU = torch.device("cpu")


def report(
    step: int, loss: float = 1.0, *, finite: bool = True, stopping: int = 0, splits: int = 0
) -> StepReport:
    counts = StepCounts(
        targets=9, monotonic_targets=9, audio_seconds=10.0 + step, frames=90, frame_rows=100,
        tokens=8, token_rows=10, stopping=stopping, due=5, useful_flops=60e12,
        recomputed_flops=30e12, work=(50e12, 40e12),
    )  # fmt: skip
    values = torch.tensor([loss, 2.0, 3.0, 4.5, 4.0, 5.0, float(finite), 1.0, splits])
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
        "guided": 4.0, "grad_norm": 5.0, "guided_on": True, "lr": 0.1, "audio_seconds": 10.5,
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


def test_a_line_is_the_same_after_resuming_between_two_lines():
    meters = [TrainingMetrics(CPU), TrainingMetrics(CPU)]
    for meter in meters:
        meter.add(report(0, 1.0))
    with pytest.raises(RuntimeError, match="collect"):
        meters[0].state_dict()
    for meter in meters:
        meter.collect(keep_pending=0)
    resumed = TrainingMetrics(CPU)
    resumed.load_state_dict(meters[0].state_dict())
    for meter in (meters[1], resumed):
        meter.add(report(1, 2.5))
        meter.collect(keep_pending=0)
    first, second = meters[1].line(2, 0), resumed.line(2, 0)
    assert first | {"peak_memory_bytes": 0} == second | {"peak_memory_bytes": 0}


def test_counts_survive_the_trip_over_the_device():
    counts = StepCounts(2**40 + 1, 7, 0.1, 3, 4, 5, 6, 1, 4, 2e15, 1e15, (1.0, 2.0, 6.0))
    assert StepCounts.from_values(HostCopy(counts.tensor(CPU)).read()) == counts
    assert counts.rank_imbalance == pytest.approx(1.0)
