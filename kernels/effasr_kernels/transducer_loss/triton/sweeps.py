"""The forward and backward recursions over the lattices of a group: types, and those of RNN-T."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from effasr_kernels.transducer_loss.triton import lattice
from effasr_kernels.transducer_loss.triton.plan import Group

if TYPE_CHECKING:
    from effasr_kernels.transducer_loss.triton.work import Work


class Scores(NamedTuple):
    """A float32 number for each step out of each node.

    The numbers are log-probabilities in the forward, and occupancies in the backward.

    Attributes:
        base: Node of the first elements.
        blank: (R,).
        label: (R,).
        duration: (R, D), of all steps with each duration; None without durations. In the backward
            this is the gradient of the duration logits.
    """

    base: int
    blank: Tensor
    label: Tensor
    duration: Tensor | None = None


class Trace(NamedTuple):
    """The numbers of the nodes that the forward recursion stores for the backward.

    Attributes:
        base: Node of the first element.
        values: (R,).
    """

    base: int
    values: Tensor


class LabelSweeps:
    """The recursions of an RNN-T; see `lattice`. Their trace is a share for each node.

    `effasr_kernels.transducer_loss.triton.duration_lattice.DurationSweeps` has the same methods.

    Attributes:
        trace_dtype: Dtype of the trace.
        keeps_scores: Whether the backward needs the log-probabilities again.
    """

    trace_dtype: ClassVar[torch.dtype] = torch.float32
    keeps_scores: ClassVar[bool] = False

    def __init__(self, work: Work):
        """Prepare for a call."""
        self._offsets, self._bound, self._fastemit = work.offsets, work.bound, work.fastemit

    def room(self, scores: Scores) -> Trace:
        """A buffer for a trace that is used only with ``scores`` and may overwrite some of them."""
        return Trace(scores.base, scores.blank)

    def losses(self, group: Group, scores: Scores, trace: Trace, loss: Tensor) -> None:
        """Compute the loss of each sequence of a group.

        Args:
            group: The group.
            scores: Log-probabilities of its nodes.
            trace: Trace of its nodes, written.
            loss: float32 (N,), written.
        """
        planes = scores.blank, scores.label, trace.values
        lattice.losses(group, self._offsets, *planes, trace.base, loss, self._bound)

    def occupancies(
        self,
        group: Group,
        scores: Scores,
        trace: Trace,
        loss: Tensor,
        grad_loss: Tensor,
        out: Scores,
    ) -> None:
        """Compute the occupancies of the steps, weighted by the gradient of the losses.

        Args:
            group: The group.
            scores: The log-probabilities given to `losses`, if ``keeps_scores``.
            trace: The trace that `losses` wrote.
            loss: float32 (N,).
            grad_loss: float32 (N,); treated as zero for an infinite loss.
            out: Occupancies of the group's nodes, written; those of labels are multiplied by
                1 + lambda of FastEmit. It may be ``scores``.
        """
        lattice.occupancies(
            *(group, self._offsets, trace.values, trace.base, loss, grad_loss),
            *(out.blank, out.label, self._bound, self._fastemit),
        )
