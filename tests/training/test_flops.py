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
from effasr.training.step_stats import StepCosts, StepCounts

COST = CostModel(frame=100, frame_pair=3, token=50, token_pair=2, token_frame=7)


def example(name: str, frames: int, tokens: int) -> Example:
    audio = np.zeros(frames * 1280, dtype=np.float32)
    return Example(name, audio, [1], list(range(tokens - 1)), True)


EXAMPLES = [example("a", 10, 4), example("b", 3, 2)]


def by_hand(frames: int, tokens: int) -> int:
    return 100 * frames + 3 * frames**2 + 50 * tokens + 2 * tokens**2 + 7 * tokens * frames


USEFUL = by_hand(10, 4) + by_hand(3, 2)


def test_without_padding_all_work_is_useful() -> None:
    batch = collate(EXAMPLES, eos_id=0, pad_id=0)
    assert batch.frame_lengths == (10, 3)
    assert work_of([batch, batch], COST) == (6 * USEFUL, 6 * USEFUL)


def test_the_tail_of_a_static_shape_is_linear() -> None:
    batch = collate(EXAMPLES, StaticShape(20, 9, 4), eos_id=0, pad_id=0)
    assert work_of([batch], COST) == (3 * USEFUL, 3 * (USEFUL + 100 * 7 + 50 * 3))


def test_padded_utterances_cost_as_much_as_the_longest() -> None:
    batch = collate(EXAMPLES, eos_id=0, pad_id=0, padded=True)
    assert work_of([batch], COST) == (3 * USEFUL, 3 * 2 * by_hand(10, 4))


def test_an_empty_batch_costs_its_tail() -> None:
    batch = collate([], StaticShape(20, 9, 4), eos_id=0, pad_id=0)
    assert work_of([batch], COST) == (0, 3 * (100 * 20 + 50 * 9))


def test_what_is_computed_again_counts_once_with_its_padding() -> None:
    batch = collate(EXAMPLES, StaticShape(20, 9, 4), eos_id=0, pad_id=0)
    context = DistributedContext(0, 1, torch.device("cpu"))
    again = CostModel(frame=10, frame_pair=0, token=0, token_pair=0, token_frame=0)
    assert (
        StepCounts.from_batches([batch] * 2, context, False, StepCosts(COST)).recomputed_flops == 0
    )
    counts = StepCounts.from_batches(
        [batch] * 2, context, False, StepCosts(COST, None, (again, None))
    )
    assert counts.recomputed_flops == 2 * 10 * 20
    assert counts.work == (2 * work_of([batch], COST)[1],)


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
    ],
)
def test_peaks_by_name(name: str, tflops: float) -> None:
    assert peak_of(name) == tflops * 1e12


def test_what_has_no_known_peak() -> None:
    assert peak_of("Some Accelerator 3000") is None
    assert peak_of("NVIDIA H200 NVL") is None
    assert peak_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert peak_flops(torch.device("cpu")) is None


def test_a_line_of_metrics_has_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
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
