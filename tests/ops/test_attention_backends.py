"""torch's and others' attention behind ours, on a machine that need have neither GPU nor packages.

Doubles with the signatures of the packages compute by the reference, and do what those are known to
do: rows outside the sequences come back as NaN, as do their gradients.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import (
    Backend,
    BackendUnavailable,
    PackedLayout,
    RelativeBias,
    Rotary,
    attention,
)
from effasr_kernels.attention import OPERATION as op
from effasr_kernels.attention import order
from effasr_kernels.attention.backends import packages, varlen
from tests.ops.attention_doubles import Library, flash_attn, torchs
from tests.support.attention_arguments import attention_arguments
from tests.support.conformance import check_kernel
from tests.support.operation_cases import FACTORIES
from tests.support.tolerance import poison

HEADS, WIDTH = 2, 8
PACKAGES = {
    Backend.FLASH_ATTN_2: "flash_attn",
    Backend.FLASH_ATTN_3: "flash_attn_interface",
    Backend.FLASH_ATTN_4: "flash_attn.cute",
}
TRAINED = [Backend.VARLEN, Backend.FLASH_ATTN_2, Backend.FLASH_ATTN_4]
OTHERS = [Backend.VARLEN, *PACKAGES]
LENGTHS = (5, 0, 3, 1)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """All packages are installed, and the GPU is an H100."""
    library = Library()
    packages.find.cache_clear()
    monkeypatch.setattr(packages, "capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "_built_in", lambda: True)
    forward, backward = torchs(library)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    for version, name in enumerate(PACKAGES.values(), 2):
        _install(monkeypatch, name, flash_attn_varlen_func=flash_attn(library, version))
    yield library
    packages.find.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def _inputs(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], tail: int = 3
) -> tuple[list[Tensor], PackedLayout, PackedLayout]:
    """Half precision, with a tail of NaN; the upper bound of the lengths is not reached."""
    layouts = [
        PackedLayout.from_lengths(
            x, rows=sum(x) + tail, num_sequences=len(x) + 2, static_max_seqlen=9
        )
        for x in (lengths_q, lengths_k)
    ]
    shapes = [(layout.rows, HEADS, WIDTH) for layout in (layouts[0], layouts[1], layouts[1])]
    values = [torch.randn(shape).half() for shape in shapes]
    where = layouts[0], layouts[1], layouts[1]
    values = [poison(x, layout) for x, layout in zip(values, where, strict=True)]
    return [x.requires_grad_() for x in values], layouts[0], layouts[1]


@pytest.mark.parametrize(
    ("causal", "across"),
    [(False, False), (True, False), (False, True)],
    ids=["", "causal", "cross"],
)
@pytest.mark.parametrize("backend", TRAINED)
def test_values_and_gradients_are_the_references_and_zero_outside(
    backend: Backend, causal: bool, across: bool, library: Library
) -> None:
    (q, k, v), layout_q, layout_k = _inputs(LENGTHS, LENGTHS[::-1] if across else LENGTHS)
    layout_k = layout_k if across else layout_q

    def run(backend: str) -> list[Tensor]:
        y = attention(q, k, v, layout_q, layout_k, causal=causal, scale=0.3, backend=backend)
        # The gradient of the tail is NaN, as of a loss that looks at it.
        upstream = poison(torch.ones_like(y), layout_q)
        return [y.detach(), *torch.autograd.grad(y, (q, k, v), upstream)]

    expected, found = run("reference"), run(backend)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    (call,) = library.calls
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 9
    assert library.deterministic == [True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("backend", [Backend.VARLEN, Backend.FLASH_ATTN_2])
def test_keeps_the_contract(backend: Backend, lengths: tuple[int, ...]) -> None:
    case_for = FACTORIES["attention"](lengths, causal=True, width=WIDTH)
    check_kernel(case_for, torch.float16, backend=backend)


def test_the_third_version_serves_inference(library: Library) -> None:
    (q, k, v), layout, _ = _inputs(LENGTHS, LENGTHS)
    q, k, v = q.detach(), k.detach(), v.detach()
    found = attention(q, k, v, layout, backend="flash_attn_3")
    assert torch.equal(found, attention(q, k, v, layout, backend="reference"))
    assert len(library.calls) == 1
    with pytest.raises(BackendUnavailable, match="supports only inference"):
        attention(q.requires_grad_(), k, v, layout, backend="flash_attn_3")
    assert Backend.FLASH_ATTN_3 not in order.ORDER


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("empty", [(), (0, 0)])
def test_a_batch_without_sequences_gives_zeros(
    backend: Backend, empty: tuple[int, ...], library: Library
) -> None:
    layout = PackedLayout.from_lengths(empty, rows=4)
    q = torch.full((4, HEADS, WIDTH), torch.nan, dtype=torch.float16)
    q.requires_grad_(backend in TRAINED)
    y = attention(q, q, q, layout, backend=backend)
    assert torch.equal(y, torch.zeros_like(y))
    if backend in TRAINED:
        (gradient,) = torch.autograd.grad(y, q, torch.ones_like(y))
        assert torch.equal(gradient, torch.zeros_like(q))
    assert not library.calls


@pytest.mark.parametrize("backend", TRAINED)
def test_strided_inputs_and_the_dispatcher(backend: Backend) -> None:
    layout = PackedLayout.from_lengths(LENGTHS, rows=12)
    qkv = torch.randn(12, 3, HEADS, WIDTH).half().requires_grad_()
    results = []
    for mode in (None, torch.utils.flop_counter.FlopCounterMode(display=False)):
        with mode or torch.enable_grad():
            y = attention(*qkv.unbind(1), layout, causal=True, backend=backend)
            results.append([y.detach(), torch.autograd.grad(y.float().square().sum(), qkv)[0]])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def _unsupported_reason(backend: Backend, **changed: Any) -> str:
    q = changed.pop("q", torch.zeros(4, HEADS, WIDTH, dtype=torch.float16))
    layout = PackedLayout.from_lengths([1, 3])
    layout_k = changed.pop("layout_k", layout)
    arguments = attention_arguments(q, q, q, layout, layout_k, **changed)
    with pytest.raises(BackendUnavailable) as caught:
        op.select(arguments, backend)
    return str(caught.value)


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"position": Rotary()}, "does not support rotary positions"),
        ({"position": RelativeBias(*torch.zeros(3, 1))}, "does not support relative positions"),
        ({"dropout": 0.1}, "does not support dropout with a seed"),
        ({"q": torch.zeros(4, HEADS, WIDTH)}, "not in float32"),
        ({"q": torch.zeros(4, 1, 12).half()}, "a multiple of 8, up to 256, not 12"),
        ({"q": torch.zeros(4, 1, 264).half()}, "a multiple of 8, up to 256, not 264"),
        (
            {"causal": True, "layout_k": PackedLayout.from_lengths([1, 3])},
            "aligns causal masks at the last key",
        ),
    ],
)
def test_says_what_it_cannot_do(backend: Backend, changed: dict[str, Any], reason: str) -> None:
    assert reason in _unsupported_reason(backend, **changed)


@pytest.mark.parametrize(
    ("backend", "found", "reason"),
    [
        *((backend, None, "needs an NVIDIA GPU") for backend in OTHERS),
        *((backend, (7, 5), "needs compute capability 8.0") for backend in OTHERS),
        (Backend.FLASH_ATTN_3, (8, 0), "needs compute capability 9.0"),
        (Backend.FLASH_ATTN_3, (10, 0), "needs compute capability 9.0"),
        (Backend.FLASH_ATTN_4, (8, 0), "needs compute capability 9, 10 or 11"),
        (Backend.FLASH_ATTN_4, (12, 0), "needs compute capability 9, 10 or 11"),
    ],
)
def test_needs_the_right_gpu(
    backend: Backend,
    found: tuple[int, int] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "capability", lambda device: found)
    assert reason in _unsupported_reason(backend)


@pytest.mark.parametrize(
    ("backend", "found", "width"),
    [(Backend.FLASH_ATTN_4, (10, 0), 136), (Backend.VARLEN, (8, 9), 200)],
)
def test_a_gpu_may_not_serve_every_width(
    backend: Backend, found: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "capability", lambda device: found)
    reason = _unsupported_reason(backend, q=torch.zeros(4, 1, width).half())
    assert f"on this GPU, not {width}" in reason


@pytest.mark.parametrize(
    ("backend", "package"),
    [
        (Backend.FLASH_ATTN_2, "--no-build-isolation flash-attn"),
        (
            Backend.FLASH_ATTN_3,
            "--no-build-isolation "
            "'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'",
        ),
        (Backend.FLASH_ATTN_4, "--pre flash-attn-4"),
    ],
)
def test_what_is_not_installed(
    backend: Backend, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name in PACKAGES.values():
        monkeypatch.delitem(sys.modules, name)
    # Whatever this machine has is hidden: an empty package is found first.
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert f"(pip install {package})" in _unsupported_reason(backend)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_dependency", "cannot be imported: No module named 'no_such_dependency'"),
        ("raise ImportError('undefined symbol')", "ImportError: undefined symbol"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
    ],
)
def test_what_is_installed_and_broken(
    text: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    (tmp_path / "flash_attn_interface.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert reason in _unsupported_reason(Backend.FLASH_ATTN_3)


def test_a_signature_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in torch 2.10.
    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None
    ): ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert "varlen_attn of this version has no `scale`, `window_size`" in _unsupported_reason(
        Backend.VARLEN
    )

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k): ...

    _install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    reason = _unsupported_reason(Backend.FLASH_ATTN_2)
    assert "of this version has no `softmax_scale`, `causal`, `deterministic`" in reason


def test_torch_may_run_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: "FA3")
    assert "activate_flash_attention_impl has replaced" in _unsupported_reason(Backend.VARLEN)
    monkeypatch.undo()
    packages.find.cache_clear()
    monkeypatch.setattr(packages, "capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "_built_in", lambda: False)
    assert "torch was built without FlashAttention" in _unsupported_reason(Backend.VARLEN)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_takes_the_calls(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real functions of the torch that is installed, on tensors without values."""
    monkeypatch.undo()
    q, k, v = torch.empty(12, 3, HEADS, 64, device="meta", dtype=torch.bfloat16).unbind(1)
    offsets = torch.empty(5, dtype=torch.int32, device="meta")
    layout = PackedLayout(offsets, range(5), 12, static_max_seqlen=7)
    arguments = attention_arguments(q, k, v, layout, layout, causal=causal, scale=0.1)
    results, saved = varlen.forward(arguments)
    (like,) = varlen.saved_like(arguments)
    assert saved[0].shape == like.shape
    assert saved[0].dtype == like.dtype
    grads = varlen.backward(arguments, results, results, saved)
    assert results[0].shape == q.shape
    assert {name: x.shape for name, x in grads.items() if x is not None} == dict.fromkeys(
        "qkv", q.shape
    )


def test_ours_comes_first_and_the_reference_last() -> None:
    others = [backend for backend in order.ORDER if backend in op.backends]
    places = [others.index(backend) for backend in TRAINED]
    assert places == sorted(places)
    assert others[-1] is Backend.REFERENCE
    if Backend.TRITON in op.backends:
        assert others[0] is Backend.TRITON
