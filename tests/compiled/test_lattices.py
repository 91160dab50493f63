"""`ctc_loss` and `transducer_loss`, compiled for GPUs that need not be there."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import aot
import pytest
import torch

from effasr_kernels.runtime.launch import Launch
from effasr_kernels.transducer_loss import set_workspace
from tests.compiled.launches import RECORD, names, of_kernels
from tests.support.kernel_resources import Resources

DURATIONS = (0, 1, 2, 3, 4)
SHARED = {"_partial_normalizers", "_finish_statistics"}
KERNELS = {
    "ctc": {
        *("score_labels", "sweep_forward", "sweep_backward"),
        *("merge_repeats", "softmax_gradient", "label_gradient"),
    },
    "transducer": {
        *("place_nodes", "join", "normalize", "sweep_forward", "sweep_backward"),
        *("differentiate", "fold", "finish_frames", "finish_states"),
    },
}
KERNELS["durations"] = {
    *(x for x in KERNELS["transducer"] if not x.startswith("sweep")),
    *("score", "sweep_durations_forward", "sweep_durations_backward"),
}
PRODUCTS = {
    "ctc": {"score_labels"},
    "transducer": {"differentiate"},
    "durations": {"differentiate", "score"},
}
CompiledOk = Callable[..., dict[str, Resources]]


@pytest.fixture(autouse=True)
def _workspace() -> Iterator[None]:
    before = set_workspace(2**29)
    yield
    set_workspace(before)


def launches_of(
    loss: str,
    architecture: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    *,
    lengths: tuple[int, ...] = (40, 0, 9),
    transcripts: tuple[int, ...] = (12, 0, 3),
    **options: Any,
) -> list[Launch]:
    """Forward and backward, without the products that other losses share."""
    usual = {
        "ctc": {"classes": 1024, "width": 512, "blank_id": 0},
        "transducer": {"classes": 1024, "width": 640, "blank_id": 0},
        "durations": {"classes": 1025, "width": 640, "blank_id": 0, "durations": DURATIONS},
    }[loss]
    options = {"longest": 200, "tail": 0} | usual | options
    if loss == "durations":
        options |= {"sigma": 0.05}
    name = "ctc_loss" if loss == "ctc" else "transducer_loss"
    launches = RECORD[name](
        architecture, dtype, lengths=lengths, transcripts=transcripts, **options
    )
    return [x for x in launches if x.kernel.fn.__name__ not in SHARED]


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("loss", KERNELS)
def test_usual_sizes(loss: str, architecture: int, compiled_ok: CompiledOk) -> None:
    launches = launches_of(loss, architecture)
    compiled = compiled_ok(launches, architecture, products=PRODUCTS[loss])
    assert set(compiled) == KERNELS[loss]
    for name, resources in compiled.items():
        # 24,000 frames of 100,000 classes are more elements than 32 bits can number.
        wide = [x for x in resources.ttir.splitlines() if "i64" in x and "arith" in x]
        operations = ("arith.muli",) if loss == "ctc" else ("mul", "ext")
        assert any(x in line for line in wide for x in operations), f"{name}: 32-bit offsets"
        if name in ("sweep_forward", "sweep_backward"):
            # What they fetch lies in the buffer that they overwrite; see the tests on the emulator.
            assert "async_copy_global_to_local" in resources.ttgir, name
    if loss == "transducer" and architecture < 100:
        # Two programs share a multiprocessor.
        assert compiled["differentiate"].registers <= 128


@pytest.mark.parametrize(
    ("loss", "bound"),
    [
        *(("ctc", 100), ("ctc", 2047), ("transducer", 100), ("transducer", 5000)),
        ("durations", 500),
        *(
            pytest.param(loss, bound, marks=pytest.mark.extended)
            for loss, bounds in (
                *(("ctc", (0, 500, 1000)), ("transducer", (0, 400))),
                ("durations", (0, 20, 60, 300)),
            )
            for bound in bounds
        ),
    ],
)
def test_every_width_of_the_lattice(loss: str, bound: int, compiled_ok: CompiledOk) -> None:
    options = {"durations": {60: (1,), 500: DURATIONS, 0: DURATIONS}.get(bound, tuple(range(9)))}
    launches = launches_of(
        loss, transcripts=(0, 0, 0), longest=bound, **(options if loss == "durations" else {})
    )
    compiled_ok(of_kernels(launches, "sweep"), 90)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        *(("ctc", {"dtype": torch.float32}), ("durations", {"dtype": torch.float32, "width": 177})),
        ("ctc", {"classes": 1025, "width": 177, "blank_id": 1024}),
        ("transducer", {"classes": 1025, "width": 177}),
        pytest.param("ctc", {"dtype": torch.float16, "bias": False}, marks=pytest.mark.extended),
        pytest.param(
            *("transducer", {"dtype": torch.float16, "activation": "tanh"}),
            marks=pytest.mark.extended,
        ),
        pytest.param("transducer", {"dtype": torch.float32}, marks=pytest.mark.extended),
        pytest.param("transducer", {"classes": 1025}, marks=pytest.mark.extended),
        pytest.param(
            "durations", {"dtype": torch.float16, "width": 177}, marks=pytest.mark.extended
        ),
    ],
    ids=str,
)
def test_other_sizes(loss: str, options: dict[str, Any], compiled_ok: CompiledOk) -> None:
    options = dict(options)
    dtype = options.pop("dtype", torch.bfloat16)
    launches = launches_of(loss, 90, dtype, **options)
    compiled = compiled_ok(launches, 90, products=() if dtype == torch.float32 else PRODUCTS[loss])
    if options.get("classes") == 1025:
        # Gradients of any number of classes are stored in wide pieces.
        name = "softmax_gradient" if loss == "ctc" else "differentiate"
        assert "st.global.v4" in compiled[name].ptx
        assert loss != "ctc" or "ld.global.v4" in compiled[name].ptx


def test_logits_that_are_kept(compiled_ok: CompiledOk) -> None:
    """Nothing is kept from the forward where the layout has no bound."""
    launches = launches_of("transducer", longest=None, classes=1025)
    assert names(launches) == KERNELS["transducer"] - {"differentiate"} | {"differentiate_kept"}
    compiled = compiled_ok([x for x in launches if x.args.get("logits") is not None], 90)
    assert set(compiled) == {"differentiate_kept"}
    assert "st.global.v4" in compiled["differentiate_kept"].ptx


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("loss", ["transducer", "durations"])
@pytest.mark.extended
def test_nodes_that_the_device_divides(
    loss: str, architecture: int, compiled_ok: CompiledOk
) -> None:
    """The numbers of a chunk are pointers then; what only reads offsets is the same binary."""
    known = {aot.key(x) for x in launches_of(loss, architecture)}
    launches = launches_of(loss, architecture, max_nodes=600)
    launches = [x for x in launches if aot.key(x) not in known]
    compiled = compiled_ok(launches, architecture, products={"differentiate"})
    expected = {x for x in KERNELS["transducer"] if not x.startswith("sweep")} | {"divide"}
    assert set(compiled) >= expected
    assert not of_kernels(launches, "sweep")
    assert compiled["differentiate"].registers <= 128 or architecture == 100


def test_batches_within_a_capacity_launch_the_same() -> None:
    """Grids and buffers, too, are those of the capacity: what a CUDA graph records."""
    shapes = []
    for frames, labels in (
        ((40, 0, 9), (12, 0, 3)),
        ((1, 2, 46), (0, 4, 11)),
        ((0, 0, 49), (0, 0, 15)),
    ):
        launches = launches_of(
            *("transducer",),
            **{"lengths": frames, "transcripts": labels, "tail": 15, "classes": 64, "width": 32},
            **{"longest": 20, "max_nodes": 900},
        )
        shapes.append([(aot.key(x), x.grid) for x in launches])
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize(
    ("loss", "binaries"),
    # Rows are scored where logits are wanted, and else only where something passes.
    [("ctc", 6), ("transducer", 11), ("durations", 12)],
)
def test_no_batch_compiles_anything(loss: str, binaries: int) -> None:
    """Neither other lengths, nor another division of the nodes."""
    draw, keys = random.Random(0), set()
    for number in range(200):
        set_workspace(2**20 if number % 2 else 2**16)
        count = draw.randint(1, 5)
        options = {
            "lengths": tuple(draw.randint(0, 60) for _ in range(count)),
            "transcripts": tuple(draw.randint(0, 20) for _ in range(count)),
            "tail": draw.randint(0, 9),
        }
        launches = launches_of(loss, classes=64, width=32, **options)
        keys |= {aot.key(x) for x in launches}
    assert len(keys) == binaries, sorted(key[0] for key in keys)


def test_a_longer_bound_compiles_only_the_sweeps() -> None:
    keys = [{aot.key(x) for x in launches_of("ctc", longest=bound)} for bound in (200, 250, 300)]
    assert keys[0] == keys[1]
    assert {key[0] for key in keys[2] - keys[0]} == {"sweep_forward", "sweep_backward"}
