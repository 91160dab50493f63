"""A static shape has hundreds of empty sequences, for which the references compute nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import (
    PackedLayout,
    RelativeBias,
    Rotary,
    attention,
    ctc_loss,
    depthwise_conv,
    guided_attention,
)

FRAMES, TOKENS = (7, 4, 9), (2, 0, 3)
Layouts = tuple[PackedLayout, PackedLayout]
Call = Callable[[Layouts], Tensor]


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def _attention(kind: str) -> Call:
    frames, tokens = _leaf(20, 3, 2, 4), _leaf(5, 2, 4)
    position = {
        "relative": RelativeBias(_leaf(2, 4), _leaf(2, 4), _leaf(17, 2, 4)),
        "rotary": Rotary(),
    }.get(kind)

    def call(layouts: Layouts) -> Tensor:
        q, k, v = frames.unbind(1)
        options = {"backend": "reference", "dropout": 0.1 if kind == "dropout" else 0.0}
        if kind == "guided":
            y, penalty = guided_attention(tokens, k, v, *layouts[::-1], sigma=0.3, **options)
            return y.sum() + penalty.sum()
        if kind == "cross":
            return attention(tokens, k, v, *layouts[::-1], **options).sum()
        causal = kind == "causal"
        return attention(q, k, v, layouts[0], causal=causal, position=position, **options).sum()

    return call


def _ctc() -> Call:
    x, weight, labels = _leaf(20, 6), _leaf(5, 6), torch.tensor([1, 2, 3, 1, 3])

    def call(layouts: Layouts) -> Tensor:
        return ctc_loss(x, weight, labels, *layouts, blank_id=0, backend="reference").sum()

    return call


def _convolution() -> Call:
    x, weight = _leaf(20, 6), _leaf(6, 3)
    return lambda layouts: depthwise_conv(x, weight, layouts[0], backend="reference").sum()


KINDS = ("plain", "causal", "dropout", "rotary", "relative", "cross", "guided")
CALLS = {f"attention, {kind}": lambda kind=kind: _attention(kind) for kind in KINDS}
CALLS |= {"ctc_loss": _ctc, "depthwise_conv": _convolution}


@pytest.mark.parametrize("name", CALLS)
def test_a_step_has_as_many_operations_with_empty_sequences(name: str) -> None:
    """In PyTorch's own operations, forward and backward; and the same value."""
    call = CALLS[name]()
    counts, values = [], []
    for slots in (3, 3, 200):
        frames = PackedLayout.from_lengths(FRAMES, num_sequences=slots)
        layouts = frames, PackedLayout.from_lengths(TOKENS, num_sequences=slots)
        torch.manual_seed(1)
        profiler: Any = torch.autograd.profiler.profile()
        with profiler as profile:
            total = call(layouts)
            total.backward()
        values.append(total.detach())
        events = profile.function_events
        counts.append(sum(event.name.startswith("aten::") for event in events))
    assert counts[1] > 10
    assert counts[2] == counts[1]
    torch.testing.assert_close(values[2], values[1])


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_nothing_but_empty_sequences_can_be_differentiated(name: str) -> None:
    """All its rows are tail."""
    call = CALLS[name]()
    frames = PackedLayout.from_lengths([0, 0], rows=sum(FRAMES))
    total = call((frames, PackedLayout.from_lengths([0, 0], rows=sum(TOKENS))))
    assert total == 0
    total.backward()
