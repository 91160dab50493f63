"""Parameter groups with and without weight decay."""

import importlib
import importlib.util
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.checks import check
from effasr.optim.adascale import AdaScaleConfig
from effasr.optim.fused_adamw import FusedAdamW, kernel_unsupported_reason

Exempt = Literal["biases", "norms", "embeddings"]

_APEX = "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation 'effasr[apex]'"
"""Builds NVIDIA's apex, which is on no package index."""


def parameter_groups(
    model: nn.Module, weight_decay: float, exempt: Collection[Exempt]
) -> list[dict[str, Any]]:
    """Split parameters by weight decay, each listed once, in the order of the model."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            (spared if _kind(module, name) in exempt else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _kind(module: nn.Module, name: str) -> Exempt | None:
    if "Norm" in type(module).__name__:
        return "norms"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if name == "bias" or name.endswith("_bias") or name.startswith(("bias_ih", "bias_hh")):
        return "biases"
    return None


# AdamW, its settings and those of LAMB, and an update that the device can skip.


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, LAMB, or Muon.

    Attributes:
        name: ``adamw``, or ``lamb`` for large batches, which scales an update to the norm of the
            weights: see `build_lamb`. LAMB synchronizes with the device once a step. ``muon``
            orthogonalizes the momentum of the matrices in layers, with the learning rate and the
            weight decay of AdamW, and is AdamW for all other weights; with ddp each rank
            orthogonalizes its share, and fsdp2 is not supported.
        lr: Peak learning rate; the schedule multiplies it.
        lr_scaling: Rule for k times the reference batch: ``none`` keeps ``lr``; ``linear``
            multiplies it by k; ``sqrt`` by the square root of k; ``sde``, the rule for Adam, does
            so, and has betas of 1 - k (1 - beta) and eps / sqrt(k), for k up to 1 / (1 - beta).
        lr_reference_micro_batches: Micro-batches of a step, over all ranks, that ``lr`` and the
            schedule were chosen for.
        adascale: Scaling of learning rate and progress by the noise of the gradient; null for none.
            ``training.max_steps`` and the schedule then count reference steps, of which a step is
            worth one or more, so that the run ends after fewer steps.
        betas: Decay of the first and second moments.
        momentum: Decay of the momentum of ``muon``.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; with ``lamb`` it is
            part of the update before that is scaled.
        exempt: Kinds of parameters without weight decay: ``biases``, ``norms``, ``embeddings``.
        implementation: ``fused``: AdamW that clips, updates, averages and casts in one pass, not
            with fsdp2; on a CPU the same, step by step. ``torch``: AdamW of PyTorch, and LAMB in
            its operations. ``apex``: FusedAdam and FusedLAMB of NVIDIA's apex, CUDA only, and not
            with fsdp2. ``auto``: ``fused`` on a GPU where it can be used, else ``torch``; for LAMB
            apex where it can be used.
    """

    name: Literal["adamw", "lamb", "muon"] = "adamw"
    lr: float = 1e-3
    lr_scaling: Literal["none", "linear", "sqrt", "sde"] = "none"
    lr_reference_micro_batches: int | None = None
    adascale: AdaScaleConfig | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    momentum: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    exempt: tuple[Exempt, ...] = ("biases", "norms")
    implementation: Literal["auto", "fused", "torch", "apex"] = "auto"

    def __post_init__(self) -> None:
        check(self.lr > 0, "lr", "be positive", self.lr)
        self._check_scaling()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` must lie in [0, 1), but are {self.betas}.")
        check(0 <= self.momentum < 1, "momentum", "lie in [0, 1)", self.momentum)
        check(self.eps > 0, "eps", "be positive", self.eps)
        check(self.weight_decay >= 0, "weight_decay", "be at least 0", self.weight_decay)

        rule = "be positive with name lamb, which leaves alone the length of updates without it"
        remedy = "set it, or use adamw"
        check(self.name != "lamb" or self.weight_decay, "weight_decay", rule, "0", remedy)
        served = {"lamb": ("auto", "torch", "apex"), "muon": ("auto", "torch")}
        choices = served.get(self.name, (self.implementation,))
        rule = f"be one of {', '.join(choices)} with name {self.name}"
        is_possible, remedy = self.implementation in choices, "use auto, or adamw"
        check(is_possible, "implementation", rule, self.implementation, remedy)

    def _check_scaling(self) -> None:
        reference, rule = self.lr_reference_micro_batches, self.lr_scaling
        if reference is not None and reference < 1:
            raise ValueError(
                f"`lr_reference_micro_batches` must be at least 1 or null, but is {reference}."
            )
        if rule != "none" and reference is None:
            raise ValueError(
                f"`lr_reference_micro_batches` must be given for lr_scaling = {rule}, but is null: "
                "set it to the micro-batches of a step that `lr` was chosen for."
            )
        if self.adascale is None:
            return
        check(rule == "none", "lr_scaling", "be none with `adascale`, which scales by itself", rule)
        if self.adascale.scale is None and reference is None:
            raise ValueError(
                "`adascale.scale` must be given where lr_reference_micro_batches is not, but is "
                "null: set either."
            )


def build_adamw(
    groups: Sequence[dict[str, Any]], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    reason = apex_unsupported_reason(device, sharded=has_sharded(groups))
    if config.implementation == "apex":
        if reason is not None:
            raise ValueError(f"`implementation` must not be 'apex' here: {reason}. Use 'auto'.")
        optimizers = importlib.import_module("apex.optimizers")
        # Only a capturable optimizer can skip an update on the device.
        return optimizers.FusedAdam(list(groups), adam_w_mode=True, capturable=True, **settings)
    reason = fused_unsupported_reason(groups, device)
    if config.implementation == "fused" and reason is not None:
        raise ValueError(f"`implementation` must not be 'fused' here: {reason}. Use 'auto'.")
    is_chosen = config.implementation == "auto" and device.type != "cpu" and reason is None
    if config.implementation == "fused" or is_chosen:
        return FusedAdamW(groups, **settings)
    return torch.optim.AdamW(list(groups), fused=True, **settings)


def fused_unsupported_reason(groups: Sequence[dict[str, Any]], device: torch.device) -> str | None:
    """Return the reason why `FusedAdamW` cannot be used, or None; on a CPU it always can."""
    if has_sharded(groups):
        return "it does not support sharded parameters, as of training.strategy fsdp2"
    if device.type == "cpu":
        return None
    parameters = [p for group in groups for p in group["params"]]
    if not parameters or any(p.dtype != torch.float32 for p in parameters):
        return "it supports weights in float32 alone"
    return kernel_unsupported_reason(parameters[0])


def has_sharded(groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether each process has a shard of the parameters in a group."""
    # Takes half a second, for which the check of a recipe need not wait.
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for group in groups for p in group["params"])


def apex_unsupported_reason(
    device: torch.device, module: str = "fused_adam.py", *, sharded: bool = False
) -> str | None:
    """Return the reason why NVIDIA's apex cannot be used, or None; apex is not imported."""
    if sharded:
        return "apex does not support sharded parameters, as of training.strategy fsdp2"
    if device.type != "cuda":
        return f"apex needs a GPU, and the device is {device.type}"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return f"apex is not installed ({_APEX})"
    folders = spec.submodule_search_locations or []
    if not any((Path(folder) / "optimizers" / module).is_file() for folder in folders):
        return f"the installed `apex` is PyPI's package of that name, not NVIDIA's ({_APEX})"
    if importlib.util.find_spec("amp_C") is None:
        return f"NVIDIA's apex is installed without its CUDA extensions ({_APEX})"
    return None


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load moments and step counts of a saved ``state_dict``, but not its settings.

    PyTorch's ``load_state_dict`` alone would restore the learning rate, betas, epsilon and weight
    decay of the time of saving, whatever the configuration says now.
    """
    settings = [
        {name: value for name, value in group.items() if name not in ("params", "step")}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(_with_step(optimizer, state))
    if getattr(optimizer, "capturable", False):
        # Of the last update before, as of `initialize_state`: the next one would not be counted.
        optimizer._dummy_overflow_buf.zero_()  # type: ignore[attr-defined]
    for group, local in zip(optimizer.param_groups, settings, strict=True):
        group.update(local)


def _with_step(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a ``state_dict`` that has the number of updates where an optimizer reads it.

    PyTorch's optimizers keep it with the moments of each parameter and apex's in the group. A run
    may be continued on a machine with the other of the two.
    """
    is_adamw = isinstance(optimizer, torch.optim.AdamW)
    of_group = not is_adamw and not type(optimizer).__module__.startswith("torch.")
    rows = {index: dict(row) for index, row in state["state"].items()}
    groups = [dict(group) for group in state["param_groups"]]
    for group in groups:
        local = [rows[index] for index in group["params"] if index in rows]
        if of_group:
            counts = [row.pop("step") for row in local if "step" in row]
            if counts or "step" in group:
                count: int | Tensor = int(counts[0] if counts else group["step"])
                if getattr(optimizer, "capturable", False):
                    device = optimizer.param_groups[0]["lr"].device
                    count = torch.tensor([count], dtype=torch.int32, device=device)
                group["step"] = count
        elif "step" in group:
            step = torch.tensor(float(group.pop("step")))
            for row in local:
                row.setdefault("step", step.clone())
    return state | {"state": rows, "param_groups": groups}


def set_learning_rate(
    optimizer: torch.optim.Optimizer, lr: float, factor: Tensor | None = None
) -> None:
    rate: float | Tensor = lr
    if factor is not None:
        on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
        rate = lr * factor if on_device else lr * factor.item()
    for group in optimizer.param_groups:
        if getattr(optimizer, "capturable", False):
            # apex reads it on the device.
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def apply_update(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Make one update where ``finite`` (bool (), on the device of the parameters) is true.

    PyTorch's fused optimizers and apex's FusedAdam decide on the device, so that the host never
    waits; any other optimizer costs one wait for the device.
    """
    if getattr(optimizer, "capturable", False):
        optimizer.step(grad_scaler=_Finite(finite))  # type: ignore[call-arg]
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        # The protocol by which torch.amp.GradScaler passes infinities to a fused optimizer.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite:
        optimizer.step()


class _Finite:
    """What apex's capturable optimizers ask of a `torch.amp.GradScaler`: a flag, and no scale."""

    def __init__(self, finite: Tensor) -> None:
        self._infinite = (~finite).float().reshape(1)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor]:
        return {self._infinite.device: self._infinite}

    def _get_scale_async(self) -> Tensor:
        return torch.ones_like(self._infinite)


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the moments as zeros, for gradients that are None or zero, before the first update."""
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if all(parameter in optimizer.state for parameter in parameters):
        return
    # A gradient that is there already may be part of what ranks exchange, and is zero.
    without = [parameter for parameter in parameters if parameter.grad is None]
    for parameter in without:
        parameter.grad = torch.zeros_like(parameter)
    apply_update(optimizer, torch.zeros((), dtype=torch.bool, device=parameters[0].device))
    if parameters[0] not in optimizer.state:
        # For an optimizer that cannot skip an update on the device.
        set_learning_rate(optimizer, 0.0)
        optimizer.step()
    for parameter in without:
        parameter.grad = None


def clear_gradients(
    optimizer: torch.optim.Optimizer, *, keep_addresses: bool, replaced: Collection[Tensor] = ()
) -> None:
    """Remove the gradients, or zero them in place, but for those that the next step replaces."""
    if not keep_addresses:
        # Apex's own takes no argument.
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none=True)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None and p not in replaced]
    if gradients:
        torch._foreach_zero_(gradients)  # pyright: ignore[reportPrivateImportUsage]


# LAMB for large batches.


def build_lamb(
    groups: Sequence[dict[str, Any]], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer from the groups of `parameter_groups`: `Lamb`, or apex's FusedLAMB.

    Gradients are not clipped here. Neither can skip an update on the device, so `apply_update`
    synchronizes with it once a step.
    """
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    reason = apex_unsupported_reason(device, "fused_lamb.py", sharded=has_sharded(groups))
    if config.implementation == "apex" and reason is not None:
        raise ValueError(f"`implementation` must not be 'apex' here: {reason}. Use 'auto'.")
    if config.implementation != "torch" and reason is None:
        return importlib.import_module("apex.optimizers").FusedLAMB(
            list(groups), bias_correction=False, max_grad_norm=math.inf, **settings
        )
    return Lamb(groups, settings)


# Operations on many tensors, which torch does not export.
_ALL: Any = torch


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962) of whole or sharded parameters.

    That of the paper's third version, without bias correction of the moments and without bounds on
    the norm of weights. Updates of parameters without weight decay are not scaled, as in the
    authors' code.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        moments = "exp_avg", "exp_avg_sq"
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in moments}
        states = [self.state[p] for p in parameters]
        weights, gradients = _local(parameters), _local([p.grad for p in parameters])
        first, second = (_local([x[name] for x in states]) for name in moments)
        beta1, beta2 = group["betas"]
        _ALL._foreach_lerp_(first, gradients, 1 - beta1)
        _ALL._foreach_mul_(second, beta2)
        _ALL._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        roots = _ALL._foreach_sqrt(second)
        _ALL._foreach_add_(roots, group["eps"])
        updates = _ALL._foreach_div(first, roots)
        if group["weight_decay"]:
            _ALL._foreach_add_(updates, weights, alpha=group["weight_decay"])
            squares = torch.stack(_ALL._foreach_norm([*weights, *updates])).square()
            if has_sharded([group]):
                # No rank has a whole parameter, which would count several times.
                mesh: Any = parameters[0].device_mesh  # type: ignore[attr-defined]
                dist.all_reduce(squares, group=mesh.get_group())
            before, change = squares.sqrt().chunk(2)
            ratios = torch.where((before > 0) & (change > 0), before / change, 1.0)
            _ALL._foreach_mul_(updates, list(ratios))
        _ALL._foreach_add_(weights, updates, alpha=-group["lr"])


def _local(tensors: Sequence[Any]) -> list[Tensor]:
    """Return this rank's parts of the tensors, which share their memory."""
    return [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
