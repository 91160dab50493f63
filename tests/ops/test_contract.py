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
