from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, dropout_add_layer_norm
from effasr_kernels.dropout_add_layer_norm import _triton
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse

MODES = ["pre-norm", "post-norm", "addition", "norm"]
BIASED = ["pre-norm, bias", "post-norm, bias", "addition, bias"]
"""With a bias of the branch."""


def _case_for(lengths: tuple[int, ...], mode: str, channels: int = 12) -> Callable[[str], Case]:
    packed = {"residual": [torch.randn(n, channels, dtype=torch.float64) for n in lengths]}
    if mode != "norm":
        packed["x"] = [torch.randn(n, channels, dtype=torch.float64) for n in lengths]
    mode, _, biased = mode.partition(", ")
    names = [] if mode == "addition" else ["weight", "bias"]
    names += ["x_bias"] if biased else []
    shared = {name: torch.randn(channels, dtype=torch.float64) for name in names}

    def case(backend: str) -> Case:
        def run(packed: Any, shared: Any) -> Any:
            x, residual = packed.get("x"), packed["residual"]
            y = dropout_add_layer_norm(
                None if x is None else x.values,
                residual.values,
                shared.get("weight"),
                shared.get("bias"),
                residual.layout,
                x_bias=shared.get("x_bias"),
                scale=0.5,
                prenorm=mode != "post-norm",
                backend=backend,
            )
            # Without a branch, the second result is the residual itself.
            return y[0] if mode == "norm" else y

        results = ("x", "x") if mode == "pre-norm" else ("residual",)
        return Case(run, packed, shared, results=results)

    return case


@pytest.mark.parametrize("mode", [*MODES, *BIASED])
@pytest.mark.representative(mode=["pre-norm, bias", "post-norm", "addition", "norm"])
def test_keeps_the_contract(mode: str, dtype: torch.dtype, device: torch.device) -> None:
    check_kernel(_case_for((1, 0, 6), mode), dtype, device)


def _compare(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mode: str = "pre-norm",
    *,
    stream: torch.dtype | None = None,
    channels: int = 12,
    rows: int | None = None,
    dropout: float = 0.3,
) -> None:
    """Compare results and gradients with dropout, with NaN in the tail."""
    total = sum(lengths)
    rows = total if rows is None else rows
    layout = PackedLayout.from_lengths(lengths, rows=rows)
    stream = dtype if stream is None else stream
    residual = torch.randn(rows, channels, dtype=torch.float64)
    given: dict[str, Any] = {"residual": residual.to(stream)}
    if mode != "norm":
        given["x"] = torch.randn(rows, channels, dtype=torch.float64).to(dtype)
    mode, _, biased = mode.partition(", ")
    for name in () if mode == "addition" else ("weight", "bias"):
        given[name] = torch.randn(channels)
    if biased:
        given["x_bias"] = torch.randn(channels).to(dtype)
    for name in {"residual", "x"} & set(given):
        given[name][total:] = torch.nan
    upstream = [torch.randn(rows, channels).to(torch.float16).double() for _ in range(2)]

    def run(backend: str, where: torch.device | str, wide: bool) -> dict[str, Tensor]:
        leaves = {
            name: x.to(where, torch.float64 if wide else x.dtype).requires_grad_()
            for name, x in given.items()
        }
        results = dropout_add_layer_norm(
            leaves.get("x"),
            leaves["residual"],
            leaves.get("weight"),
            leaves.get("bias"),
            layout.to(where),
            x_bias=leaves.get("x_bias"),
            scale=0.5,
            dropout=dropout if mode != "norm" else 0.0,
            prenorm=mode != "post-norm",
            seed=7,
            offset=5,
            backend=backend,
        )
        results = (results,) if isinstance(results, Tensor) else results
        grads = [dy.to(y) for dy, y in zip(upstream, results, strict=False)]
        found = torch.autograd.grad(results, list(leaves.values()), grads)
        named = {f"result {i}": y.detach() for i, y in enumerate(results)}
        return named | dict(zip(leaves, found, strict=True))

    gold = run("reference", "cpu", True)
    baseline, actual = run("reference", "cpu", False), run("triton", device, False)
    for name, got in actual.items():
        got = got.cpu()
        if got.shape[0] == rows and got.ndim == 2 and not (mode == "norm" and name == "result 1"):
            assert not got[total:].any(), f"{name} is not zero in the tail"
            got, exact, same = got[:total], gold[name][:total], baseline[name][:total]
        else:
            exact, same = gold[name], baseline[name]
        finite = exact.isfinite()
        try:
            assert_no_worse(got[finite], exact[finite], same[finite])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("mode", [*MODES, *BIASED])
@pytest.mark.representative(mode=["pre-norm", "pre-norm, bias"])
def test_every_layout(mode: str, lengths: tuple[int, ...], device: torch.device) -> None:
    _compare(lengths, torch.float32, device, mode, rows=sum(lengths) + 6)


@pytest.mark.parametrize("channels", [1, 6, 16, 37, 260])
@pytest.mark.representative(channels=260)
def test_any_number_of_channels(channels: int, dtype: torch.dtype, device: torch.device) -> None:
    _compare((3, 2), dtype, device, channels=channels, rows=6)


@pytest.mark.parametrize("mode", [*MODES, *BIASED])
@pytest.mark.representative(mode=["pre-norm", "pre-norm, bias"])
def test_a_wide_stream_beside_a_narrow_branch(
    mode: str, dtype: torch.dtype, device: torch.device
) -> None:
    _compare((3, 2), dtype, device, mode, stream=torch.float32, rows=6)


def test_a_program_adds_several_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_PROGRAMS", 2 * 16)
    for mode in ("pre-norm", *BIASED):
        _compare((9, 0, 14), torch.float32, device, mode, rows=29)


def test_a_result_that_is_not_used_has_no_gradient(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((5,), device)
    x, residual = (torch.randn(5, 8, device=device, requires_grad=True) for _ in range(2))
    weight, bias = torch.randn(8, device=device), torch.zeros(8, device=device)
    _, s = dropout_add_layer_norm(x, residual, weight, bias, layout, scale=0.5, backend="triton")
    of_x, of_residual = torch.autograd.grad(s.sum(), (x, residual))
    assert bool((of_x == 0.5).all())
    assert bool((of_residual == 1).all())


@pytest.mark.parametrize(("sequences", "rows"), [(0, 0), (0, 3), (2, 0), (1, 5)])
@pytest.mark.parametrize("mode", ["pre-norm", "post-norm"])
def test_nothing_at_all(mode: str, sequences: int, rows: int, device: torch.device) -> None:
    _compare((0,) * sequences, torch.float32, device, mode, rows=rows)


def test_a_seed_on_the_device_drops_the_same(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((6,), device)
    x, residual = torch.ones(6, 20, device=device), torch.zeros(6, 20, device=device)
    one, other = (
        dropout_add_layer_norm(
            x, residual, None, None, layout, dropout=0.5, seed=seed, backend="triton"
        )
        for seed in (9, torch.tensor(9, device=device))
    )
    assert torch.equal(one, other)
    assert set(one.unique().tolist()) == {0.0, 2.0}
