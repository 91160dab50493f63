"""`transducer_loss` as in Triton, but for its lattices, which the compiled extension sums.

Joint, projections and gradients are those of `_triton`, in the same memory but for lattices: kept
for the backward, where that fits, are 12 bytes for each node; a sequence alone needs 8 bytes for
each of its nodes, and 20 in the backward. It is never chosen unasked, as no GPU has shown which is
faster. Under ``TRITON_INTERPRET=1`` the extension's build for a CPU stands in.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from effasr_kernels.runtime.launch import refusal
from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss import _passes
from effasr_kernels.transducer_loss._plan import Group
from effasr_kernels.transducer_loss._sweeps import Scores, Sweeps, Trace
from effasr_kernels.transducer_loss.torch_op import call

if TYPE_CHECKING:
    from effasr_kernels.transducer_loss._work import Work

_HOW_TO_BUILD = "EFFASR_BUILD_CUDA=1 pip install --no-build-isolation . builds it"


def why_not(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: object,
    layout_targets: object,
    weight: Tensor,
    bias: Tensor,
    *,
    durations: tuple[int, ...] | None = None,
    **_: object,
) -> str | None:
    """Any shape is served; durations are not."""
    if durations is not None:
        return "the extension has no lattice of durations"
    reason = refusal(encoded, predicted, weight, bias)
    if reason is not None:
        return reason
    reason = lattice.why_not(_extension(encoded))
    return None if reason is None else f"{reason}: {_HOW_TO_BUILD}"


def _extension(x: Tensor) -> lattice.Extension:
    return "cpu-extension" if x.is_cpu else "cuda-extension"


class CompiledSweeps:
    """Those of an RNN-T, in the extension. Log-probabilities are all that it needs again."""

    trace_dtype: ClassVar[torch.dtype | None] = None
    keeps_scores: ClassVar[bool] = True
    scratch_bytes: ClassVar[int] = 8

    def __init__(self, work: Work):
        """See `Sweeps`."""
        self._offsets, self._fastemit = work.offsets, work.fastemit
        self._bounds = {
            "max_frames": work.layouts[0].bound,
            "max_labels": work.bound,
            "backend": _extension(work.encoded),
        }

    def room(self, scores: Scores) -> Trace:
        """See `Sweeps`; there is no trace."""
        return Trace(scores.base, scores.blank)

    def losses(self, group: Group, scores: Scores, trace: Trace, loss: Tensor) -> None:
        """See `Sweeps`."""
        total = lattice.transducer_log_likelihood(
            *(scores.blank, scores.label, *self._where(group, scores.base)),
            **self._bounds,
        )
        loss[_sequences(group)] = 0 - total

    def occupancies(
        self,
        group: Group,
        scores: Scores,
        trace: Trace,
        loss: Tensor,
        grad_loss: Tensor,
        out: Scores,
    ) -> None:
        """See `Sweeps`."""
        if scores.blank.data_ptr() != out.blank.data_ptr():
            first = group.first_node - scores.base
            for plane, own in ((scores.blank, out.blank), (scores.label, out.label)):
                own.copy_(plane[first : first + group.nodes])
        where = self._where(group, out.base)
        lattice.transducer_occupancies(out.blank, out.label, *where, in_place=True, **self._bounds)
        factor = grad_loss[_sequences(group)]
        factor = torch.where(loss[_sequences(group)] == torch.inf, 0, factor)
        nodes = self._offsets[2][group.first_sequence :].diff()[: group.sequences]
        factor = factor.repeat_interleave(nodes, output_size=group.nodes)
        # A sequence without gradient may hold NaN.
        has_none = factor == 0
        for plane in (out.blank, out.label):
            plane.mul_(factor).masked_fill_(has_none, 0)
        out.label.mul_(1 + self._fastemit)

    def _where(self, group: Group, base: int) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets of a group's sequences, and its first nodes counted from ``base``."""
        cu_frames, cu_labels, first_nodes = self._offsets
        end = group.first_sequence + group.sequences
        lengths = (
            cu_frames[group.first_sequence : end + 1],
            cu_labels[group.first_sequence : end + 1],
        )
        return *lengths, first_nodes[group.first_sequence : end] - base


def _sequences(group: Group) -> slice:
    return slice(group.first_sequence, group.first_sequence + group.sequences)


def _sweeps(durations: tuple[int, ...] | None) -> type[Sweeps]:
    return CompiledSweeps


forward = partial(_passes.forward, _sweeps)
saved_like = partial(_passes.saved_like, _sweeps)
backward = partial(_passes.backward, _sweeps)
run = call.kernel(__name__, forward, backward)
