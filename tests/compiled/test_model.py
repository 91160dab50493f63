"""All kernels of a training step together: the same binaries and sizes for every batch."""

from dataclasses import replace

import aot
import pytest
import torch

from effasr.data.batch import Batch
from effasr_kernels import PackedSequence
from effasr_kernels.runtime import torch_op
from effasr_kernels.runtime.launch import recording
from tests.gpu.live_memory import Sizes
from tests.gpu.small_training import SHAPE, make_batch, make_train_state


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    # A dispatch mode would see each operation as one call, and not what it allocates.
    monkeypatch.setattr(torch_op, "is_in_torch_dispatch_mode", lambda: False)


def _as_on_a_gpu(batch: Batch) -> Batch:
    """Audio whose lengths the host does not know: on a CPU features would depend on them."""
    audio = PackedSequence(batch.audio.values, batch.audio.layout.rewritable())
    return replace(batch, audio=audio)


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("position", ["relative", "rotary"])
def test_a_step_launches_and_allocates_the_same_for_every_batch(position: str) -> None:
    train_state = make_train_state(torch.device("cpu"), position, dropout=0.1)
    seen = []
    for seed in range(4):
        batch = _as_on_a_gpu(make_batch(seed, SHAPE))
        with recording() as launches, Sizes() as sizes:
            losses = train_state.model(batch, label_smoothing=0.1, guided_sigma=0.2)
            (losses.cross_entropy + losses.ctc + losses.guided).backward()
        train_state.model.zero_grad()
        seen.append(([aot.key(x) for x in launches], [x.grid for x in launches], sizes.bytes))
    # The first step also makes tables that are kept.
    keys, grids, found = seen[1]
    assert len(keys) > 20
    for other in seen[2:]:
        assert other == (keys, grids, found)
