"""Attention in CUDA C++: on a GPU from the installed library, emulated as nvcc compiles it."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from effasr_kernels import BackendUnavailable, Context, RelativeBias, attention
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


_FORWARD, _SCORES, _GROUP = "attention_forward.cu", "cuda/scores.cuh", "cuda/group.cuh"
_MUTANTS = {
    "barrier before reuse": (
        _FORWARD,
        "__syncthreads();\n    if constexpr (!k",
        "if constexpr (!k",
    ),
    "barrier behind copies": (_FORWARD, "publish();\n    __syncthreads();\n    // All", "// All"),
    "wait for values": (_FORWARD, "wait_for_copies<1>();", ""),
    "commit of products": (_GROUP, "wgmma.commit_group.sync.aligned;", ""),
    "ring of scores": (_GROUP, "step * kRows + warp() * 16 + 8 * n", "warp() * 16 + 8 * n"),
    "ring of the table": (_FORWARD, "(step + 1) % 2 * kTile", "step % 2 * kTile"),
    "mask of the last keys": (_FORWARD, "i % 2 >= seen[i / 2].end", "i % 2 > seen[i / 2].end"),
    "mask of the first keys": (
        _FORWARD,
        "i % 2 < seen[i / 2].first",
        "i % 2 < 0 * seen[i / 2].first",
    ),
    "dropout of weights": (_SCORES, "i / 2 * 2 + n % 2", "i / 2 * 2 + 1 - n % 2"),
    "sum of the weights": (_FORWARD, "total[half] *= shrink;", ""),
}


@pytest.mark.skipif(EMULATED != 90, reason="changes what is compiled for sm_90a")
@pytest.mark.parametrize("name", _MUTANTS)
@pytest.mark.representative(name=["barrier behind copies", "ring of scores"])
def test_mutants_of_the_forward(
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


def test_biases_need_no_alignment(device: torch.device) -> None:
    layout, found = PackedLayout.from_lengths([3], device), []
    for first in (0, 1):
        buffer = torch.linspace(-1, 1, 128, device=device).roll(first).to(BFLOAT16)
        bias, q = buffer[first:][:64].view(1, 64), torch.ones(3, 1, 64, device=device).to(BFLOAT16)
        v = torch.arange(192, device=device).view(3, 1, 64).to(BFLOAT16)
        position = RelativeBias(bias, bias, v.repeat(2, 1, 1)[:5])
        found.append(attention(q, q, v, layout, position=position, backend="cuda"))
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
    ],
)
def test_refusals(options: dict[str, Any], reason: str, device: torch.device) -> None:
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
