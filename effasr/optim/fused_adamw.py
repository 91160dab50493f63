"""AdamW whose update also clips, averages the weights and casts their copies."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from effasr_kernels.runtime.dispatch import load

_KERNEL = "effasr_kernels.shared.adamw"  # needs Triton


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the same state, in one pass over memory on a GPU.

    Everything that changes from step to step is read on the device: norm, learning rate, counts of
    updates, and whether the gradient is finite. On a CPU its steps are those of PyTorch, one after
    another.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **settings: Any) -> None:
        super().__init__(list(groups), fused=True, **settings)
        # Largest norm of the gradient, and its norm in the next update; None for no limit there.
        self.clip = math.inf
        self.norm: Tensor | None = None
        # Share of the weights in their average after the next update.
        self.average_share = 0.0
        self._averages: Mapping[Tensor, Tensor] = {}
        self._copies: Mapping[Tensor, Tensor] = {}
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._steps: Tensor | None = None

    def follow(
        self, averages: Mapping[Tensor, Tensor] | None, copies: Mapping[Tensor, Tensor] | None
    ) -> None:
        """Update averages of weights, and copies in 16 bits, with the weights."""
        self._averages, self._copies = averages or {}, copies or {}
        self._steps = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        norm, self.norm = self.norm, None
        if kernel_unsupported_reason(self._parameters[0]) is None:
            self._step_in_one_pass(norm)
        else:
            self._step_by_step(norm)

    def _step_by_step(self, norm: Tensor | None) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if norm is not None:
            torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1))  # pyright: ignore[reportPrivateImportUsage]
        super().step()
        for parameter, average in self._averages.items():
            average.lerp_(parameter, self.average_share)
        for parameter, copy in self._copies.items():
            copy.copy_(parameter)

    @torch.no_grad()
    def gradient_norm(self, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Return the norm of all gradients, float32 (); without a GPU, in this order."""
        if kernel_unsupported_reason(self._parameters[0]) is not None:
            chosen = self._parameters if parameters is None else parameters
            return get_total_norm([p.grad for p in chosen if p.grad is not None])
        self._steps = self._begin() if self._steps is None else self._steps
        return self._table.norm([_laid_out_as(p, p.grad) for p in self._parameters])

    def _step_in_one_pass(self, norm: Tensor | None) -> None:
        steps = self._begin() if self._steps is None else self._steps
        gradients = [_laid_out_as(p, p.grad) for p in self._parameters]
        group = self.param_groups[0]
        # An assignment would wait for the GPU, as it copies a number from the host.
        self._rates[0].fill_(group["lr"])
        self._rates[1].fill_(self.average_share)
        corrections = torch.expm1((steps + 1)[:, None] * self._log_betas)
        infinite = getattr(self, "found_inf", None)
        self._table.update(
            gradients,
            steps,
            corrections,
            self._rates,
            self._finite if infinite is None else infinite,
            norm,
            clip=self.clip,
            betas=group["betas"],
            eps=group["eps"],
        )

    def _begin(self) -> Tensor:
        """Make the moments that are missing, and a table of all addresses; return the counts."""
        kernel, device = load(_KERNEL), self._parameters[0].device
        steps = torch.zeros(len(self._parameters), device=device)
        tensors = []
        for parameter, made in zip(self._parameters, steps, strict=True):
            state = self.state[parameter]
            if state:
                made.copy_(state["step"])
            # In one tensor, as the kernel counts all updates.
            state["step"] = made
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(parameter))
            of_parameter = self._averages.get(parameter), self._copies.get(parameter)
            tensors.append(
                kernel.Tensors(
                    parameter.detach(), state["exp_avg"], state["exp_avg_sq"], *of_parameter
                )
            )
        decays = [group["weight_decay"] for group in self.param_groups for _ in group["params"]]
        self._table = kernel.Table(tensors, decays)
        self._steps = steps
        logs = [math.log(beta) if beta else -math.inf for beta in self.param_groups[0]["betas"]]
        self._log_betas = torch.tensor(logs, dtype=torch.float64, device=device)
        self._rates = torch.zeros(2, device=device)
        self._finite = torch.zeros((), device=device)
        return steps


def kernel_unsupported_reason(parameter: Tensor) -> str | None:
    """Return the reason why one pass cannot update a parameter, or None."""
    kernel = load(_KERNEL)
    return kernel if isinstance(kernel, str) else kernel.refusal(parameter)


def _laid_out_as(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
