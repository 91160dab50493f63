"""Gives modules of transformers' language models forwards that are one operation each.

A module is recognized by what it is and what it computes, never by its family: a module with the
parts of an RMS norm or of a gated feed-forward network is called on random rows, and where the
result is that of the operation, its forward is replaced. The others keep their own.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.model.language_model.architecture import build_model
from effasr.nn.residual import is_fused
from effasr_kernels import gated_activation, rms_norm

_ROWS = 64
_SCALES = -3, 2
"""Powers of 10 between which the scales of probed rows lie: a small row shows the epsilon, a large
one a bound."""

_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Largest difference from a module's own result, as a share of the largest value of a row."""

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Those of `gated_activation`."""

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""Names of the epsilon of a norm."""

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of modules that an operation may replace."""

    name: str  # As shown to users, in the plural
    resembles: Callable[[nn.Module], bool]  # Whether a module has the parts of this kind
    fused: Callable[[nn.Module], Forward | None]


@dataclass(slots=True)
class FusedModules:
    """The modules of a model whose forward is an operation, and those that only resemble them."""

    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Such as ``9 of 9 RMS norms, 2 of 2 gated feed-forward networks``."""
        return ", ".join(f"{a} of {b} {name}" for name, (a, b) in self.counts.items())

    def suspend(self) -> None:
        for module, _ in self.forwards:
            del module.forward

    def resume(self) -> None:
        for module, forward in self.forwards:
            module.forward = forward


def fuse(model: nn.Module) -> FusedModules:
    """Replace the forwards of the modules that compute what an operation does.

    On a CPU, and wherever else the operation has no kernel, the module's own forward is called.
    """
    fused = FusedModules()
    for module in model.modules():
        for kind in KINDS:
            if not kind.resembles(module):
                continue
            forward = kind.fused(module)
            count, of = fused.counts.get(kind.name, (0, 0))
            fused.counts[kind.name] = count + (forward is not None), of + 1
            if forward is not None:
                fused.forwards.append((module, forward))
    fused.resume()
    return fused


@cache
def fused_modules(architecture: str) -> str:
    """How many modules of each kind are fused in a language model, as shown to users."""
    with torch.device("meta"):
        return str(fuse(build_model(architecture)))


def _resembles_norm(module: nn.Module) -> bool:
    """It has one vector of weights and an epsilon, and nothing else."""
    parameters = dict(module.named_parameters())
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].ndim == 1
        and not list(module.children())
        and _epsilon(module) is not None
    )


def _epsilon(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in _EPSILONS)
    return next((x for x in values if isinstance(x, float)), None)


def _fused_norm(module: nn.Module) -> Forward | None:
    weight, eps = module.weight, _epsilon(module)
    assert isinstance(weight, Tensor)
    assert eps is not None
    x, probe = _random(_ROWS, len(weight)), _copy(module)
    # Of the size of 1.
    drawn = F.normalize(_random(1, len(weight), seed=1)[0], dim=0) * len(weight) ** 0.5
    probe.weight = nn.Parameter(drawn, requires_grad=False)
    for offset in (0, 1):
        call: Any = partial(rms_norm, weight=probe.weight, eps=eps, offset=offset)
        # Where the result is rounded, and its dtype, show in rows that are not those of the weight.
        if all(_equal(probe, call, x.to(dtype)) for dtype in _TOLERANCES):
            return partial(_norm_forward, module, eps, offset)
    return None


def _norm_forward(module: Any, eps: float, offset: Any, hidden_states: Tensor) -> Tensor:
    if not is_fused(hidden_states):
        return type(module).forward(module, hidden_states)
    return rms_norm(hidden_states, module.weight, eps=eps, offset=offset)


_GATED = {"gate_proj", "up_proj", "down_proj"}
_JOINED = {"gate_up_proj", "down_proj"}


def _resembles_gated(module: nn.Module) -> bool:
    """It has projections to gates and values, an activation, and a projection back."""
    linear = {name for name, x in module.named_children() if isinstance(x, nn.Linear)}
    # Neither a gate that learns nor one that drops is an activation.
    owners = {name.partition(".")[0] for name, _ in module.named_parameters()}
    drops = any(isinstance(x, nn.Dropout) for x in module.children())
    return linear in (_GATED, _JOINED) and owners == linear and not drops


def _fused_gated(module: nn.Module) -> Forward | None:
    """Probe with projections that return given rows, whatever the size of the real ones."""
    joined = hasattr(module, "gate_up_proj")
    x, gates, values = (_random(_ROWS, 16, seed=seed) for seed in range(3))
    probe = _copy(module)
    if joined:
        # Transformers' order.
        outputs = {"gate_up_proj": torch.cat([gates, values], -1)}
    else:
        outputs = {"gate_proj": gates, "up_proj": values}
    for name, rows in outputs.items():
        setattr(probe, name, _Given(x, rows))
    probe.down_proj = nn.Identity()
    for activation in _ACTIVATIONS:
        call: Any = partial(gated_activation, activation=activation)
        if _equal(probe, lambda _, call=call: call(gates, values), x):
            run = _joined_forward if joined else _gated_forward
            return partial(run, module, activation)
    return None


def _gated_forward(module: Any, activation: Any, x: Tensor) -> Tensor:
    if not is_fused(x):
        return type(module).forward(module, x)
    gates, values = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(gated_activation(gates, values, activation=activation))


def _joined_forward(module: Any, activation: Any, hidden_states: Tensor) -> Tensor:
    if not is_fused(hidden_states):
        return type(module).forward(module, hidden_states)
    gates, values = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return module.down_proj(gated_activation(gates, values, activation=activation))


KINDS = (
    Kind("RMS norms", _resembles_norm, _fused_norm),
    Kind("gated feed-forward networks", _resembles_gated, _fused_gated),
)
"""What is recognized."""


class _Given(nn.Module):
    """Returns the stored rows for the input that it expects."""

    def __init__(self, expected: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.expected, self.rows = expected, rows

    def forward(self, x: Tensor) -> Tensor:
        if x.shape != self.expected.shape or not torch.equal(x, self.expected):
            raise ValueError("another input")
        return self.rows


def _copy(module: nn.Module) -> Any:
    probe = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(probe, name, dict(getattr(module, name)))
    return probe


def _random(rows: int, width: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    scales = torch.logspace(*_SCALES, rows, device="cpu")
    return torch.randn(rows, width, generator=generator, device="cpu") * scales[:, None]


@torch.no_grad()
def _equal(module: nn.Module, operation: Forward, x: Tensor) -> bool:
    try:
        actual = module(x)
    except Exception:  # Modules of any family fail in any way on rows that they do not expect.
        return False
    expected = operation(x)
    if not isinstance(actual, Tensor):
        return False
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    worst = (actual - expected).abs().amax(-1)
    return bool((worst <= _TOLERANCES[x.dtype] * expected.abs().amax(-1)).all())
