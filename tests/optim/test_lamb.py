import copy
import importlib.util
import sys

import pytest
import torch

from effasr.optim.adamw import OptimizerConfig, apply_update, build_lamb, restore

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HAS_LIBRARY = importlib.util.find_spec("pytorch_optimizer") is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="pytorch_optimizer is not installed")

# Long, so that a bound on the norm of weights would show.
WEIGHTS, BIASES = [30.0, -40.0], [1.0, 2.0]
EPS = 1e-6


def make(**settings):
    weight, bias = (torch.nn.Parameter(torch.tensor(values)) for values in (WEIGHTS, BIASES))
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    config = OptimizerConfig(name="lamb", lr=0.1, eps=EPS, **settings)
    return [weight, bias], build_lamb(groups, config, CPU)


def update(parameters, optimizer, made: int, *, finite: bool = True):
    for parameter in parameters:
        gradient = torch.tensor([0.5, 3.0 * made])
        parameter.grad = gradient if finite else gradient * torch.nan
    apply_update(optimizer, torch.tensor(finite))


def by_hand(start: list[float], decay: float, updates: int) -> torch.Tensor:
    """Algorithm 2 of the paper, without bounds and without correction of the bias."""
    x = torch.tensor(start, dtype=torch.float64)
    first = second = torch.zeros(2, dtype=torch.float64)
    for made in range(1, updates + 1):
        gradient = torch.tensor([0.5, 3.0 * made], dtype=torch.float64)
        first = 0.9 * first + 0.1 * gradient
        second = 0.98 * second + 0.02 * gradient**2
        step = first / (second.sqrt() + EPS) + decay * x
        x = x - 0.1 * step * (x.norm() / step.norm() if decay else 1.0)
    return x


@needs_library
def test_an_update_is_that_of_the_published_formula():
    (weight, bias), optimizer = make()
    for made in (1, 2, 3):
        update((weight, bias), optimizer, made)
    torch.testing.assert_close(weight.double(), by_hand(WEIGHTS, 0.1, 3), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.double(), by_hand(BIASES, 0.0, 3), rtol=1e-5, atol=1e-5)
    # As long as the weights, where they decay.
    assert (weight - torch.tensor(WEIGHTS)).norm() > 10


@needs_library
def test_a_step_that_is_not_finite_changes_nothing():
    """Neither the weights nor the moments nor the number of updates."""
    weights = []
    for order in ([(1, True), (2, True)], [(1, False), (1, True), (5, False), (2, True)]):
        parameters, optimizer = make()
        for made, finite in order:
            update(parameters, optimizer, made, finite=finite)
        weights.append([parameter.detach() for parameter in parameters])
    assert all(torch.equal(x, y) for x, y in zip(*weights, strict=True))


@needs_library
def test_a_restored_optimizer_goes_on_with_its_moments_and_the_new_settings():
    changed, first = make()
    update(changed, first, 1)
    resumed, second = make(betas=(0.5, 0.6))
    with torch.no_grad():
        for new, old in zip(resumed, changed, strict=True):
            new.copy_(old)
    restore(second, copy.deepcopy(first.state_dict()))
    for group in first.param_groups:
        group["betas"] = (0.5, 0.6)
    update(changed, first, 2)
    update(resumed, second, 2)
    assert all(torch.equal(x, y) for x, y in zip(changed, resumed, strict=True))


def test_it_is_refused_where_no_library_has_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"`name` must not be 'lamb' here: .* apex needs a GPU.*effasr\[lamb\]"
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(ValueError, match="`implementation` must not be 'apex' here"):
        make(implementation="apex")


def test_without_weight_decay_it_would_be_another_optimizer():
    with pytest.raises(ValueError, match="`weight_decay` must be positive with name lamb"):
        OptimizerConfig(name="lamb", weight_decay=0.0)


def test_apex_computes_the_same_function_where_it_is_there(monkeypatch, tmp_path):
    folder = tmp_path / "apex" / "optimizers"
    folder.mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    (folder / "fused_lamb.py").touch()
    (folder / "__init__.py").write_text(
        "class FusedLAMB:\n"
        "    def __init__(self, groups, **settings):\n"
        "        self.param_groups, self.settings = groups, settings\n"
    )
    (tmp_path / "amp_C.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    config = OptimizerConfig(name="lamb", lr=0.5, eps=EPS)
    optimizer = build_lamb([{"params": [], "weight_decay": 0.1}], config, CUDA)
    # Its own trust ratio leaves out what does not decay.
    assert optimizer.settings == {
        "lr": 0.5, "betas": (0.9, 0.98), "eps": EPS, "bias_correction": False,
        "max_grad_norm": float("inf"),
    }  # fmt: skip
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        # Not by monkeypatch, which would put it back.
        del sys.modules[name]
