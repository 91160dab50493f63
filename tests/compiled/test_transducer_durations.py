"""`transducer_loss` with durations, compiled for GPUs that need not be there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot
from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.triton import backend

USUAL = (0, 1, 2, 3, 4)
OWN = {"score", "sweep_durations_forward", "sweep_durations_backward"}


def _launches(
    durations: tuple[int, ...] = USUAL,
    *,
    frames: tuple[int, ...] = (40, 0, 9),
    labels: tuple[int, ...] = (12, 0, 3),
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0),
    classes: int = 1025,
    width: int = 640,
    longest: int | None = 200,
) -> list[Launch]:
    """All launches, forward and backward."""
    of_frames = PackedLayout.from_lengths(frames)
    of_targets = PackedLayout.from_lengths(labels, static_max_seqlen=longest)
    rows = classes + len(durations)
    arguments: dict[str, Any] = {
        "encoded": torch.zeros(of_frames.rows, width, dtype=dtype),
        "predicted": torch.zeros(of_targets.rows + len(labels), width, dtype=dtype),
        "targets": torch.zeros(of_targets.rows, dtype=torch.int64),
        "layout_frames": of_frames,
        "layout_targets": of_targets,
        "weight": torch.zeros(rows, width, dtype=dtype),
        "bias": torch.zeros(rows, dtype=dtype),
        "blank_id": 0,
        "activation": "relu",
        "fastemit": 0.0,
        "durations": durations,
        "sigma": 0.05,
    }
    with recording(capability) as launches:
        results, saved = backend.forward(TransducerArguments(**arguments))
        backend.backward(
            TransducerArguments(**arguments), (torch.ones_like(results[0]),), results, saved
        )
    return launches


def _own(launches: list[Launch]) -> list[Launch]:
    return [x for x in launches if x.kernel.fn.__name__ in OWN]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_every_architecture(
    compiled_ok: Callable[..., dict[str, aot.Resources]], architecture: int
) -> None:
    launches = _own(_launches(capability=(architecture // 10, 0)))
    assert set(compiled_ok(launches, architecture, products={"score"})) == OWN


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("durations", "bound"),
    [(USUAL, 0), (USUAL, 500), (tuple(range(9)), 300), (tuple(range(9)), 20), ((1,), 60)],
    ids=str,
)
@pytest.mark.representative(bound=500)
def test_compiles_for_every_width_of_the_lattice(
    compiled_ok: Callable[..., dict[str, aot.Resources]],
    durations: tuple[int, ...],
    bound: int,
    architecture: int,
) -> None:
    launches = _launches(durations, labels=(0, 0, 0), longest=bound)
    sweeps = [x for x in launches if x.kernel.fn.__name__.startswith("sweep")]
    compiled_ok(sweeps, architecture)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.representative(dtype=torch.float32)
def test_compiles_for_other_inputs(
    compiled_ok: Callable[..., dict[str, aot.Resources]], dtype: torch.dtype
) -> None:
    scoring = [x for x in _launches(dtype=dtype, width=177) if x.kernel.fn.__name__ == "score"]
    compiled_ok(scoring, 90, products=() if dtype == torch.float32 else {"score"})


def test_a_new_batch_compiles_nothing() -> None:
    """Neither other lengths, nor another division of the nodes; nor that nothing is kept."""
    keys, before = set(), set_workspace(2**20)
    try:
        for size, frames, labels in (
            (2**20, (5, 17, 2), (1, 3, 0)),
            (2**16, (60, 0, 33, 1), (20, 0, 3, 9)),
            (2**12, (1,), (0,)),
            (2**18, (16, 16), (15, 16)),
        ):
            set_workspace(size)
            launches = _launches(frames=frames, labels=labels, classes=64, width=32)
            keys |= {aot.key(x) for x in _own(launches)}
    finally:
        set_workspace(before)
    assert len(keys) == len(OWN), sorted(key[0] for key in keys)


def test_addresses_are_of_64_bit(compiled_ok: Callable[..., dict[str, aot.Resources]]) -> None:
    for name, resources in compiled_ok(_own(_launches()), 90).items():
        wide = [x for x in resources.ttir.splitlines() if "i64" in x and "arith" in x]
        assert any("mul" in x or "ext" in x for x in wide), f"{name} computes no 64-bit offset"
