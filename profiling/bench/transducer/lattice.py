"""A transducer's loss from log-probabilities: what peers that bring no lattice are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from effasr_kernels import PackedLayout
from effasr_kernels.runtime import native
from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss.lattice import occupancies

Planes = tuple[Tensor, Tensor, Tensor]


class Nodes:
    """The lattices of a batch, packed: node (t, u) of sequence n is ``first[n] + t (U_n + 1) + u``.

    Sums over paths use our implementation, the fastest on this machine, so that times differ only
    by how log-probabilities are computed.
    """

    def __init__(self, frames: PackedLayout, labels: PackedLayout):
        """Create the lattices of sequences, none of which is empty."""
        self.frames, self.labels = frames, labels
        self.states = labels.cu_seqlens.diff().long() + 1
        self.first = lattice.node_offsets(frames.cu_seqlens, labels.cu_seqlens)
        pairs = zip(frames.lengths, labels.lengths, strict=True)
        self.counts = [t * (u + 1) for t, u in pairs]
        self.count = sum(self.counts)

    def places(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sequence, frame and state of a run of nodes, int64."""
        node = torch.arange(begin, end, device=self.first.device)
        sequence = torch.bucketize(node, self.first[1:], right=True)
        rest, states = node - self.first[sequence], self.states[sequence]
        return sequence, rest // states, rest % states

    def losses(self, log_blank: Tensor, log_label: Tensor) -> Tensor:
        """Return the loss of each sequence, float32 (N,), from float32 planes (nodes,)."""
        return _Losses.apply(log_blank, log_label, self)

    def occupancies(self, log_blank: Tensor, log_label: Tensor) -> Planes:
        """Return the losses, and how probable the blank, and the label, of each node is."""
        run = _lattice(log_blank.device.type)
        total, occ_blank, occ_label = run(log_blank.contiguous(), log_label.contiguous(), self)
        return total.float(), occ_blank, occ_label


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_blank: Tensor, log_label: Tensor, nodes: Nodes) -> Tensor:  # type: ignore[override]
        losses, *occupied = nodes.occupancies(log_blank, log_label)
        ctx.nodes = nodes
        ctx.save_for_backward(*occupied)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        counts = ctx.nodes.first.diff()
        scale = (-grad).repeat_interleave(counts, output_size=ctx.nodes.count)
        return *(scale * occupied for occupied in ctx.saved_tensors), None


def _lattice(device: str) -> Callable[[Tensor, Tensor, Nodes], Planes]:
    if device == "cuda":
        return _triton
    return _extension if native.unsupported_reason() is None else _reference


def _extension(log_blank: Tensor, log_label: Tensor, nodes: Nodes) -> Planes:
    total, occ_blank, occ_label = lattice.transducer_occupancies(
        *(log_blank, log_label, nodes.frames.cu_seqlens, nodes.labels.cu_seqlens, nodes.first[:-1])
    )
    return -total, occ_blank, occ_label


def _triton(log_blank: Tensor, log_label: Tensor, nodes: Nodes) -> Planes:
    from effasr_kernels.transducer_loss.triton.lattice import LabelSweeps
    from effasr_kernels.transducer_loss.triton.plan import Cost, Lattices, Scores

    plan, size = Lattices(nodes.frames, nodes.labels), max(1, nodes.count)
    (group,) = plan.groups(Cost(1), size, Cost(1), size)
    offsets = nodes.frames.cu_seqlens, nodes.labels.cu_seqlens, nodes.first
    sweeps = LabelSweeps(offsets, nodes.labels.max_seqlen, fastemit=0.0)
    scores = Scores(0, log_blank, log_label)
    occupied = Scores(0, torch.empty_like(log_blank), torch.empty_like(log_label))
    loss, trace = log_blank.new_empty(nodes.frames.num_sequences), sweeps.room(occupied)
    sweeps.losses(group, scores, trace, loss)
    sweeps.occupancies(group, scores, trace, loss, torch.ones_like(loss), occupied)
    return loss, occupied.blank, occupied.label


def _reference(log_blank: Tensor, log_label: Tensor, nodes: Nodes) -> Planes:
    totals: list[Tensor] = []
    occupied: tuple[list[Tensor], list[Tensor]] = [], []
    planes = zip(log_blank.split(nodes.counts), log_label.split(nodes.counts), strict=True)
    for frames, (blank, label) in zip(nodes.frames.lengths, planes, strict=True):
        blank, label = (x.view(frames, -1).double() for x in (blank, label))
        total, *found = occupancies(blank, label[:, :-1])
        totals.append(-total)
        for plane, x in zip(occupied, found, strict=True):
            plane.append(x.flatten().to(log_blank.dtype))
    return torch.stack(totals), torch.cat(occupied[0]), torch.cat(occupied[1])
