"""Every differentiable operation keeps the contract of packed sequences, by its default backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from effasr_kernels import OPERATIONS, Context
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.testing.conformance import CHECKS, Case, Variation, check_compiler, evaluate
from effasr_kernels.testing.tolerance import AWKWARD_LENGTHS
from tests.support.operation_cases import FACTORIES

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "attention": [
        *({"position": x} for x in ("none", "part", "relative")),
        *({"position": x, "causal": True} for x in ("none", "part", "relative")),
        *({"position": x, "lengths_k": "reversed"} for x in ("none", "part", "relative")),
        *({"position": x, "context": Context(2, 0, 3)} for x in ("none", "rotary", "relative")),
        *({"position": x, "context": Context(1, 2, 1)} for x in ("none", "rotary", "relative")),
    ],
    "batch_norm": [{}, {"silu": False}, {"fixed": True}],
    "bias_activation_dropout": [
        *({"activation": x} for x in ("silu", "relu", "gelu")),
        {"bias": False},
    ],
    "ctc_loss": [{"classes": 5, "width": 3, "blank_id": x} for x in (0, 4)],
    "depthwise_conv": [{}, {"taps": 4, "causal": True, "gated": True}, {"taps": 1}],
    "dropout_add_layer_norm": [
        {"mode": x} for x in ("pre-norm", "post-norm, bias", "addition", "norm")
    ],
    "gated_activation": [{"activation": x} for x in ("silu", "gelu", "gelu_tanh")],
    "grouped_linear": [{}, {"bias": False}],
    "guided_attention": [{"width": 3}],
    "linear_cross_entropy": [{"label_smoothing": 0.1, "z_loss": 0.01}],
    "rms_norm": [{"offset": 0}, {"offset": 1}],
    "strided_depthwise": [{}, {"relu": True}],
    "subsampling_stem": [{"per_slot": x, "differentiable": True} for x in (4, 8)],
    "transducer_loss": [
        {"classes": 5, "width": 3, **settings}
        for settings in (
            {"activation": "tanh"},
            {},
            {"fastemit": 0.1},
            {"durations": (0, 1, 2, 3, 4), "sigma": 0.05},
            {"durations": (1, 3), "fastemit": 0.1, "activation": "tanh"},
        )
    ],
}
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
