"""`transducer_loss` compiled for GPUs that need not be there."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot
from effasr_kernels.transducer_loss import TransducerArguments, set_workspace
from effasr_kernels.transducer_loss.triton import backend

CLASSES, WIDTH = 1024, 640
OWN = {
    "place_nodes",
    "join",
    "normalize",
    "sweep_forward",
    "sweep_backward",
    "differentiate",
    "fold",
    "finish_frames",
    "finish_states",
}
PRODUCTS = {"_partial_normalizers", "differentiate"}


def _launches(
    frames: Sequence[int] = (40, 0, 9),
    labels: Sequence[int] = (12, 0, 3),
    *,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0),
    classes: int = CLASSES,
    width: int = WIDTH,
    longest: int | None = 200,
    activation: str = "relu",
    targets_dtype: torch.dtype = torch.int64,
    rows: tuple[int, int] | None = None,
    **options: Any,
) -> list[Launch]:
    """All launches, forward and backward."""
    of_frames = PackedLayout.from_lengths(frames, rows=rows and rows[0])
    of_targets = PackedLayout.from_lengths(labels, rows=rows and rows[1], static_max_seqlen=longest)
    arguments: dict[str, Any] = {
        "encoded": torch.zeros(of_frames.rows, width, dtype=dtype),
        "predicted": torch.zeros(of_targets.rows + len(labels), width, dtype=dtype),
        "targets": torch.zeros(of_targets.rows, dtype=targets_dtype),
        "layout_frames": of_frames,
        "layout_targets": of_targets,
        "weight": torch.zeros(classes, width, dtype=dtype),
        "bias": torch.zeros(classes, dtype=dtype),
        "blank_id": 0,
        "activation": activation,
        "fastemit": 0.0,
    } | options
    with recording(capability) as launches:
        results, saved = backend.forward(TransducerArguments(**arguments))
        backend.backward(
            TransducerArguments(**arguments), (torch.ones_like(results[0]),), results, saved
        )
    return launches


def _own(launches: Sequence[Launch]) -> list[Launch]:
    return [x for x in launches if x.kernel.fn.__name__ in OWN | {"differentiate_kept"}]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_every_architecture(
    compiled_ok: Callable[..., dict[str, aot.Resources]], architecture: int
) -> None:
    launches = _launches(capability=(architecture // 10, 0))
    found = compiled_ok(launches, architecture, products=PRODUCTS)
    assert set(found) >= OWN


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("durations", [None, (0, 1, 2, 3, 4)])
@pytest.mark.representative(durations=None)
@pytest.mark.extended
def test_compiles_where_the_device_divides_the_nodes(
    compiled_ok: Callable[..., dict[str, aot.Resources]],
    durations: tuple[int, ...] | None,
    architecture: int,
) -> None:
    """The numbers of a chunk are pointers then; what only reads offsets is the same binary."""
    options = {"durations": durations, "classes": CLASSES + len(durations or ())}
    ordinary, launches = (
        _launches(capability=(architecture // 10, 0), max_nodes=max_nodes, **options)
        for max_nodes in (None, 600)
    )
    known = {aot.key(x) for x in ordinary}
    own = [x for x in launches if aot.key(x) not in known]
    found = compiled_ok(own, architecture, products={"differentiate", "_partial_normalizers"})
    sweeps = {x for x in OWN if x.startswith("sweep")}
    assert set(found) >= (OWN - sweeps) | {"divide"}
    assert not any(name.startswith("sweep") for name in found)
    assert found["differentiate"].registers <= 128 or architecture == 100


def test_batches_within_a_capacity_launch_the_same() -> None:
    """Grids and buffers, too, are those of the capacity: what a CUDA graph records."""
    shapes = []
    for frames, labels in (
        ((40, 0, 9), (12, 0, 3)),
        ((1, 2, 3), (0, 4, 20)),
        ((0, 0, 0), (0,) * 3),
    ):
        launches = _launches(
            frames, labels, rows=(64, 30), classes=64, width=32, longest=20, max_nodes=600
        )
        shapes.append([(aot.key(x), x.grid) for x in launches])
    assert shapes[0] == shapes[1] == shapes[2]


def test_compiles_where_logits_are_kept(
    compiled_ok: Callable[..., dict[str, aot.Resources]],
) -> None:
    """Nothing is kept from the forward where the layout has no bound."""
    launches = _launches(longest=None)
    names = {x.kernel.fn.__name__ for x in launches}
    assert "differentiate_kept" in names
    assert "differentiate" not in names
    kept = [x for x in launches if x.args.get("logits") is not None]
    found = compiled_ok(kept, 90, products={"_partial_normalizers"})
    assert set(found) == {"_partial_normalizers", "differentiate_kept"}


@pytest.mark.parametrize("bound", [0, 100, 400, 5000])
@pytest.mark.representative(bound=[100, 5000])
def test_compiles_for_every_width_of_the_lattice(
    compiled_ok: Callable[..., dict[str, aot.Resources]], bound: int
) -> None:
    launches = _launches(labels=(0, 0, 0), longest=bound)
    compiled_ok([x for x in launches if x.kernel.fn.__name__.startswith("sweep")], 90)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16, "activation": "tanh", "targets_dtype": torch.int32},
        {"dtype": torch.float32},
        {"classes": 1025, "width": 177},
    ],
    ids=["float16", "float32", "odd"],
)
@pytest.mark.representative(options={"classes": 1025, "width": 177})
def test_compiles_for_other_inputs(
    compiled_ok: Callable[..., dict[str, aot.Resources]], options: dict
) -> None:
    wide = options.get("dtype") == torch.float32
    compiled_ok(_own(_launches(**options)), 90, products=() if wide else {"differentiate"})


@pytest.mark.parametrize("classes", [1024, 1025])
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.representative(classes=1024)
def test_two_programs_share_a_multiprocessor(
    compiled_ok: Callable[..., dict[str, aot.Resources]], architecture: int, classes: int
) -> None:
    launches = _launches(capability=(architecture // 10, 0), classes=classes)
    launches = [x for x in launches if x.kernel.fn.__name__ == "differentiate"]
    assert compiled_ok(launches, architecture)["differentiate"].registers <= 128


@pytest.mark.parametrize("longest", [200, None])
def test_gradients_of_any_number_of_classes_are_stored_in_wide_pieces(
    compiled_ok: Callable[..., dict[str, aot.Resources]], longest: int | None
) -> None:
    launches = _launches(classes=1025, longest=longest)
    launches = [x for x in launches if x.kernel.fn.__name__.startswith("differentiate")]
    for resources in compiled_ok(launches, 90).values():
        assert "st.global.v4" in resources.ptx


def test_a_new_batch_compiles_nothing() -> None:
    """Neither other lengths, nor another division of the nodes."""
    generator = random.Random(0)
    names, keys = set(), set()
    before = set_workspace(2**20)
    try:
        for number in range(200):
            set_workspace(2**20 if number % 2 else 2**16)
            count = generator.randint(1, 5)
            frames = [generator.randint(0, 60) for _ in range(count)]
            labels = [generator.randint(0, 20) for _ in range(count)]
            spare = generator.randint(0, 9), generator.randint(0, 9)
            rows = 1 + sum(frames) + spare[0], sum(labels) + spare[1]
            launches = _own(_launches(frames, labels, rows=rows, classes=64, width=32))
            keys |= {aot.key(x) for x in launches}
            names |= {x.kernel.fn.__name__ for x in launches}
    finally:
        set_workspace(before)
    # Rows are scored where logits are wanted, and else only where something passes.
    assert len(keys) == len(names) + 1, sorted(key[0] for key in keys)


def test_addresses_are_of_64_bit(
    compiled_ok: Callable[..., dict[str, aot.Resources]],
) -> None:
    """A batch of 1,024 has 200 million nodes, of a thousand columns each."""
    for name, resources in compiled_ok(_own(_launches()), 90).items():
        wide = [x for x in resources.ttir.splitlines() if "i64" in x and "arith" in x]
        assert any("mul" in x or "ext" in x for x in wide), f"{name} computes no 64-bit offset"


def test_sweeps_fetch_ahead(compiled_ok: Callable) -> None:
    """What they fetch lies in the buffer that they overwrite; see the tests on the emulator."""
    launches = [x for x in _launches() if x.kernel.fn.__name__.startswith("sweep")]
    for name, needs in compiled_ok(launches, 90).items():
        assert "async_copy_global_to_local" in needs.ttgir, name
