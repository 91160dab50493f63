"""`ctc_loss` compiled for GPUs that need not be there."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from effasr_kernels.ctc_loss import CtcArguments, _triton
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot

CLASSES, WIDTH = 1024, 512
OWN = {
    "score_labels",
    "sweep_forward",
    "sweep_backward",
    "merge_repeats",
    "softmax_gradient",
    "label_gradient",
}


def _launches(
    frames: Sequence[int] = (40, 0, 9),
    labels: Sequence[int] = (12, 0, 3),
    *,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0),
    classes: int = CLASSES,
    width: int = WIDTH,
    bound: int = 200,
    blank_id: int = 0,
    with_bias: bool = True,
    targets_dtype: torch.dtype = torch.int64,
    rows: tuple[int, int] | None = None,
) -> list[Launch]:
    """The launches of this operation's own kernels, forward and backward."""
    of_frames = PackedLayout.from_lengths(frames, rows=rows and rows[0])
    of_targets = PackedLayout.from_lengths(labels, rows=rows and rows[1], static_max_seqlen=bound)
    arguments = {
        "hidden": torch.zeros(of_frames.rows, width, dtype=dtype),
        "weight": torch.zeros(classes, width, dtype=dtype),
        "targets": torch.zeros(of_targets.rows, dtype=targets_dtype),
        "layout_frames": of_frames,
        "layout_targets": of_targets,
        "bias": torch.zeros(classes, dtype=dtype) if with_bias else None,
        "blank_id": blank_id,
    }
    with recording(capability) as launches:
        results, saved = _triton.forward(CtcArguments(**arguments))
        _triton.backward(CtcArguments(**arguments), (torch.ones_like(results[0]),), results, saved)
    return [x for x in launches if x.kernel.fn.__name__ in OWN]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_every_architecture(
    compiled_ok: Callable[..., dict[str, aot.Resources]], architecture: int
) -> None:
    launches = _launches(capability=(architecture // 10, 0))
    found = compiled_ok(launches, architecture, products={"score_labels"})
    assert set(found) == OWN


def test_gradients_of_any_number_of_classes_are_stored_in_wide_pieces(
    compiled_ok: Callable[..., dict[str, aot.Resources]],
) -> None:
    found = compiled_ok(_launches(classes=1025), 90)
    assert "ld.global.v4" in found["softmax_gradient"].ptx
    assert "st.global.v4" in found["softmax_gradient"].ptx


@pytest.mark.parametrize("bound", [0, 100, 500, 1000, 2047])
@pytest.mark.representative(bound=[100, 2047])
def test_compiles_for_every_width_of_the_lattice(
    compiled_ok: Callable[..., dict[str, aot.Resources]], bound: int
) -> None:
    launches = _launches(labels=(0, 0, 0), bound=bound)
    sweeps = [x for x in launches if x.kernel.fn.__name__.startswith("sweep")]
    compiled_ok(sweeps, 90)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16, "with_bias": False, "targets_dtype": torch.int32},
        {"dtype": torch.float32},
        {"classes": 1025, "width": 177, "blank_id": 1024},
    ],
    ids=["float16", "float32", "odd"],
)
@pytest.mark.representative(
    options=[{"dtype": torch.float32}, {"classes": 1025, "width": 177, "blank_id": 1024}]
)
def test_compiles_for_other_inputs(
    compiled_ok: Callable[..., dict[str, aot.Resources]], options: dict
) -> None:
    wide = options.get("dtype") == torch.float32
    compiled_ok(_launches(**options), 90, products=() if wide else {"score_labels"})


def test_a_new_batch_compiles_nothing() -> None:
    generator = random.Random(0)
    keys = set()
    for _ in range(200):
        count = generator.randint(1, 5)
        frames = [generator.randint(0, 60) for _ in range(count)]
        labels = [generator.randint(0, 20) for _ in range(count)]
        spare = generator.randint(0, 9), generator.randint(0, 9)
        rows = 1 + sum(frames) + spare[0], sum(labels) + spare[1]
        launches = _launches(frames, labels, rows=rows, classes=64, width=32)
        keys |= {aot.key(x) for x in launches}
    assert len(keys) == len(OWN)


def test_a_longer_bound_compiles_only_the_sweeps() -> None:
    keys = [{aot.key(x) for x in _launches(bound=bound)} for bound in (200, 250, 300)]
    assert keys[0] == keys[1]
    assert {key[0] for key in keys[2] - keys[0]} == {"sweep_forward", "sweep_backward"}


def test_addresses_are_of_64_bit(
    compiled_ok: Callable[..., dict[str, aot.Resources]],
) -> None:
    """24,000 frames of 100,000 classes are more elements than 32 bits can number."""
    for name, resources in compiled_ok(_launches(), 90).items():
        assert "arith.muli" in resources.ttir
        wide = [x for x in resources.ttir.splitlines() if "arith.muli" in x and "i64" in x]
        assert wide, f"{name} multiplies no offset in 64 bits"


def test_sweeps_fetch_ahead(compiled_ok: Callable) -> None:
    """What they fetch lies in the buffer that they overwrite; see the tests on the emulator."""
    launches = [x for x in _launches() if x.kernel.fn.__name__.startswith("sweep")]
    for name, needs in compiled_ok(launches, 90).items():
        assert "async_copy_global_to_local" in needs.ttgir, name
