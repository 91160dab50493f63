"""Attention in CUDA C++: on a GPU from the installed library, emulated as nvcc compiles it."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from effasr_kernels import BackendUnavailable, Context, RelativeBias, attention
from effasr_kernels.attention import _cuda
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import cuda
from tests.gpu.conftest import EMULATED, INTERPRETED
from tests.support.conformance import CaseFor, Variation, check_compiler, check_kernel, check_values
from tests.support.operation_cases import attention as cases
from tests.support.philox import PhiloxDropout

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="runs what is compiled"),
    pytest.mark.skipif(bool(EMULATED) and not shutil.which("nvcc"), reason="needs nvcc"),
]


@pytest.fixture(autouse=True)
def _built() -> None:
    if not EMULATED and isinstance(library := cuda.load(), str):
        pytest.skip(library)


@pytest.fixture(autouse=True)
def _same_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = import_module("effasr_kernels.attention.reference")
    monkeypatch.setattr(reference, "Dropout", PhiloxDropout)


def _case(lengths: tuple[int, ...], **options: Any) -> CaseFor:
    sizes: dict[str, Any] = {"heads": 1, "width": 64}
    return cases(lengths, "relative", **sizes | options)


@pytest.mark.parametrize(
    ("number", "sizes", "options"),
    [
        pytest.param(BFLOAT16, (2, 0, 5), {"context": Context(2, 0, 3)}, id="context"),
        pytest.param(FLOAT16, (70, 3), {"causal": True}, id="causal", marks=pytest.mark.extended),
        pytest.param(
            BFLOAT16, (3, 66), {"width": 128, "heads": 2}, id="wide", marks=pytest.mark.extended
        ),
    ],
)
def test_contract(
    number: torch.dtype, sizes: tuple[int, ...], options: dict[str, Any], device: torch.device
) -> None:
    check_kernel(_case(sizes, **options), number, device, "cuda")


# Several tiles and few; contexts whose bounds cut chunks and tiles; other keys than queries, and
# more; tables that are longer than the distances; the dropout of Triton's kernels.
_VALUES = [
    (BFLOAT16, (150, 3, 70, 0), {"heads": 2, "dropout": 0.25, "seed": 7 + 2**40}),
    (FLOAT16, (70, 5), {"width": 128, "tables": True}),
    (BFLOAT16, (38, 2), {"lengths_k": (3, 141), "causal": True, "reach": 150}),
]
_MORE_VALUES = [
    (FLOAT16, (200,), {"dropout": 0.5, "seed": 3, "context": Context(20, 7, 16)}),
    (BFLOAT16, (130, 64), {"width": 128, "context": Context(70, 0, 14), "tables": True}),
    (BFLOAT16, (129, 1), {"width": 128, "dropout": 0.1, "seed": 1, "causal": True}),
    (FLOAT16, (5, 70, 0, 2, 1), {"lengths_k": (140, 3, 4, 0, 1), "width": 128}),
    (BFLOAT16, (600, 3), {"context": Context(None, 0, 10)}),
    (BFLOAT16, (3, 65), {"lengths_k": (0, 0)}),
    (BFLOAT16, (1,), {}),
    (BFLOAT16, (64, 128), {"context": Context(33, 2, 1), "scale": 0.01}),
]


@pytest.mark.parametrize(
    ("number", "sizes", "options"),
    [*_VALUES, *(pytest.param(*x, marks=pytest.mark.extended) for x in _MORE_VALUES)],
)
def test_values(
    number: torch.dtype, sizes: tuple[int, ...], options: dict[str, Any], device: torch.device
) -> None:
    check_values(_case(sizes, **options), number, device, "cuda", tail=5)


_PAIRS, _SCORES, _GROUP = "attention_backward.cu", "cuda/gradients.cuh", "cuda/group.cuh"
_MUTANTS = {
    "barrier before reuse": (_PAIRS, "__syncthreads();\n      // In the tile of weights", "//"),
    "barrier behind stores": (_PAIRS, "__syncthreads();\n      if constexpr", "if constexpr"),
    "barrier behind products": (
        _PAIRS,
        "__syncthreads();\n      if (x.query < end)",
        "if (x.query < end)",
    ),
    "fence of stores": (
        _PAIRS,
        "publish();\n      __syncthreads();\n      if",
        "__syncthreads();\n if",
    ),
    "fence of registers": (_PAIRS, "begin_products();\n          add_half(0);", "add_half(0);"),
    "wait for copies": (_PAIRS, "wait_for_copies<0>();", ""),
    "wait for products": (_PAIRS, "end_products(of_query);\n          end_products(grad_k);", ""),
    "commit of products": (_GROUP, "wgmma.commit_group.sync.aligned;", ""),
    "ring of scores": (_SCORES, "n - 6 + 2 * number", "n - 5 + 2 * number"),
    "ring of the table": (_PAIRS, "table(upper ^ 1)", "table(upper)"),
    "half of distances": (_PAIRS, "store_distances(of_distance, 1);\n          load", "load"),
    "gradients by distance": (_SCORES, "(kOctetBytes - 128)", "kOctetBytes"),
    "order of words": (_SCORES, "to ^ i * 32", "to + i * 32"),
    "mask of the last keys": (_SCORES, "i % 2 >= end", "i % 2 > end"),
    "mask of the first keys": (_SCORES, "i % 2 < first", "i % 2 <= first"),
    "dropout of weights": (_SCORES, "i % 2 ? 0xffff : 0xffff0000", "i % 2 ? 0xffff0000 : 0xffff"),
    "order of columns": (_PAIRS, "column / 4 & 2", "column / 2 & 2"),
    "splits of a distance": (_PAIRS, "left &= left - 1", "left = 0"),
}


@pytest.mark.skipif(EMULATED != 90, reason="changes what is compiled for sm_90a")
@pytest.mark.parametrize("name", _MUTANTS)
@pytest.mark.representative(name=["fence of stores", "ring of scores"])
def test_mutants_of_the_backward(
    name: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator, or the comparison with the reference, notices each."""
    from emulator import emulate
    from emulator.machine import Fault

    sources = shutil.copytree(emulate._CSRC, tmp_path / "csrc")
    path, before, after = _MUTANTS[name]
    text = (sources / path).read_text()
    assert before in text
    (sources / path).write_text(text.replace(before, after))
    monkeypatch.setattr(emulate, "_CSRC", sources)
    monkeypatch.setattr(emulate, "_BINARIES", {})
    context = {"context": Context(40, 20, 1)} if "first" in name else {}
    case = _case((150, 3, 70), dropout=0.25, seed=7, **context)
    with pytest.raises((Fault, AssertionError)):
        check_values(case, BFLOAT16, device, "cuda", tail=5)


def test_biases_and_gradients_need_no_alignment(device: torch.device) -> None:
    layout, found = PackedLayout.from_lengths([3], device), []
    for first in (0, 1):
        buffers = [torch.linspace(-1, 1, 320, device=device).roll(first).to(BFLOAT16)] * 2
        views = [x[first:][: 64 * n] for x, n in zip(buffers, (1, 3), strict=True)]
        bias, grad = views[0].view(1, 64), views[1].view(3, 1, 64)
        q, table = torch.ones_like(grad).requires_grad_(), torch.ones(5, 1, 64, device=device)
        position = RelativeBias(bias, bias, table.to(BFLOAT16))
        attention(q, q, q, layout, position=position, backend="cuda").backward(grad)
        found.append(q.grad)
    assert torch.equal(*found)


def test_compiled(device: torch.device) -> None:
    case = _case((3, 0, 5), dropout=0.25, seed=7)("cuda")
    check_compiler(case, Variation(dtype=BFLOAT16, device=device))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"position": "none", "width": 64}, "computes relative positions only"),
        ({"width": 32}, "needs a head width of 64 or 128, not 32"),
        ({"width": 64, "dtype": torch.float32}, "computes in float16 and bfloat16, not in float32"),
        ({"width": 64, "scale": -0.5}, "needs a positive scale, not -0.5"),
        ({"width": 64, "capability": (8, 9)}, "its backward needs more shared memory than .* 8.9"),
    ],
)
def test_refusals(
    options: dict[str, Any], reason: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "capability" in options:
        monkeypatch.setattr(_cuda, "capability", lambda device: options["capability"])
    size = 3, 1, options["width"]
    q = torch.zeros(size, dtype=options.get("dtype", BFLOAT16), device=device)
    position = RelativeBias(q[0], q[0], q.new_zeros(5, *size[1:]))
    with pytest.raises(BackendUnavailable, match=f"cuda: {reason}"):
        attention(
            *(q, q, q, PackedLayout.from_lengths([3], device)),
            position=None if "position" in options else position,
            scale=options.get("scale"),
            backend="cuda",
        )
