"""Muon: orthogonalized momentum for the matrices of layers, AdamW for everything else."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
"""Of Newton and Schulz, as in https://kellerjordan.github.io/posts/muon/ and `torch.optim.Muon`."""

_MOST_ELEMENTS = 2**27
"""Elements of matrices that are updated together, for which there is memory several times."""


def muon_groups(model: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide each group into matrices for Muon and other parameters, by ``muon``.

    The matrices are the weights of linear layers in stacks of layers: neither embeddings nor output
    layers, for which AdamW is better.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = (module for stack in stacks for module in stack.modules())
    matrices = {module.weight for module in inner if isinstance(module, nn.Linear)}
    divided = []
    for group in groups:
        for muon in (True, False):
            parameters = [p for p in group["params"] if (p in matrices) == muon]
            if parameters:
                divided.append(group | {"params": parameters, "muon": muon})
    if not any(group["muon"] for group in divided):
        raise ValueError(
            "`optimizer.name` must not be muon here: no linear layer in a stack of layers is "
            "trained. Use adamw."
        )
    return divided


@dataclass(frozen=True, slots=True)
class Share:
    """The matrices that a rank orthogonalizes, where all ranks have the same gradients."""

    rank: int = 0
    size: int = 1
    # Returns the elements (S,) of all ranks one after another, (size S,)
    gather: Callable[[Tensor], Tensor] = lambda elements: elements


class Muon(torch.optim.AdamW):
    """AdamW whose groups with ``muon`` have orthogonal updates; both skip one on the device.

    An update is scaled as large as one of AdamW, so that the learning rate and the weight decay of
    AdamW serve (Liu et al. 2025, https://arxiv.org/abs/2502.16982). Every rank keeps all momenta,
    but orthogonalizes only its share: the checkpoints are those of a single rank.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        momentum: float,
        share: Share | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(list(groups), fused=True, **settings)
        self._momentum = momentum
        self._share = share or Share()
        matrices = [p for group in self.param_groups if group["muon"] for p in group["params"]]
        on_gpu = matrices[0].device.type != "cpu"
        # As the original; a CPU may compute bfloat16 slowly.
        self._dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW expects counts of updates, which matrices do not have.
        groups = state["param_groups"]
        super().__setstate__(state | {"param_groups": [x for x in groups if not x["muon"]]})
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._update(group)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        while parameters:
            ends = accumulate(p.numel() for p in parameters)
            count = max(1, sum(end <= _MOST_ELEMENTS for end in ends))
            self._update_together(parameters[:count], group["lr"], group["weight_decay"])
            parameters = parameters[count:]

    def _update_together(
        self, parameters: list[Tensor], rate: float | Tensor, weight_decay: float
    ) -> None:
        infinite = getattr(self, "found_inf", None)
        if infinite is None:
            infinite = parameters[0].new_zeros(())
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            average = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
            # What is not finite changes nothing.
            gradient = torch.where(infinite > 0, average, parameter.grad)
            average.lerp_(gradient, 1 - self._momentum)
            updates.append(gradient.lerp(average, self._momentum).to(self._dtype))
        lr = rate * (1 - infinite)
        for parameter, update in zip(parameters, self._orthogonalized(updates), strict=True):
            parameter.mul_(1 - lr * weight_decay)
            parameter.sub_(update * (lr * 0.2 * math.sqrt(max(parameter.shape))))

    def _orthogonalized(self, matrices: list[Tensor]) -> list[Tensor]:
        rank, size = self._share.rank, self._share.size
        owners = _owners([tuple(x.shape) for x in matrices], size)
        results: dict[int, Tensor] = {}
        for shape in dict.fromkeys(tuple(x.shape) for x in matrices):
            numbers = [n for n in owners[rank] if tuple(matrices[n].shape) == shape]
            if numbers:
                stack = torch.stack([matrices[n] for n in numbers])
                results |= dict(zip(numbers, orthogonalized(stack), strict=True))
        if size == 1:
            return [results[n] for n in range(len(matrices))]
        # All ranks send as many elements.
        most = max(sum(matrices[n].numel() for n in numbers) for numbers in owners)
        sent = matrices[0].new_zeros(most)
        if owners[rank]:
            local = torch.cat([results[n].flatten() for n in owners[rank]])
            sent[: len(local)] = local
        for numbers, elements in zip(owners, self._share.gather(sent).split(most), strict=True):
            sizes = [matrices[n].numel() for n in numbers]
            for n, piece in zip(numbers, elements[: sum(sizes)].split(sizes), strict=True):
                results[n] = piece.view(matrices[n].shape)
        return [results[n] for n in range(len(matrices))]


def orthogonalized(stack: Tensor) -> Tensor:
    """Return matrices (B, M, N) with singular values near 1 and the same singular vectors."""
    a, b, c = _COEFFICIENTS
    is_tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if is_tall else stack
    # The largest singular value is at most the norm.
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _owners(shapes: Sequence[tuple[int, ...]], size: int) -> list[list[int]]:
    """Divide the matrices among ranks, the most expensive first, each to the rank with least."""
    costs = [math.prod(shape) * min(shape) for shape in shapes]
    owners: list[list[int]] = [[] for _ in range(size)]
    totals = [0] * size
    for number in sorted(range(len(shapes)), key=lambda n: -costs[n]):
        rank = totals.index(min(totals))
        owners[rank].append(number)
        totals[rank] += costs[number]
    return owners
