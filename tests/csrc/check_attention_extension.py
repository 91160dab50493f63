"""Run as ``python check_attention_extension.py FOLDER``: attention of the extension built there.

A process of its own: an extension once loaded can be neither replaced nor unloaded.
"""

import ctypes
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels import PackedLayout, RelativeBias, attention, guided_attention
from effasr_kernels.testing.tolerance import assert_no_worse
from tests.csrc.native_attention import NativeAttention

HEADS, WIDTH = 2, 24
LAYOUT = PackedLayout.from_lengths((5, 0, 33, 1, 70), rows=111)
ENDS = LAYOUT.cu_seqlens, LAYOUT.cu_seqlens
OPS = torch.ops.effasr_c


def _check_values(actual: list[Tensor], call: Callable[..., Any], *inputs: Tensor) -> None:
    """Results and gradients against those of a reference, whose upstream gradients are ones."""
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        results = call(*leaves)
        gradients = torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])
        found.append([*results, *gradients])
    for x, baseline, gold in zip(actual, *found, strict=True):
        assert_no_worse(x, gold.detach(), baseline.detach())


def check_relative(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Relative positions; gradients of q, k and v are parts of one tensor."""
    biases = [torch.randn(HEADS, WIDTH), torch.randn(HEADS, WIDTH), torch.randn(141, HEADS, WIDTH)]
    options = WIDTH**-0.5, True, None, 0.0, 0
    out, softmax, penalty = OPS.attention_forward(q, k, v, *ENDS, *biases, *options)
    assert penalty.numel() == 0
    joined = torch.full((LAYOUT.rows, 3, HEADS, WIDTH), torch.nan)
    shared = [torch.full_like(x, torch.nan) for x in biases]
    saved = q, k, v, out, softmax, None, *ENDS, *biases
    OPS.attention_backward(torch.ones_like(out), None, *saved, *joined.unbind(1), *shared, *options)
    call = lambda q, k, v, *biases: (
        attention(
            q, k, v, LAYOUT, causal=True, position=RelativeBias(*biases), backend="reference"
        ),
    )
    _check_values([out, *joined.unbind(1), *shared], call, q, k, v, *biases)


def check_guided(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The penalty, and gradients through both results."""
    options = 0.2, False, 0.3, 0.0, 0
    nothing = None, None, None
    out, softmax, penalty = OPS.attention_forward(q, k, v, *ENDS, *nothing, *options)
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    upstream = torch.ones_like(out), torch.ones_like(penalty)
    saved = q, k, v, out, softmax, penalty, *ENDS, *nothing
    OPS.attention_backward(*upstream, *saved, *found, *nothing, *options)
    call = lambda *x: guided_attention(
        *x, LAYOUT, LAYOUT, sigma=0.3, scale=0.2, backend="reference"
    )
    _check_values([out, penalty, *found], call, q, k, v)


def check_dropout(folder: Path, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The seed arrives whole: its upper half is a part of the key."""
    library = next((folder / "effasr_kernels").glob("_C*.so"))
    seed = 2**61 + 5
    native = NativeAttention(ctypes.CDLL(str(library)), dropout=0.5, seed=seed)
    expected, _ = native(q, k, v, LAYOUT)
    options = WIDTH**-0.5, False, None, 0.5
    out, _, _ = OPS.attention_forward(q, k, v, *ENDS, None, None, None, *options, seed)
    assert torch.equal(out, expected)
    other, _, _ = OPS.attention_forward(q, k, v, *ENDS, None, None, None, *options, 5)
    assert not torch.equal(out, other)


def check_errors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One line that says which argument is wrong, and how."""

    def raised(**changed: Any) -> str:
        arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_q": ENDS[0], "cu_k": ENDS[1]}
        arguments |= dict.fromkeys(("content_bias", "position_bias", "table", "sigma"))
        arguments |= {"scale": 1.0, "causal": False, "dropout": 0.0, "seed": 0}
        try:
            OPS.attention_forward(**(arguments | changed))
        except ValueError as error:
            return str(error).split("\n")[0]
        raise AssertionError("no error")

    assert "`k` must be float32 on a CPU, but is Double" in raised(k=k.double())
    assert "`v` must have shape [111, 2, 24], but has [110, 2, 24]" in raised(v=v[1:])
    assert "`q` must have stride 1 in its last dimension" in raised(q=q.mT.contiguous().mT)
    assert "`cu_q` must be int32" in raised(cu_q=ENDS[0].long())
    falls = torch.tensor([0, 9, 5, 39, 40, 109], dtype=torch.int32)
    assert "`cu_k` must rise from 0 to at most 111 rows, but element 2 is 5" in raised(cu_k=falls)
    assert "`cu_k` must have 6 elements as `cu_q` has" in raised(cu_k=ENDS[1][:-1])
    bias, table = torch.zeros(HEADS, WIDTH), torch.zeros(137, HEADS, WIDTH)
    assert "must be given together" in raised(table=table)
    position = {"content_bias": bias, "position_bias": bias}
    assert "at least 2 * 70 - 1 rows" in raised(**position, table=table)
    assert "`dropout` must be in [0, 1), but is 1" in raised(dropout=1.0)
    assert "`sigma` must be positive, but is 0" in raised(sigma=0.0)


def main(folder: Path) -> None:
    """Make the build a part of the package of this checkout, then check it."""
    effasr_kernels.__path__.append(str(folder / "effasr_kernels"))
    importlib.import_module("effasr_kernels._C")
    torch.manual_seed(0)
    q, k, v = torch.randn(LAYOUT.rows, 3, HEADS, WIDTH).unbind(1)
    check_relative(q, k, v)
    check_guided(q, k, v)
    check_dropout(folder, q, k, v)
    check_errors(q, k, v)
    sys.stdout.write("attention: right\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
