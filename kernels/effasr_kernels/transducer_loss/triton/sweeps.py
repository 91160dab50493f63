"""Sums over the lattices of a group, forward and backward: for RNN-T, and as TDT needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from effasr_kernels.transducer_loss.triton import lattice
from effasr_kernels.transducer_loss.triton.plan import Group

if TYPE_CHECKING:
    from effasr_kernels.transducer_loss.triton.work import Work


class Scores(NamedTuple):
    """A number for each step out of each node, float32.

    Log-probabilities on the way there, what passes each step on the way back.

    Attributes:
        base: The node that the first elements are for.
        blank: (R,).
        label: (R,).
        duration: (R, D), of all steps that last so long; None without durations. On the way back
            this is the gradient of the logits of durations.
    """

    base: int
    blank: Tensor
    label: Tensor
    duration: Tensor | None = None


class Trace(NamedTuple):
    """What the way there leaves in each node for the way back.

    Attributes:
        base: The node that the first element is for.
        values: (R,).
    """

    base: int
    values: Tensor


class LabelSweeps:
    """Those of an RNN-T; see `lattice`. A share of each node is their trace.

    `effasr_kernels.transducer_loss.triton.duration_lattice.DurationSweeps` has the same methods.

    Attributes:
        trace_dtype: Of what the forward sweep leaves in each node.
        keeps_scores: Whether the backward sweep needs the log-probabilities again.
    """

    trace_dtype: ClassVar[torch.dtype] = torch.float32
    keeps_scores: ClassVar[bool] = False

    def __init__(self, work: Work):
        """Prepare for a call."""
        self._offsets, self._bound, self._fastemit = work.offsets, work.bound, work.fastemit

    def room(self, scores: Scores) -> Trace:
        """Room for a trace that need not outlive ``scores``, and may replace some of them."""
        return Trace(scores.base, scores.blank)

    def losses(self, group: Group, scores: Scores, trace: Trace, loss: Tensor) -> None:
        """Find the loss of each sequence of a group.

        Args:
            group: Which.
            scores: Log-probabilities of its nodes.
            trace: Written.
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
        """Find how much of the gradient of the losses passes each step.

        Args:
            group: Which.
            scores: As given to `losses`, if ``keeps_scores``.
            trace: As `losses` left it.
            loss: float32 (N,).
            grad_loss: float32 (N,); that of an infinite loss is taken for zero.
            out: Written, of the group's nodes alone: 1 + lambda of FastEmit times what passes
                labels. It may be ``scores``.
        """
        lattice.occupancies(
            *(group, self._offsets, trace.values, trace.base, loss, grad_loss),
            *(out.blank, out.label, self._bound, self._fastemit),
        )
