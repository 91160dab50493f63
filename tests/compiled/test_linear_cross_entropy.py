"""The kernels of `linear_cross_entropy` and of the shared projection, compiled without a GPU."""

import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels.linear_cross_entropy import CrossEntropyArguments, _triton
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.shared import projection
from effasr_kernels.testing import aot

PRODUCT = "_partial_normalizers"


def _launches(
    architecture: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 300,
    width: int = 512,
    classes: int = 1024,
    bias: bool = True,
    label_smoothing: float = 0.1,
    z_loss: float = 1e-4,
    uniform_gradient: bool = False,
    frozen: bool = False,
) -> list[Launch]:
    arguments = {
        "hidden": torch.empty(rows, width, dtype=dtype),
        "weight": torch.empty(classes, width, dtype=dtype),
        "targets": torch.zeros(rows, dtype=torch.int64),
        "bias": torch.empty(classes, dtype=dtype) if bias else None,
        "label_smoothing": label_smoothing,
        "ignore_index": -100,
        "z_loss": z_loss,
        "uniform_gradient": uniform_gradient,
        "frozen": frozen,
    }
    with recording(divmod(architecture, 10)) as launches:
        results, saved = _triton.forward(CrossEntropyArguments(**arguments))
        like = _triton.saved_like(CrossEntropyArguments(**arguments))
        assert [(x.shape, x.dtype) for x in like] == [(x.shape, x.dtype) for x in saved]
        _triton.backward(
            CrossEntropyArguments(**arguments), (torch.ones_like(results[0]),), results, saved
        )
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_common_shapes(architecture: int, compiled_ok: Callable) -> None:
    found = compiled_ok(_launches(architecture), architecture, products={PRODUCT})
    assert set(found) == {PRODUCT, "_finish_statistics", "_grad_logits_kernel"}
    if architecture >= 90:
        # Two programs of 256 threads fit on a multiprocessor.
        assert found[PRODUCT].registers <= 128
        assert 2 * found[PRODUCT].shared <= aot.SHARED_LIMIT[architecture]


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False, "label_smoothing": 0.0},
        {"width": 1024},
        {"width": 144, "classes": 1025},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.representative(options=[{"width": 144, "classes": 1025}, {"dtype": torch.float32}])
def test_other_shapes(options: dict, compiled_ok: Callable) -> None:
    products = set() if options.get("dtype") == torch.float32 else {PRODUCT}
    compiled_ok(_launches(90, **options), 90, products=products)


def test_gradients_of_any_number_of_classes_are_stored_in_wide_pieces(
    compiled_ok: Callable,
) -> None:
    found = compiled_ok(_launches(90, classes=1025), 90)
    assert "ld.global.v4" in found["_grad_logits_kernel"].ptx
    assert "st.global.v4" in found["_grad_logits_kernel"].ptx


EARLY = {"_loss_and_grad_kernel", "_upstream_scale_kernel"}


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    "options",
    [
        {"width": 1024, "classes": 5248},
        {"bias": False, "label_smoothing": 0.0, "z_loss": 0.0, "classes": 1025},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_gradients_in_the_forward(architecture: int, options: dict, compiled_ok: Callable) -> None:
    found = compiled_ok(_launches(architecture, uniform_gradient=True, **options), architecture)
    assert set(found) == EARLY
    # Rows of any length are read and written in pieces of 16 bytes.
    row = found["_loss_and_grad_kernel"]
    assert "ld.global.v4" in row.ptx
    assert "st.global.v4" in row.ptx or "st.global.v2" in row.ptx
    assert row.registers <= 128


def test_gradients_in_the_forward_need_one_binary_for_all_rows() -> None:
    keys = set()
    draw = random.Random(0)
    for rows in [1, 16, 128, *(draw.randint(1, 3000) for _ in range(200))]:
        options = {"uniform_gradient": True, "frozen": bool(rows % 2)}
        launches = _launches(90, rows=rows, width=64, classes=40, **options)
        keys |= {aot.key(launch) for launch in launches}
    assert len(keys) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.representative(dtype=torch.bfloat16)
def test_rows_up_to_a_total(architecture: int, dtype: torch.dtype, compiled_ok: Callable) -> None:
    """As `ctc_loss` uses the projection: no classes, and a tail."""
    hidden, weight = torch.empty(300, 512, dtype=dtype), torch.empty(1025, 512, dtype=dtype)
    with recording(divmod(architecture, 10)) as launches:
        end = torch.zeros(1, dtype=torch.int32)
        projection.row_statistics(hidden, weight, weight[:, 0], total=end)
    products = set() if dtype == torch.float32 else {PRODUCT}
    compiled_ok(launches, architecture, products=products)


def test_offsets_have_64_bits(compiled_ok: Callable) -> None:
    """Rows times vocabulary pass 2**31 at 130,000 rows of 16,384 classes, and so may rows."""
    found = compiled_ok(_launches(90), 90)
    for name, needs in found.items():
        assert re.search(r"arith\.(muli|addi) .* : (i64|tensor<[0-9x]+xi64>)", needs.ttir), name
    # Rows and classes, each as (first of the tile) times (stride), and the place of the results.
    assert len(re.findall(r"arith\.muli .* : i64", found[PRODUCT].ttir)) >= 3
    assert re.search(r"arith\.muli .* : i64", found["_grad_logits_kernel"].ttir)


def test_no_number_of_rows_compiles_anything() -> None:
    keys = set()
    draw = random.Random(0)
    for rows in [1, 16, 128, *(draw.randint(1, 3000) for _ in range(200))]:
        launches = _launches(90, rows=rows, width=64, classes=40)
        keys |= {aot.key(launch) for launch in launches}
    assert len(keys) == 3


@pytest.mark.extended
def test_few_rows_share_the_vocabulary() -> None:
    """So that every multiprocessor has work; the number depends on shapes alone."""
    grids = {}
    for rows in (1, 300, 20_000):
        (launch, *_) = _launches(90, rows=rows, width=64, classes=16_384)
        grids[rows] = launch.grid
    assert grids == {1: (1, 128), 300: (3, 128), 20_000: (157, 7)}
    assert projection.chunk_rows(16_384) == 1024
