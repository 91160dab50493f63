"""How much memory `transducer_loss` takes at the published size, by its allocations on a GPU.

Nothing is launched, and tensors have no memory, so a size that fills a GPU costs seconds.
Products need none but their results there: cuBLAS widens, where a CPU would copy.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import launch
from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.triton import backend, sums
from tests.gpu.live_memory import Live

FRAMES, LABELS, WIDTH, CLASSES = 1000, 200, 640, 1024
"""40 seconds at a frame every 40 ms."""


class _Forgotten(list[launch.Launch]):
    def append(self, _: launch.Launch) -> None:
        """Keep nothing."""


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("multiply", "multiply_add"):
        monkeypatch.setattr(sums, name, lambda *_: None)
    before = set_workspace(256 * 2**20)
    yield
    set_workspace(before)


def _layout(lengths: list[int]) -> PackedLayout:
    layout = PackedLayout.from_lengths(lengths)
    return PackedLayout(layout.cu_seqlens.to("meta"), layout.cu_seqlens_host, layout.rows)


def _peak(
    sequences: int, overwritten: tuple[str, ...], durations: tuple[int, ...] | None = None
) -> tuple[int, int]:
    """Bytes of encoded and predicted, and the most that is made beside all that is given."""
    make = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device="meta")
    layouts = [_layout([length] * sequences) for length in (FRAMES, LABELS)]
    classes = CLASSES + len(durations or ())
    arguments: dict[str, Any] = {
        "encoded": make(sequences * FRAMES, WIDTH),
        "predicted": make(sequences * (LABELS + 1), WIDTH),
        "targets": torch.empty(sequences * LABELS, dtype=torch.int32, device="meta"),
        "layout_frames": layouts[0],
        "layout_targets": layouts[1],
        "weight": make(classes, WIDTH),
        "bias": make(classes),
        "blank_id": 0,
        "activation": "relu",
        "fastemit": 0.0,
        "durations": durations,
        "overwritten": overwritten,
    }
    given = [x for x in arguments.values() if isinstance(x, Tensor)]
    with launch.recording((9, 0)), Live(*given) as live:
        # A launch that is written down holds its tensors.
        launch._Recorder.take = _Forgotten().append
        results, saved = backend.forward(TransducerArguments(**arguments))
        backend.backward(
            TransducerArguments(**arguments), (torch.ones_like(results[0]),), results, saved
        )
    return arguments["encoded"].nbytes + arguments["predicted"].nbytes, live.peak


@pytest.mark.extended
@pytest.mark.parametrize("durations", [None, (0, 1, 2, 3, 4)], ids=["rnnt", "tdt"])
def test_a_batch_of_1024_takes_less_than_2_gb(durations: tuple[int, ...] | None) -> None:
    """Inputs, which gradients replace, and all else: about a third of what was published."""
    inputs, peak = _peak(1024, ("encoded", "predicted"), durations)
    assert inputs == 1_574_174_720
    assert inputs + peak < 1.9e9, (inputs, peak)


@pytest.mark.parametrize("durations", [None, (0, 1, 2, 3, 4)], ids=["rnnt", "tdt"])
def test_gradients_are_all_that_grows_with_the_batch(durations: tuple[int, ...] | None) -> None:
    inputs, peak = _peak(64, ("encoded", "predicted"), durations)
    twice, other = _peak(128, ("encoded", "predicted"), durations)
    assert abs(other - peak) < 2**16, (peak, other)
    assert twice == 2 * inputs
    _, plain = _peak(64, (), durations)
    # Without gradients of its own size the backward takes less than the forward.
    assert plain - peak > 0.8 * inputs, (plain, peak, inputs)
