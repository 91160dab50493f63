import numpy as np
import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.sampling.cost import CostModel
from effasr.distributed.process_group import DistributedContext
from effasr.training import metrics as meters
from effasr.training.flops import peak_flops, peak_of, work_of
from effasr.training.metrics import TrainingMetrics
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step_stats import StepCosts, StepCounts
from effasr.training.trainer import run

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
