"""`transducer_loss` on the compiled lattices against its definition.

In the interpreter the C++ for a CPU stands in for CUDA, as ``csrc/`` has it: compiled here without
torch, and called as `effasr_kernels._C` would be.
"""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import BackendUnavailable, PackedLayout, transducer_loss
from effasr_kernels.shared import lattice
from effasr_kernels.testing.conformance import Case, Packed, Shared, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse
from effasr_kernels.transducer_loss import _cuda, op, set_workspace
from tests.csrc.native import _Transducer
from tests.gpu.conftest import INTERPRETED

CSRC = Path(__file__).parents[2] / "csrc"
WIDTH, CLASSES = 20, 7
LEAVES = "encoded", "predicted", "weight", "bias"
SCHEMA = (
    "transducer_lattice(Tensor log_blank, Tensor log_label, Tensor(a!)? occ_blank, "
    "Tensor(b!)? occ_label, Tensor cu_frames, Tensor cu_labels, Tensor first_nodes, "
    "int max_frames, int max_labels, bool skewed) -> Tensor"
)


@pytest.fixture(autouse=True)
def _workspace() -> Iterator[None]:
    before = set_workspace(2**29)
    yield
    set_workspace(before)


@pytest.fixture(scope="module")
def _stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`effasr_kernels._C`, as far as the CPU's lattices of transducers go."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine to compile csrc/ with")
    path = tmp_path_factory.mktemp("lattice") / "lattice.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-o", str(path)]
    source = str(CSRC / "transducer_lattice_cpu.cpp")
    subprocess.run([compiler, *flags, source], check=True, timeout=120)
    run = ctypes.CDLL(str(path)).transducer_lattice_cpu

    def transducer_lattice(*arguments: Any) -> Tensor:
        *planes, cu_frames, cu_labels, first_nodes, frames, labels, skewed = arguments
        assert all(x is None or x.is_contiguous() for x in arguments[:7])
        assert first_nodes.shape[0] == cu_frames.shape[0] - 1 == cu_labels.shape[0] - 1
        assert int(cu_frames.diff().max()) <= frames
        assert int(cu_labels.diff().max()) <= labels
        total = torch.empty(first_nodes.shape[0], dtype=torch.float64)
        tensors = *planes, total, cu_frames, cu_labels, first_nodes
        given = _Transducer(*(None if x is None else x.data_ptr() for x in tensors))
        given.sequences, given.max_frames = first_nodes.shape[0], frames
        given.max_labels, given.skewed = labels, skewed
        assert run(ctypes.byref(given), 1) == 0
        return total

    library = torch.library.Library("effasr_c", "DEF")
    library.define(SCHEMA)
    library.impl("transducer_lattice", transducer_lattice, "CPU")
    before = sys.modules.get("effasr_kernels._C")
    sys.modules["effasr_kernels._C"] = ModuleType("effasr_kernels._C")
    lattice.why_not.cache_clear()
    yield
    library._destroy()
    del sys.modules["effasr_kernels._C"]
    if before is not None:
        sys.modules["effasr_kernels._C"] = before
    lattice.why_not.cache_clear()


@pytest.fixture
def extension(request: pytest.FixtureRequest) -> None:
    """The extension where the tests run."""
    kind: lattice.Extension = "cpu-extension" if INTERPRETED else "cuda-extension"
    reason = lattice.why_not(kind)
    if reason is None:
        return
    if not INTERPRETED:
        pytest.skip(f"{reason}: see csrc/README.md")
    request.getfixturevalue("_stand_in")


needs_extension = pytest.mark.usefixtures("extension")


def _arguments(
    frames: Sequence[int],
    labels: Sequence[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    longest: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    targets = torch.randint(CLASSES - 1, (sum(labels),))
    return {
        "encoded": torch.randn(sum(frames), WIDTH).to(device, dtype),
        "predicted": torch.randn(sum(labels) + len(labels), WIDTH).to(device, dtype),
        "targets": (targets + (targets >= 2)).to(device),
        "layout_frames": PackedLayout.from_lengths(frames, device),
        "layout_targets": PackedLayout.from_lengths(labels, device, longest=longest),
        "weight": torch.randn(CLASSES, WIDTH).div(4).to(device, dtype),
        "bias": torch.randn(CLASSES).to(device, dtype),
        "blank_id": 2,
        "activation": "relu",
        "fastemit": 0.0,
    } | options


def _gradients(
    arguments: dict[str, Any], upstream: Tensor, backend: str, **options: Any
) -> dict[str, Tensor]:
    leaves = {name: arguments[name].detach().requires_grad_() for name in LEAVES}
    made = {name: leaves[name] * 1 for name in LEAVES[:2]}
    loss = transducer_loss(**(arguments | leaves | made), backend=backend, **options)
    found = torch.autograd.grad(loss, list(leaves.values()), upstream.to(loss))
    return {"loss": loss.detach()} | dict(zip(leaves, found, strict=True))


def _case_for(frames: Sequence[int], labels: Sequence[int]) -> Callable[[str], Case]:
    arguments = _arguments(frames, labels, torch.device("cpu"))
    layout = arguments["layout_targets"]
    packed = {
        "encoded": arguments["encoded"].double().split(list(frames)),
        "predicted": arguments["predicted"].double().split(layout.lengthened(1).lengths),
        "targets": arguments["targets"].split(list(labels)),
    }
    shared = {name: arguments[name].double() for name in LEAVES[2:]}

    def case_for(backend: str) -> Case:
        def run(packed: Packed, shared: Shared) -> Tensor:
            encoded, targets = packed["encoded"], packed["targets"]
            return transducer_loss(
                *(encoded.values, packed["predicted"].values, targets.values),
                *(encoded.layout, targets.layout, shared["weight"], shared["bias"]),
                blank_id=2,
                backend=backend,
            )

        return Case(run, packed, shared, one_more=frozenset({"predicted"}))

    return case_for


@needs_extension
def test_keeps_the_contract(device: torch.device) -> None:
    case_for = _case_for((4, 0, 3), (2, 0, 5))
    check_kernel(case_for, torch.float32, device, backend="cuda")


@needs_extension
@pytest.mark.parametrize(
    ("size", "longest"), [(2**29, None), (2**14, None), (2**14, 9)], ids=["whole", "few", "kept"]
)
def test_agrees_with_the_definition(
    size: int, longest: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    set_workspace(size)
    arguments = _arguments(
        *((5, 0, 8, 2), (2, 0, 4, 0), device),
        dtype=dtype,
        longest=longest,
        fastemit=0.2,
        activation="tanh",
    )
    upstream = torch.tensor([1.0, 2.0, -3.0, 0.5])
    host = {
        name: x.cpu() if isinstance(x, Tensor) else x.to("cpu") if "layout" in name else x
        for name, x in arguments.items()
    }
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in host.items()
    }
    actual = _gradients(arguments, upstream, "cuda", overwrite_inputs=longest is None)
    gold = _gradients(wide, upstream, "reference")
    for name, baseline in _gradients(host, upstream, "reference").items():
        assert_no_worse(actual[name].cpu(), gold[name], baseline)


@needs_extension
def test_an_infinite_loss_has_no_gradient_whatever_comes_from_above(device: torch.device) -> None:
    arguments = _arguments((3, 0, 1, 3), (1, 2, 2, 1), device)
    arguments["targets"] = torch.tensor([4, 1, 3, 1, 3, 4], device=device)
    # The row of the third: one of its labels has no probability.
    arguments["bias"][1] = -torch.inf
    for upstream in (torch.inf, torch.nan, -2.0):
        given = torch.tensor([1.0, upstream, upstream, 1.0])
        actual = _gradients(arguments, given, "cuda")
        assert actual["loss"].isfinite().tolist() == [True, False, False, True]
        assert bool((actual["encoded"][3] == 0).all())
        assert bool((actual["encoded"][:3] != 0).any())
        assert bool(actual["weight"].isfinite().all())


@needs_extension
@pytest.mark.parametrize("longest", [None, 9])
def test_a_sequence_without_gradient_may_hold_nan(
    longest: int | None, device: torch.device
) -> None:
    arguments = _arguments((3, 4), (1, 2), device, longest=longest)
    upstream = torch.tensor([1.0, 0.0])
    clean = _gradients(arguments, upstream, "cuda")
    arguments["encoded"][3:] = torch.nan
    actual = _gradients(arguments, upstream, "cuda")
    assert bool(actual["loss"][1].isnan())
    for name in LEAVES:
        assert torch.equal(actual[name], clean[name]), name


@needs_extension
def test_is_taken_on_request_alone(device: torch.device) -> None:
    arguments = _arguments((3,), (1,), device, durations=None, sigma=0.0, overwritten=())
    assert op.select(**arguments) is not _cuda.run
    assert op.select(**arguments, backend="cuda") is _cuda.run


@needs_extension
def test_saves_what_it_says(device: torch.device) -> None:
    for longest in (None, 9):
        arguments = _arguments((3, 2), (1, 2), device, longest=longest)
        _, saved = _cuda.forward(**arguments)
        said = _cuda.saved_like(**arguments)
        assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in said]
        assert (saved[0].numel() > 0) == (longest is not None)


def test_says_how_to_build_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments((3,), (1,), device)
    monkeypatch.setitem(sys.modules, "effasr_kernels._C", None)
    lattice.why_not.cache_clear()
    message = r"cuda: effasr_kernels\._C cannot be imported: .* EFFASR_BUILD_CUDA=1 pip install"
    with pytest.raises(BackendUnavailable, match=message):
        transducer_loss(**arguments, backend="cuda")
    lattice.why_not.cache_clear()
    arguments |= {"weight": arguments["weight"].repeat(2, 1), "bias": arguments["bias"].repeat(2)}
    with pytest.raises(BackendUnavailable, match=r"cuda: .* no lattice of durations"):
        transducer_loss(**arguments, durations=(0, 1), backend="cuda")
