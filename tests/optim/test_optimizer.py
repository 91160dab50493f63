"""Optimizers, their groups of parameters, and the learning rate of each update."""

import copy
import importlib.util
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.optim.adamw import adamw

from effasr.nn.predictor import LSTM
from effasr.optim.adamw import (
    OptimizerConfig,
    apex_unsupported_reason,
    apply_update,
    build_adamw,
    build_lamb,
    clear_gradients,
    initialize_state,
    parameter_groups,
    restore,
    set_learning_rate,
)
from effasr.optim.loss_scale import LossScale
from effasr.optim.muon import Muon, Share, muon_groups
from effasr.optim.schedules import (
    ScheduleConfig,
    learning_rate_ratio,
    peak_learning_rate,
    scaled,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def parameter_and_optimizer(name="adamw", **settings):
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    groups = [{"params": [parameter], "weight_decay": 0.1}]
    build = build_lamb if name == "lamb" else build_adamw
    return parameter, build(groups, OptimizerConfig(name=name, lr=0.1, **settings), CPU)


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


def test_one_pass_is_chosen_where_a_kernel_serves_it():
    def of_gpu(parameter: torch.Tensor) -> str:
        groups = [{"params": [parameter], "weight_decay": 0.1}]
        return type(build_adamw(groups, OptimizerConfig(), CUDA)).__name__

    launch = pytest.importorskip("effasr_kernels.runtime.launch")
    assert of_gpu(torch.zeros(1)) == "AdamW"
    with launch.recording():
        assert of_gpu(torch.zeros(1)) == "FusedAdamW"
        assert of_gpu(torch.zeros(1, dtype=torch.float64)) == "AdamW"
        assert type(parameter_and_optimizer()[1]).__name__ == "AdamW"


@pytest.mark.parametrize("kind", ["fused", "one pass", "plain", "capturable", "lamb"])
def test_a_step_that_is_not_finite_changes_nothing(kind):
    def train(finite: list[bool]) -> torch.Tensor:
        if kind == "lamb":
            parameter, optimizer = parameter_and_optimizer("lamb")
        elif kind == "capturable":
            parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
            optimizer = LikeApex([parameter], capturable=True)
        elif kind == "one pass":
            parameter, optimizer = parameter_and_optimizer(implementation="fused")
        else:
            parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
            optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=kind == "fused")
        for good in finite:
            parameter.grad = torch.full((2,), 0.3 if good else torch.nan)
            apply_update(optimizer, torch.tensor(good))
        return parameter.detach()

    assert torch.equal(train([False, True, False, True]), train([True, True]))
    assert not torch.equal(train([True, True]), train([True]))


def test_apex_is_told_apart_from_its_namesake(monkeypatch, tmp_path):
    assert "needs a GPU" in str(apex_unsupported_reason(CPU))
    assert "apex is not installed (APEX_CPP_EXT=1 " in str(apex_unsupported_reason(CUDA))
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


@pytest.mark.parametrize(
    ("build", "file", "settings"),
    [
        (build_adamw, "fused_adam", {"adam_w_mode": True, "capturable": True}),
        # Its own trust ratio leaves out what does not decay.
        (build_lamb, "fused_lamb", {"bias_correction": False, "max_grad_norm": float("inf")}),
    ],
)
def test_apex_is_used_where_it_is_there(monkeypatch, tmp_path, build, file, settings):
    folder = tmp_path / "apex" / "optimizers"
    folder.mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    (folder / f"{file}.py").touch()
    (folder / "__init__.py").write_text(
        "class FusedAdam:\n"
        "    def __init__(self, groups, **settings):\n"
        "        self.param_groups, self.settings = groups, settings\n"
        "class FusedLAMB(FusedAdam):\n"
        "    pass\n"
    )
    (tmp_path / "amp_C.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    name = file.removeprefix("fused_").replace("adam", "adamw")
    groups = [{"params": [], "weight_decay": 0.1}]
    config = OptimizerConfig(name=name, lr=0.5, implementation="apex")
    optimizer = build(groups, config, CUDA)
    if name == "adamw":
        monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **settings: "torch's")
        assert build(groups, OptimizerConfig(lr=0.5), CUDA) == "torch's"
    assert type(optimizer).__name__.lower() == file.replace("_", "")
    assert optimizer.settings == {"lr": 0.5, "betas": (0.9, 0.98), "eps": 1e-8} | settings
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        # Not by monkeypatch, which would put it back.
        del sys.modules[name]


class LikeApex(torch.optim.Optimizer):
    """AdamW as apex has it: ``zero_grad`` takes no argument, and a group counts its updates.

    A capturable one has its rate and count on the device, and asks a scaler there for infinities.
    """

    def __init__(self, groups, capturable=False):
        defaults = {"lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
        super().__init__(groups, defaults)
        self.capturable = capturable
        if capturable:
            self._step_supports_amp_scaling = True
            self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)
            for group in self.param_groups:
                group["lr"] = torch.tensor(group["lr"])

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self, *, grad_scaler=None):
        for group in self.param_groups:
            if self.capturable:
                assert isinstance(group["lr"], torch.Tensor)
                self._count_on_device(group)
            else:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in () if state else ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter)
                if self.capturable:
                    is_infinite = grad_scaler._check_inf_per_device(self)[parameter.device]
                    assert grad_scaler._get_scale_async().double().reciprocal().tolist() == [1]
                    self._dummy_overflow_buf.copy_(is_infinite)
                    if is_infinite:
                        continue
                adamw(
                    [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                    [torch.tensor(float(group["step"]) - 1)], foreach=False, amsgrad=False,
                    beta1=0.9, beta2=0.98, lr=group["lr"], weight_decay=group["weight_decay"],
                    eps=1e-8, maximize=False,
                )  # fmt: skip

    def _count_on_device(self, group):
        """Counts a skipped update at once, and corrects it at the next one."""
        if "step" in group:
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
        else:
            group["step"] = torch.tensor([1], dtype=torch.int)


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


def test_apex_decides_on_the_device():
    """A condition of the host would wait for it: a tensor without values has none."""

    class Recorder(torch.optim.SGD):
        capturable = True

        def step(self, *, grad_scaler):
            (self.infinite,) = grad_scaler._check_inf_per_device(self).values()

    optimizer = Recorder([torch.nn.Parameter(torch.zeros(1, device="meta"))], lr=0.1)
    apply_update(optimizer, torch.ones((), dtype=torch.bool, device="meta"))
    assert optimizer.infinite.is_meta


@pytest.mark.parametrize("to_apex", [True, False])
@pytest.mark.parametrize("initialized", [True, False])
@pytest.mark.parametrize("capturable", [True, False])
def test_a_run_moves_between_torch_and_apex(to_apex, initialized, capturable):
    """Bias correction depends on the number of updates, which each keeps elsewhere."""

    def start(apex: bool) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter, optimizer = parameter_and_optimizer()
        return parameter, LikeApex(optimizer.param_groups, capturable) if apex else optimizer

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_adamw([], OptimizerConfig(implementation="apex"), CPU), "apex needs a GPU"),
        (lambda: OptimizerConfig(lr=0.0), "`lr` must be positive, but is 0"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), "`betas` must lie in"),
        (lambda: OptimizerConfig(name="lamb", implementation="fused"),
         "`implementation` must be one of auto, torch, apex with name lamb, but is fused"),
        (lambda: OptimizerConfig(name="muon", implementation="apex"),
         "`implementation` must be one of auto, torch with name muon, but is apex"),
        (lambda: OptimizerConfig(momentum=1.0), r"`momentum` must lie in \[0, 1\), but is 1"),
        (lambda: muon_groups(nn.Linear(2, 2), []), "`optimizer.name` must not be muon here: no li"),
        (lambda: ScheduleConfig(decay_fraction=1.5), "`decay_fraction` must lie between 0 and 1"),
        (lambda: OptimizerConfig(name="lamb", weight_decay=0.0),
         "`weight_decay` must be positive with name lamb"),
        (lambda: parameter_and_optimizer("lamb", implementation="apex"),
         "`implementation` must not be 'apex' here"),
        (lambda: OptimizerConfig(lr_scaling="linear"),
         "`lr_reference_micro_batches` must be given for lr_scal"),
        (lambda: OptimizerConfig(lr_reference_micro_batches=0),
         "`lr_reference_micro_batches` must be at least 1"),
        (lambda: ScheduleConfig(warmup_steps=-1), "`warmup_steps` must be at least 0, but is -1"),
        (lambda: ScheduleConfig(min_ratio=2.0), "`min_ratio` must lie between 0 and 1"),
    ],
)  # fmt: skip
def test_error_messages(monkeypatch, make, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_restored_optimizer_goes_on_with_its_moments_and_the_new_settings(name):
    """As one whose settings were changed on the way, not with those of the time of saving."""

    def update(parameter, optimizer):
        parameter.grad = torch.tensor([0.5, 3.0])
        apply_update(optimizer, torch.tensor(True))

    changed, first = parameter_and_optimizer(name)
    update(changed, first)
    resumed, second = parameter_and_optimizer(name, betas=(0.5, 0.6))
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


def lamb_by_hand(start: list[float], decay: float, updates: int) -> torch.Tensor:
    """Algorithm 2 of the paper, without bounds and without correction of the bias."""
    x = torch.tensor(start, dtype=torch.float64)
    first = second = torch.zeros(2, dtype=torch.float64)
    for made in range(1, updates + 1):
        gradient = torch.tensor([0.5, 3.0 * made], dtype=torch.float64)
        first = 0.9 * first + 0.1 * gradient
        second = 0.98 * second + 0.02 * gradient**2
        step = first / (second.sqrt() + 1e-6) + decay * x
        x = x - 0.1 * step * (x.norm() / step.norm() if decay else 1.0)
    return x


def test_an_update_of_lamb_is_that_of_the_published_formula():
    # Long, so that a bound on the norm of weights would show.
    starts, decays = ([30.0, -40.0], [1.0, 2.0]), (0.1, 0.0)
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    groups = [
        {"params": [x], "weight_decay": decay} for x, decay in zip(parameters, decays, strict=True)
    ]
    optimizer = build_lamb(groups, OptimizerConfig(name="lamb", lr=0.1, eps=1e-6), CPU)
    for made in (1, 2, 3):
        for parameter in parameters:
            parameter.grad = torch.tensor([0.5, 3.0 * made])
        apply_update(optimizer, torch.tensor(True))
    for parameter, start, decay in zip(parameters, starts, decays, strict=True):
        expected = lamb_by_hand(start, decay, 3)
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-5)
    # As long as the weights, where they decay.
    assert (parameters[0] - torch.tensor(starts[0])).norm() > 10


def layers() -> nn.Module:
    torch.manual_seed(0)
    stack = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)) for _ in range(3))
    return nn.ModuleDict({"layers": stack, "table": nn.Embedding(5, 8), "head": nn.Linear(8, 5)})


def muon(model: nn.Module, share: Share | None = None) -> Muon:
    groups = muon_groups(model, parameter_groups(model, 0.1, ("biases",)))
    return Muon(groups, momentum=0.9, share=share, dtype=torch.bfloat16, lr=0.02, eps=1e-8)


def train_muon(model: nn.Module, optimizer, finite=(True, True, True)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for good in finite:
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator) if good else torch.nan
            parameter.grad = torch.zeros_like(parameter) + gradient
        apply_update(optimizer, torch.tensor(good))
    return [p.detach() for p in model.parameters()]


def test_muon_is_that_of_torch_beside_adamw():
    model, other = layers(), layers()
    result = train_muon(model, muon(model))
    matrices = [p for p in other["layers"].parameters() if p.ndim == 2]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    peer = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **settings)
    groups = parameter_groups(other, 0.1, ("biases",))
    for group in groups:
        group["params"] = [p for p in group["params"] if all(p is not x for x in matrices)]
    adamw = torch.optim.AdamW(groups, lr=0.02)

    class Both:
        def step(self):
            peer.step()
            adamw.step()

    for x, y in zip(result, train_muon(other, Both()), strict=True):
        # Products of several matrices at once may round bfloat16 otherwise.
        torch.testing.assert_close(x, y, rtol=0, atol=2e-4)
    assert [len(group["params"]) for group in muon(model).param_groups] == [6, 2, 7]


def test_muon_skips_an_update_on_the_device():
    results = []
    for finite in ((True, False, True), (True, True)):
        model = layers()
        results.append(train_muon(model, muon(model), finite))
    assert all(map(torch.equal, *results))


def test_ranks_share_the_matrices_of_muon():
    """Each orthogonalizes some, and gets those of the others: here from threads."""
    expected_model = layers()
    expected = train_muon(expected_model, muon(expected_model))
    barrier, sent = threading.Barrier(4), {}

    def rank(number: int) -> list[torch.Tensor]:
        def gather(elements: torch.Tensor) -> torch.Tensor:
            sent[number] = elements
            barrier.wait()
            result = torch.cat([sent[n] for n in range(4)])
            barrier.wait()
            return result

        model = models[number]
        return train_muon(model, muon(model, Share(number, 4, gather)))

    models = [layers() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for weights in pool.map(rank, range(4)):
            for x, y in zip(weights, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=2e-4)
    # Two of six matrices of one size at most.
    assert {len(elements) for elements in sent.values()} == {2 * 8 * 24}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.position_bias = nn.Parameter(torch.zeros(2, 2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)


def names(model: nn.Module, group: dict) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for parameter in group["params"]]


def test_the_biases_of_an_lstm_are_biases():
    model = LSTM(4, 2)
    _, spared = parameter_groups(model, 0.1, ("biases",))
    assert names(model, spared) == [f"bias_{x}_l{n}" for n in range(2) for x in ("ih", "hh")]


def test_norms_and_biases_are_spared_and_every_parameter_is_listed_once():
    model = Tied()
    decayed, spared = parameter_groups(model, 0.1, ("biases", "norms"))
    assert names(model, decayed) == ["embedding.weight", "linear.weight"]
    assert names(model, spared) == ["position_bias", "norm.weight", "norm.bias", "linear.bias"]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


def test_embeddings_can_be_spared_and_nothing_need_be():
    model = Tied()
    decayed, _ = parameter_groups(model, 0.1, ("biases", "norms", "embeddings"))
    assert names(model, decayed) == ["linear.weight"]
    (everything,) = parameter_groups(model, 0.1, ())
    assert len(everything["params"]) == 6


def test_the_scale_of_the_loss_is_that_of_torch():
    scale, peer = LossScale(CPU, interval=3), torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for number, good in enumerate([True, False, True, True, True, True, False, True]):
        factor = torch.ones(2) if good else torch.full((2,), torch.inf)
        peer.scale((parameter * factor).sum()).backward()
        peer.step(optimizer)
        parameter.grad = factor * scale.scale
        scale.unscale([parameter])
        assert torch.equal(parameter.grad, factor)
        scale.update(torch.tensor(good))
        peer.update()
        assert float(scale.scale) == peer.get_scale()
        parameter.grad = None
        if number == 3:
            state, scale = scale.state_dict(), LossScale(CPU, interval=3)
            scale.load_state_dict(state)
    assert float(scale.scale) == 2.0**15


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "constant", "warmup_steps": 2}, {0: 0.5, 1: 1, 50: 1, 500: 1}),
        (
            {"name": "noam", "warmup_steps": 25, "width": 16},
            {0: 0.002, 24: 0.05, 99: 0.025, 399: 0.0125},
        ),
        (
            {"name": "inverse_sqrt", "warmup_steps": 4, "min_ratio": 0.25},
            {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 15: 0.5, 10_000: 0.25},
        ),
        ({"name": "cosine", "warmup_steps": 0, "steps": 10}, {9: 0, 50: 0, 4: 0.5}),
        (
            {"name": "cosine", "warmup_steps": 10, "min_ratio": 0.1},
            {0: 0.1, 9: 1, 39: 0.775, 54: 0.55, 69: 0.325, 99: 0.1, 150: 0.1},
        ),
        (
            {"name": "flat_cosine", "warmup_steps": 2, "flat_fraction": 0.3, "min_ratio": 0.02},
            {0: 0.5, 64: 0.51, 99: 0.02} | dict.fromkeys(range(1, 30), 1),
        ),
        (
            {"name": "wsd", "warmup_steps": 2, "decay_fraction": 0.25, "min_ratio": 0.2},
            {0: 0.5, 150: 0.2} | dict.fromkeys(range(1, 75), 1)
            | {n: 1 - 0.8 * (n - 74) / 25 for n in range(75, 100)},
        ),
    ],
)  # fmt: skip
def test_a_schedule_is_its_closed_form(settings, expected):
    schedule = ScheduleConfig(**settings)
    for step, ratio in expected.items():
        assert learning_rate_ratio(schedule, step, 100) == pytest.approx(ratio)


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "flat_cosine", "wsd"])
def test_degenerate_lengths_stay_in_range(name):
    for warmup, steps in ((0, 1), (5, 5), (10, 3), (0, 2)):
        config = ScheduleConfig(name=name, warmup_steps=warmup)
        assert all(0 <= learning_rate_ratio(config, step, steps) <= 1 for step in range(steps))


@pytest.mark.parametrize(
    ("rule", "micro_batches", "expected"),
    [
        ("none", 32, 1e-3),
        ("none", 64, 1e-3),
        ("linear", 32, 4e-3),
        ("sqrt", 32, 2e-3),
        ("sqrt", 2, 5e-4),
        ("sde", 32, 2e-3),
    ],
)
def test_the_peak_follows_the_rule(rule, micro_batches, expected):
    config = OptimizerConfig(lr=1e-3, lr_scaling=rule, lr_reference_micro_batches=8)
    assert peak_learning_rate(config, micro_batches) == pytest.approx(expected)


def test_moments_of_a_larger_batch_decay_faster_by_the_rule_for_adam():
    config = OptimizerConfig(lr=1e-3, lr_scaling="sde", lr_reference_micro_batches=8)
    settings = scaled(config, 32)
    assert settings.betas == pytest.approx((0.6, 0.92))
    assert settings.eps == pytest.approx(5e-9)
    with pytest.raises(ValueError, match=r"be at most 10 times the reference.* but is 11 times it"):
        scaled(config, 88)
    # Noise that is added up over k steps, or averaged over a batch k times as large: the second
    # moment of a gradient that is all noise is k times smaller, and an update as large.
    noise = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    moves = []
    for batch in (1, 4):
        parameter = torch.nn.Parameter(torch.zeros(64))
        rule = scaled(config, 8 * batch)
        optimizer = build_adamw([{"params": [parameter], "weight_decay": 0.0}], rule, CPU)
        for gradient in noise.view(-1, batch, 64).mean(1):
            parameter.grad = gradient
            optimizer.step()
        moves.append(parameter.detach().square().mean().item())
    assert moves[0] == pytest.approx(moves[1], rel=0.1)
