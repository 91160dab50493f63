"""Implementations of an operation, and their comparison with the reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import effasr_kernels as kernels
from effasr_kernels import PackedLayout

Form = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""From our form of a tensor to that of a peer, and back."""


@dataclass(frozen=True)
class Contender:
    """One way to compute an operation, with its inputs in the form that it likes best."""

    leaves: Mapping[str, Tensor]  # inputs that get a gradient
    call: Callable[[], Tensor | Sequence[Tensor]]
    upstream: Sequence[Tensor] = ()  # gradient of each result; none where there is no backward
    # Turns a result ("result 0", ...) or the gradient of a leaf into the form of ours, to compare.
    packed: Callable[[str, Tensor], Tensor] = lambda name, x: x
    exact: bool = True  # computes the same; if not, results are not compared and work not counted
    moved: int | None = None  # least bytes of a forward without a backward; else leaves and results

    def results(self) -> Sequence[Tensor]:
        results = self.call()
        return (results,) if isinstance(results, Tensor) else results

    def gradients(self) -> Sequence[Tensor]:
        return torch.autograd.grad(self.results(), list(self.leaves.values()), self.upstream)

    def outcome(self) -> dict[str, Tensor]:
        """Return results and gradients, in the form of ours."""
        results = self.results()
        outcome = {f"result {i}": x for i, x in enumerate(results)}
        if self.upstream:
            leaves = list(self.leaves.values())
            gradients = torch.autograd.grad(results, leaves, self.upstream)
            outcome |= dict(zip(self.leaves, gradients, strict=True))
        return {name: self.packed(name, x.detach()) for name, x in outcome.items()}


@dataclass(frozen=True)
class Case:
    op: str
    kind: str  # "causal", "relative", ...
    shape: str
    ours: Callable[[str], Contender]  # by backend
    peers: Mapping[str, Callable[[], Contender]] = field(default_factory=dict)  # may lack a package
    # A batch on which results are compared, where the reference takes long for this one; then
    # `flops` counts those of the forward.
    small: "Case | None" = None
    flops: Callable[[], int] | None = None
    heavy: bool = False  # a call takes seconds: it is repeated less, and gets more time

    @property
    def name(self) -> str:
        return f"{self.op} {self.kind}".strip()


Peer = Callable[[], Any]
"""Makes a function of the leaves and, where it wants them in other forms, these by name."""


def case_of(
    op: str,
    kind: str,
    shape: str,
    arguments: Mapping[str, Any],
    upstream: Sequence[Tensor] = (),
    peers: Mapping[str, Peer] | None = None,
    *,
    leaves: Mapping[str, Tensor] | None = None,
    select: Callable[[Any], Any] = lambda results: results,
    exact: bool = True,
    moved: int | None = None,
) -> Case:
    """Return the case of one call of a public function; `select` picks results to compare."""
    if leaves is None:
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        leaves = {name: x for name, x in tensors.items() if x.requires_grad}
    call = getattr(kernels, op)

    def ours(backend: str) -> Contender:
        run = lambda: select(call(**arguments, backend=backend))
        return Contender(leaves, run, upstream, moved=moved)

    def peer(make: Peer) -> Contender:
        made = make()
        function, forms = made if isinstance(made, tuple) else (made, {})
        there, back = (
            lambda name, x, i=i: forms[name][i](x) if name in forms else x for i in (0, 1)
        )
        copies = {name: leaf(there(name, x)) for name, x in leaves.items()}
        grads = [there(f"result {i}", x).detach().contiguous() for i, x in enumerate(upstream)]
        run = lambda: function(*copies.values())
        return Contender(copies, run, grads, back, exact=exact, moved=moved)

    made = {name: lambda make=make: peer(make) for name, make in (peers or {}).items()}
    return Case(op, kind, shape, ours, made)


def without_tail(layout: PackedLayout) -> Form:
    tail = layout.rows - layout.total
    grow = lambda x: torch.cat([x, x.new_zeros(tail, *x.shape[1:])])
    return lambda x: x[: layout.total], grow


def leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().clone().requires_grad_()


class Padding:
    """The same sequences as a padded batch, without empty ones; padding is not timed."""

    def __init__(self, layout: PackedLayout):
        self.layout = layout
        self.nonempty = [n for n, length in enumerate(layout.lengths) if length]
        lengths = [layout.lengths[n] for n in self.nonempty]
        self.lengths = torch.tensor(lengths, device=layout.device)
        starts = torch.tensor(
            [layout.cu_seqlens_host[n] for n in self.nonempty], device=layout.device
        )
        column = torch.arange(max(lengths), device=layout.device)
        self.mask = column < self.lengths[:, None]  # (B, longest)
        self._index = (starts[:, None] + column).clamp(max=layout.rows - 1)

    def pad(self, x: Tensor) -> Tensor:
        """Pad (rows, ...) to (B, longest, ...), a copy with zeros in the padding."""
        mask = self.mask.reshape(*self.mask.shape, *[1] * (x.ndim - 1))
        return torch.where(mask, x.detach()[self._index], 0)

    def pack(self, x: Tensor) -> Tensor:
        """Return the inverse, with zeros in the tail."""
        rows = x.new_zeros(self.layout.rows, *x.shape[2:])
        rows[self._index[self.mask]] = x[self.mask]
        return rows

    def form(self, *order: int) -> Form:
        """Return padded tensors with their dimensions in this order."""
        inverse = [order.index(i) for i in range(len(order))]
        return lambda x: self.pad(x).permute(order), lambda x: self.pack(x.permute(inverse))


@dataclass(frozen=True)
class Gold:
    """What the reference computes, and the work: of the forward, and of both passes."""

    outcome: dict[str, Tensor]
    flops: tuple[int, int]  # without padding
    bytes: tuple[int, int]  # at least: each input and result once


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
    if not contender.upstream:
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
    """Return the largest error of a result or gradient, relative to its norm; infinity for NaN."""
    worst = 0.0
    for name, expected in gold.outcome.items():
        actual = outcome[name]
        if actual.shape != expected.shape:
            raise ValueError(f"{name} is {tuple(actual.shape)}, not {tuple(expected.shape)}")
        expected = expected.double()
        norm = expected.norm().clamp_min(1e-30)
        distance = float((actual.double() - expected).norm() / norm)
        worst = max(worst, distance if distance == distance else float("inf"))
    return worst
