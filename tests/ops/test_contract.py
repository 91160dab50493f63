"""Every differentiable operation keeps the contract of packed sequences, by its default backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from effasr_kernels import OPERATIONS
from effasr_kernels.runtime.torch_op import DifferentiableOp
from tests.support.conformance import CHECKS, Case, Variation, check_compiler, evaluate
from tests.support.operation_cases import FACTORIES, OPTIONS
from tests.support.tolerance import AWKWARD_LENGTHS

CASES = [
    pytest.param(name, options, id=f"{name}-{', '.join(f'{k}={v}' for k, v in options.items())}")
    for name, rows in OPTIONS.items()
    for options in rows
]


def _case(name: str, lengths: tuple[int, ...], options: dict[str, Any]) -> Case:
    if options.get("lengths_k") == "reversed":
        options = options | {"lengths_k": lengths[::-1]}
    return FACTORIES[name](lengths, **options)(None)


def test_the_table_has_every_operation() -> None:
    assert {x for x, op in OPERATIONS.items() if isinstance(op, DifferentiableOp)} == set(OPTIONS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("lengths", AWKWARD_LENGTHS.values(), ids=AWKWARD_LENGTHS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_contract(
    name: str, options: dict[str, Any], lengths: tuple[int, ...], check: Callable[[Case], None]
) -> None:
    check(_case(name, lengths, options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.extended] * (n % 3 > 0))
        for n, case in enumerate(CASES)
    ],
)
def test_compiles(name: str, options: dict[str, Any]) -> None:
    check_compiler(_case(name, (5, 0, 2), options))


@pytest.mark.parametrize(
    ("name", "result"),
    [
        *(("ctc_loss", 0), ("linear_cross_entropy", 0), ("transducer_loss", 0)),
        ("guided_attention", 1),
    ],
)
def test_losses_of_narrow_inputs_are_float32(name: str, result: int) -> None:
    outcome = evaluate(_case(name, (5, 0, 2), {}), Variation(dtype=torch.bfloat16))
    assert outcome.rows[f"result {result}"][0].dtype == torch.float32


EMPTY_CASES: dict[str, list[dict[str, Any]]] = {
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
    ("name", "options"), [(name, x) for name, rows in EMPTY_CASES.items() for x in rows], ids=str
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
