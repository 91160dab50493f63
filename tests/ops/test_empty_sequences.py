"""A static shape has hundreds of empty sequences, for which the references compute nothing."""

from typing import Any

import pytest
import torch

from tests.support.conformance import Variation, evaluate
from tests.support.operation_cases import FACTORIES

CASES: dict[str, list[dict[str, Any]]] = {
    "attention": [
        *({}, {"causal": True}, {"dropout": 0.1, "seed": 1}, {"lengths_k": (2, 0, 3)}),
        *({"position": "rotary"}, {"position": "relative"}),
    ],
    "best_alignment_loss": [{"tokens": (3, 1, 4)}],
    "ctc_loss": [{}],
    "depthwise_conv": [{}],
    "guided_attention": [{}],
}


@pytest.mark.parametrize(
    ("name", "options"), [(name, x) for name, rows in CASES.items() for x in rows], ids=str
)
def test_a_step_has_as_many_operations_with_empty_sequences(
    name: str, options: dict[str, Any]
) -> None:
    """In PyTorch's own operations, forward and backward; and the same values."""
    case = FACTORIES[name]((7, 4, 9), **options)("reference")
    counts, outcomes = [], []
    for extra in (1, 1, 200):
        profiler: Any = torch.autograd.profiler.profile()
        with profiler as profile:
            outcomes.append(evaluate(case, Variation(extra=extra, dtype=torch.float32)))
        events = profile.function_events
        counts.append(sum(event.name.startswith("aten::") for event in events))
    assert counts[1] > 10
    assert counts[2] == counts[1]
    torch.testing.assert_close(outcomes[2].shared, outcomes[1].shared)
    torch.testing.assert_close(outcomes[2].rows, outcomes[1].rows)
