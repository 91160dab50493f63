"""The census of a training step, and the gate on steps that grow."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import step_census
import torch
from census import operators
from census.recorder import Recorder
from census.report import COMPARED, growth, roofline_ms
from torch import nn

from tests.support import preloaded

BASELINE = json.loads(step_census.BASELINE.read_text())
aten = torch.ops.aten


def _moved(func, *args) -> int:
    return operators.bytes_moved(func, args, {}, func(*args), "cpu")


def test_an_operator_moves_what_it_reads_and_writes() -> None:
    x, row = torch.ones(6, 4), torch.ones(4)
    assert _moved(aten.add.Tensor, x, x.clone()) == 3 * 96
    assert _moved(aten.add.Tensor, x, x) == 2 * 96
    assert _moved(aten.add.Tensor, x, row) == 2 * 96 + 16
    assert _moved(aten.add.Tensor, x, row.expand(6, 4)) == 2 * 96 + 16
    # One that changes its argument reads and writes it, if it needs the values.
    assert _moved(aten.add_.Tensor, x, row) == 2 * 96 + 16
    assert _moved(aten.zero_.default, x) == 96
    assert _moved(aten.copy_.default, x, row) == 96 + 16
    assert _moved(aten.embedding.default, x, torch.tensor([0, 5])) == 16 + 2 * 32
    assert _moved(aten._to_copy.default, x) == 2 * 96


def test_a_fused_optimizer_stores_gradients_only_where_it_scales_them() -> None:
    weights, gradients, mean, variance = ([torch.ones(6, 4)] for _ in range(4))
    func, step = aten._fused_adamw_.default, torch.tensor(1.0)
    args = [weights, gradients, mean, variance, [], [step]]
    assert operators.bytes_moved(func, args, {}, None, "cpu") == (4 + 3) * 96 + 4
    scaled = {"grad_scale": torch.tensor(2.0)}
    assert operators.bytes_moved(func, args, scaled, None, "cpu") == (4 + 4) * 96 + 4 + 4


def test_a_call_takes_the_larger_time_of_its_bytes_and_its_products() -> None:
    recorder, x = Recorder(nn.Module(), "cpu", 7), torch.ones(2, 2)
    ms_of_products, ms_of_bytes = 67_000_000_000, 4_800_000_000
    with recorder.recording():
        for products, kernels in ((3, 1), (1, 2)):
            with recorder.within_operation("attention"):
                recorder.add("attention", "attention", [x], 0, 0, products * ms_of_products)
                for _ in range(kernels):
                    x.add(x)
        # Outside of operations each is a call.
        x.add(x)
        x.add(x)
    entries = [replace(e, bytes=2 * ms_of_bytes if e.launches else 0) for e in recorder.entries]
    assert len(entries) == 7
    assert roofline_ms(entries) == max(3, 2) + max(1, 2 * 2) + 2 + 2


def test_copies_from_and_to_the_host_wait() -> None:
    x, other = torch.ones(3), torch.ones(3, device="meta")
    calls = [
        (aten.copy_.default, (other, x), {}, True),
        (aten.copy_.default, (other, x, True), {}, False),
        (aten.copy_.default, (x, x.clone()), {}, False),
        (aten._to_copy.default, (x,), {"device": "meta"}, True),
        (aten._to_copy.default, (x,), {"device": "meta", "non_blocking": True}, False),
        (aten._to_copy.default, (x,), {"dtype": torch.float64}, False),
        (aten._local_scalar_dense.default, (other,), {}, True),
        (aten.scalar_tensor.default, (1,), {"device": "meta"}, True),
        (aten.scalar_tensor.default, (1,), {}, False),
        (aten.add.Tensor, (x, x), {}, False),
    ]
    for func, args, kwargs, expected in calls:
        assert operators.waits(func, args, kwargs) == expected
    (line,) = growth(
        BASELINE["canary_180m_flash"], BASELINE["canary_180m_flash"] | {"waits": ["a"]}, 0
    )
    assert "the host waits for the GPU: a" in line


def test_views_launch_nothing() -> None:
    x = torch.ones(6, 4)
    for func in (aten.t.default, aten.empty_like.default, aten.detach.default):
        assert operators.launches(func, [x]) == 0
    assert operators.launches(aten.add.Tensor, [x, x]) == 1


@pytest.mark.parametrize(
    ("elements", "lists", "expected"),
    [
        ([1], 1, 1),
        ([1] * 770, 1, 1),
        ([1] * 771, 1, 2),
        ([1] * 336, 3, 1),
        ([1] * 337, 3, 2),
        ([2_240 * 65_536], 1, 1),
        ([2_240 * 65_536 + 1], 1, 2),
        ([0, 0], 1, 0),
    ],
)
def test_a_list_of_tensors_is_divided_as_pytorch_does(
    elements: list[int], lists: int, expected: int
) -> None:
    assert operators.multi_tensor_launches(elements, lists) == expected


@pytest.mark.parametrize("figure", COMPARED)
def test_growth_beyond_the_limit_is_found(figure: str) -> None:
    before = BASELINE["canary_180m_flash"]
    grown = deepcopy(before)
    grown[figure] = before[figure] * 1.06
    (line,) = growth(before, grown, 0.05)
    assert figure in line
    assert "+6.0 %" in line
    grown[figure] = before[figure] * 1.04
    assert growth(before, grown, 0.05) == []
    (line,) = growth(before, before | {"programs_per_live_of": {"attention": 1.31}}, 0.05)
    assert "programs_per_live of attention must be at most 1.3, but is 1.31" in line


@pytest.mark.parametrize("model", BASELINE)
@pytest.mark.representative(model="canary_180m_flash")
def test_a_step_has_not_grown(model: str) -> None:
    # In a process of its own, as the device of the census is registered for good.
    arguments = ("--check", "--model", model)
    done = preloaded.finished(step_census.__file__, *arguments, limit_s=600)
    assert done.returncode == 0, done.stderr
