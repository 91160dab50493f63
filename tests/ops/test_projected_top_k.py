"""`projected_top_k` by its reference, against sorting row by row in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from effasr_kernels import projected_top_k
from tests.support.tolerance import assert_no_worse


def brute_force(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of each row in Python: by falling logit, then by rising class."""
    log_probs, indices = [], []
    for row in logits.tolist():
        order = sorted(range(len(row)), key=lambda v: (-row[v], v))[:k]
        exact = torch.tensor(row, dtype=torch.float64)
        indices.append(order)
        log_probs.append((exact - exact.logsumexp(0))[order])
    return torch.stack(log_probs), torch.tensor(indices)


@settings(max_examples=40)
@given(
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 16),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_is_the_formula(
    rows: int, width: int, count: int, k: int, with_bias: bool, fewer: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    classes = max(1, count - 3) if fewer else count
    k = min(k, classes)
    # Of few values, so that many logits are equal, in float64 to the bit.
    hidden = torch.randint(-2, 3, (rows, width)).double()
    weight = torch.randint(-1, 2, (count, width)).double()
    bias = torch.randint(-1, 2, (count,)).double() if with_bias else None
    log_probs, indices = projected_top_k(
        hidden, weight, bias=bias, k=k, classes=classes if fewer else None
    )
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    expected, order = brute_force(logits[:, :classes], k)
    assert torch.equal(indices, order)
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_wide(dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(7, 64).to(dtype), torch.randn(300, 64).to(dtype)
    log_probs, indices = projected_top_k(hidden, weight, k=4)
    exact = hidden.double() @ weight.double().t()
    expected, order = brute_force(exact, 4)
    assert log_probs.dtype == torch.float32
    assert torch.equal(indices, order)
    baseline = (hidden.float() @ weight.float().t()).log_softmax(-1).gather(-1, order)
    assert_no_worse(log_probs, expected, baseline)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("k", [1, 5])
def test_a_row_depends_on_itself_alone_to_the_bit(k: int) -> None:
    """Also of other numbers of rows, for which the product would take other routines."""
    hidden, weight, bias = torch.randn(37, 96), torch.randn(500, 96), torch.randn(500)
    expected = projected_top_k(hidden, weight, bias=bias, k=k)
    for chosen in ([0], [3, 36], list(range(7)), list(range(16)), list(range(37))[::-1]):
        found = projected_top_k(hidden[chosen], weight, bias=bias, k=k)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y[chosen])
