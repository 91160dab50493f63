"""Benchmarked implementations of an operation, and their comparison with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import PackedLayout


def as_it_is(name: str, x: Tensor) -> Tensor:
    """Return a result or gradient that already has the shape of ours."""
    return x


@dataclass(frozen=True)
class Contender:
    """One way to compute an operation, with its inputs in the form that it likes best.

    Attributes:
        leaves: The inputs that get a gradient.
        call: Computes, from the leaves.
        upstream: The gradient of each result; none where there is no backward.
        packed: Turns a result (named ``result 0``, ...) or the gradient of a leaf into the shape of
            ours, to compare.
        exact: Whether it computes the same; if not, results are not compared, and work not counted.
        moved: Bytes that the forward must move at least, where there is no backward; else they are
            those of leaves and results.
    """

    leaves: Mapping[str, Tensor]
    call: Callable[[], Tensor | Sequence[Tensor]]
    upstream: Sequence[Tensor]
    packed: Callable[[str, Tensor], Tensor] = as_it_is
    exact: bool = True
    moved: int | None = None

    @property
    def differentiable(self) -> bool:
        """Whether there is a backward."""
        return bool(self.upstream)

    def results(self) -> Sequence[Tensor]:
        """Compute forward."""
        results = self.call()
        return (results,) if isinstance(results, Tensor) else results

    def gradients(self) -> Sequence[Tensor]:
        """Compute forward and backward."""
        return torch.autograd.grad(self.results(), list(self.leaves.values()), self.upstream)

    def outcome(self) -> dict[str, Tensor]:
        """Return results and gradients, in the shape of ours."""
        results = self.results()
        found = {f"result {i}": x for i, x in enumerate(results)}
        if self.differentiable:
            leaves = list(self.leaves.values())
            gradients = torch.autograd.grad(results, leaves, self.upstream)
            found |= dict(zip(self.leaves, gradients, strict=True))
        return {name: self.packed(name, x.detach()) for name, x in found.items()}


@dataclass(frozen=True)
class Case:
    """An operation in one configuration.

    Attributes:
        op: Name of the operation in `effasr_kernels.OPERATIONS`.
        kind: Variant of the operation: ``causal``, ``relative``, ...
        shape: Sizes, for the row.
        ours: Creates the contender of one of our backends.
        peers: Creates those of peers, by name; may fail if a package is missing.
        small: Creates the case for a batch that the reference can compute in little time: results
            are compared on that batch instead of the case itself. None to compare the case itself.
        flops: Flops of the forward, needed with ``small``; counted by default.
        heavy: Whether a call takes seconds: it is repeated less, and gets more time.
    """

    op: str
    kind: str
    shape: str
    ours: Callable[[str], Contender]
    peers: Mapping[str, Callable[[], Contender]] = field(default_factory=dict)
    small: Case | None = None
    flops: Callable[[], int] | None = None
    heavy: bool = False

    @property
    def name(self) -> str:
        """Operation and kind."""
        return f"{self.op} {self.kind}".strip()


@dataclass(frozen=True)
class Gold:
    """Results of the reference, and the amount of work.

    Attributes:
        outcome: Results and gradients.
        flops: Floating-point operations of the forward, and of both passes; without padding.
        bytes: Least number of bytes to move, likewise: each input and result once.
    """

    outcome: dict[str, Tensor]
    flops: tuple[int, int]
    bytes: tuple[int, int]


def judge(case: Case) -> Gold:
    """Compute by the reference; of the small case, if there is one, with the work of the other."""
    contender = case.ours("reference")
    if case.small is not None and case.flops is not None:
        forward = case.flops()
        # The backward of products is two of the same size.
        return Gold(judge(case.small).outcome, (forward, 3 * forward), _moved(contender))
    outcome = contender.outcome()
    with FlopCounterMode(display=False) as once, torch.no_grad():
        contender.results()
    if not contender.differentiable:
        return Gold(outcome, (once.get_total_flops(), 0), (contender.moved or 0, 0))
    with FlopCounterMode(display=False) as both:
        contender.gradients()
    return Gold(outcome, (once.get_total_flops(), both.get_total_flops()), _moved(contender))


def _moved(contender: Contender) -> tuple[int, int]:
    size = lambda tensors: sum(x.numel() * x.element_size() for x in tensors)
    # Results are as large as their gradients.
    read, written = size(contender.leaves.values()), size(contender.upstream)
    # The backward reads the inputs again and the upstream gradient, and writes as many gradients.
    return read + written, 3 * read + 2 * written


def error(outcome: Mapping[str, Tensor], gold: Gold) -> float:
    """Return the largest error of a result or gradient, relative to its norm; infinity for NaN.

    Raises:
        ValueError: A result has another shape, or is missing.
    """
    worst = 0.0
    for name, expected in gold.outcome.items():
        found = outcome[name]
        if found.shape != expected.shape:
            raise ValueError(f"{name} is {tuple(found.shape)}, not {tuple(expected.shape)}")
        expected = expected.double()
        norm = expected.norm().clamp_min(1e-30)
        distance = float((found.double() - expected).norm() / norm)
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst


class Padding:
    """The same sequences as a padded batch, without empty ones; padding is not timed."""

    def __init__(self, layout: PackedLayout):
        """Create the padding of a layout."""
        self.layout = layout
        self.kept = [n for n, length in enumerate(layout.lengths) if length]
        lengths = [layout.lengths[n] for n in self.kept]
        self.lengths = torch.tensor(lengths, device=layout.device)
        starts = torch.tensor([layout.cu_seqlens_host[n] for n in self.kept], device=layout.device)
        column = torch.arange(max(lengths), device=layout.device)
        self.mask = column < self.lengths[:, None]
        self.index = (starts[:, None] + column).clamp(max=layout.rows - 1)

    def pad(self, x: Tensor) -> Tensor:
        """Pad (rows, ...) to (B, longest, ...), a copy with zeros in the padding."""
        mask = self.mask.reshape(*self.mask.shape, *[1] * (x.ndim - 1))
        return torch.where(mask, x.detach()[self.index], 0)

    def pack(self, x: Tensor) -> Tensor:
        """Return the inverse, with zeros in the tail."""
        rows = x.new_zeros(self.layout.rows, *x.shape[2:])
        rows[self.index[self.mask]] = x[self.mask]
        return rows


def leaf(x: Tensor) -> Tensor:
    """Return the values as a contiguous leaf."""
    return x.detach().contiguous().clone().requires_grad_()
