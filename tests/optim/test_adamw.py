import copy
import sys

import pytest
import torch
from torch.optim.adamw import adamw

from effasr.optim.adamw import (
    OptimizerConfig,
    apex_unsupported_reason,
    apply_update,
    build_adamw,
    clear_gradients,
    initialize_state,
    restore,
    set_learning_rate,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def parameter_and_optimizer(**settings):
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    return parameter, build_adamw(groups, OptimizerConfig(lr=0.1, **settings), CPU)


def test_an_update_is_that_of_the_published_formula():
    parameter, optimizer = parameter_and_optimizer()
    first, second, expected = 0.0, 0.0, torch.tensor([1.0, -2.0], dtype=torch.float64)
    for made in (1, 2, 3):
        gradient = torch.tensor([0.5, 3.0 * made], dtype=torch.float64)
        parameter.grad = gradient.float()
        apply_update(optimizer, torch.tensor(True))
        first = 0.9 * first + 0.1 * gradient
        second = 0.98 * second + 0.02 * gradient**2
        scaled = (first / (1 - 0.9**made)) / ((second / (1 - 0.98**made)).sqrt() + 1e-8)
        expected = expected * (1 - 0.1 * 0.1) - 0.1 * scaled
    torch.testing.assert_close(parameter.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_not_finite_changes_nothing(fused):
    """Neither the weights nor the moments nor the number of updates, on both ways."""

    def train(finite: list[bool]) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
        for good in finite:
            parameter.grad = torch.full((2,), 0.3 if good else torch.nan)
            apply_update(optimizer, torch.tensor(good))
        return parameter.detach()

    assert torch.equal(train([False, True, False, True]), train([True, True]))
    assert not torch.equal(train([True, True]), train([True]))


def test_apex_is_told_apart_from_its_namesake(monkeypatch, tmp_path):
    assert "needs a GPU" in str(apex_unsupported_reason(CPU))
    assert apex_unsupported_reason(CUDA) == "apex is not installed"
    package = tmp_path / "apex"
    package.mkdir()
    # Importing it would fail: it is recognised without being imported.
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "package of that name" in str(apex_unsupported_reason(CUDA))
    (package / "optimizers").mkdir()
    (package / "optimizers" / "fused_adam.py").touch()
    assert "without its CUDA extensions" in str(apex_unsupported_reason(CUDA))
    (tmp_path / "amp_C.py").touch()
    assert apex_unsupported_reason(CUDA) is None
    assert "apex" not in sys.modules


def test_apex_is_used_where_it_is_there(monkeypatch, tmp_path):
    folder = tmp_path / "apex" / "optimizers"
    folder.mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    (folder / "fused_adam.py").touch()
    (folder / "__init__.py").write_text(
        "class FusedAdam:\n"
        "    def __init__(self, groups, **settings):\n"
        "        self.param_groups, self.settings = groups, settings\n"
    )
    (tmp_path / "amp_C.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    optimizer = build_adamw([{"params": []}], OptimizerConfig(lr=0.5), CUDA)
    assert type(optimizer).__name__ == "FusedAdam"
    assert optimizer.settings == {
        "lr": 0.5, "betas": (0.9, 0.98), "eps": 1e-8, "adam_w_mode": True
    }  # fmt: skip
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        # Not by monkeypatch, which would put it back.
        del sys.modules[name]


class LikeApex(torch.optim.Optimizer):
    """AdamW as apex has it: ``zero_grad`` takes no argument, and a group counts its updates."""

    def __init__(self, groups):
        defaults = {"lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
        super().__init__(groups, defaults)

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in () if state else ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter)
                adamw(
                    [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                    [torch.tensor(group["step"] - 1.0)], foreach=False, amsgrad=False,
                    beta1=0.9, beta2=0.98, lr=group["lr"], weight_decay=group["weight_decay"],
                    eps=1e-8, maximize=False,
                )  # fmt: skip


def test_gradients_are_cleared_with_any_optimizer():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = LikeApex([parameter])
    parameter.grad = torch.ones(2)
    address = parameter.grad.data_ptr()
    clear_gradients(optimizer, keep_addresses=True)
    assert parameter.grad.data_ptr() == address
    assert parameter.grad.tolist() == [0, 0]
    clear_gradients(optimizer, keep_addresses=False)
    assert parameter.grad is None


@pytest.mark.parametrize("to_apex", [True, False])
@pytest.mark.parametrize("initialized", [True, False])
def test_a_run_moves_between_torch_and_apex(to_apex: bool, initialized: bool):
    """Bias correction depends on the number of updates, which each keeps elsewhere."""

    def start(apex: bool) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter, optimizer = parameter_and_optimizer()
        return parameter, LikeApex(optimizer.param_groups) if apex else optimizer

    def train(parameter, optimizer, steps: range):
        for step in steps:
            parameter.grad = torch.tensor([0.5, 3.0 * step])
            set_learning_rate(optimizer, 0.1)
            apply_update(optimizer, torch.tensor(True))

    expected, alone = start(False)
    train(expected, alone, range(5))
    first, before = start(not to_apex)
    train(first, before, range(3))
    second, after = start(to_apex)
    if initialized:
        initialize_state(after)
    with torch.no_grad():
        second.copy_(first)
    restore(after, copy.deepcopy(before.state_dict()))
    train(second, after, range(3, 5))
    torch.testing.assert_close(second, expected)


def test_apex_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="apex needs a GPU"):
        parameter_and_optimizer(implementation="apex")


def test_bad_values_are_refused_by_name():
    with pytest.raises(ValueError, match="`lr` must be positive, but is 0"):
        OptimizerConfig(lr=0.0)
    with pytest.raises(ValueError, match="`betas` must lie in"):
        OptimizerConfig(betas=(0.9, 1.0))


def test_a_restored_optimizer_goes_on_with_its_moments_and_the_new_settings():
    """As one whose settings were changed on the way, not with those of the time of saving."""

    def update(parameter, optimizer):
        parameter.grad = torch.tensor([0.5, 3.0])
        apply_update(optimizer, torch.tensor(True))

    changed, first = parameter_and_optimizer()
    update(changed, first)
    resumed, second = parameter_and_optimizer(betas=(0.5, 0.6))
    with torch.no_grad():
        resumed.copy_(changed)
    state = copy.deepcopy(first.state_dict())
    state["param_groups"][0]["weight_decay"] = 0.9
    restore(second, state)
    assert second.param_groups[0]["weight_decay"] == 0.1
    first.param_groups[0]["betas"] = (0.5, 0.6)
    update(changed, first)
    update(resumed, second)
    assert torch.equal(changed, resumed)
