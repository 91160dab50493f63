"""`transducer_loss` on a CPU, its lattices in C++, in memory that is flat in the batch size.

Group by group of sequences: logits, chunk by chunk of frames, and what they give for the blank and
the label of each node; the lattices of the group, a sequence for each thread; then the gradient of
the logits, in their place, and its products, chunk by chunk.

Peak memory, beside the arguments and their gradients: what groups keep, logits and 12 bytes for
each node, in 32 MiB for each thread or the workspace (`workspace.set_workspace`), whichever is
less; and the chunk. A sequence that needs more has its logits made twice, and keeps 12 bytes for
each node alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared import lattice
from effasr_kernels.shared.cpp import differentiable, groups, refusal
from effasr_kernels.shared.ragged import widen
from effasr_kernels.transducer_loss._cpp_nodes import Joint, Sequence
from effasr_kernels.transducer_loss.definition import TransducerArguments
from effasr_kernels.transducer_loss.workspace import workspace

_GROUP_BYTES = 32 * 2**20
"""For each thread. More is not faster: the system takes its time to give new memory."""
_PLANE_BYTES = 12


def unsupported_reason(a: TransducerArguments) -> str | None:
    """The reason why this backend does not support these arguments, or None."""
    if a.durations is not None:
        return "has no lattice of durations"
    return refusal(a.encoded)


def run(a: TransducerArguments) -> Tensor:
    """See `effasr_kernels.transducer_loss.transducer_loss`."""
    labels = a.targets[: a.layout_targets.total]
    exception = f" other than the blank {a.blank_id}"
    check_labels("transducer_loss", labels, a.weight.shape[0], exception, a.blank_id)
    losses = _Losses(
        *(a.layout_frames, a.layout_targets, labels.long()),
        *(a.blank_id, a.activation, a.fastemit, a.encoded.dtype),
    )
    packed = {"encoded": a.encoded, "predicted": a.predicted}
    # What is written over has to be the argument itself, and is widened by chunks.
    inputs = {name: x if name in a.overwritten else widen(x) for name, x in packed.items()}
    inputs |= {"weight": widen(a.weight), "bias": widen(a.bias)}
    return differentiable("transducer_loss", losses, inputs, a.overwritten)


@dataclass(frozen=True, slots=True)
class _Losses:
    """See `effasr_kernels.shared.cpp.Losses`; inputs are encoded, predicted, weight and bias."""

    frames: PackedLayout
    labels: PackedLayout
    targets: Tensor
    blank_id: int
    activation: str
    fastemit: float
    dtype: torch.dtype

    def __call__(
        self,
        inputs: tuple[Tensor, ...],
        scales: Tensor | None = None,
        gradients: tuple[Tensor, ...] = (),
    ) -> Tensor:
        weight = inputs[2]
        count = weight.shape[0]
        losses = weight.new_empty(self.frames.num_sequences)
        sequences = [list(group) for group in self._groups(count if gradients else 0)]
        sizes = [group[-1].nodes.stop for group in sequences]
        planes = weight.new_empty(3, max(sizes, default=0))
        fitting = [size for size in sizes if size * (_PLANE_BYTES + 4 * count) <= _group_bytes()]
        # One buffer for all groups.
        logits = weight.new_empty(max(fitting, default=0) if gradients else 0, count)
        self._clear(gradients)
        for group, size in zip(sequences, sizes, strict=True):
            kept = logits[:size] if 0 < size <= logits.shape[0] else None
            joint = Joint(
                *(inputs, self.targets, self.blank_id, self.activation, self.dtype),
                *(planes[:, :size], kept),
            )
            for sequence in group:
                for chunk in sequence.chunks(sum(weight.shape)):
                    joint.score(chunk)
            own = slice(group[0].number, group[-1].number + 1)
            losses[own] = 0 - self._sum_paths(own, joint.planes, bool(gradients))
            for sequence in group if gradients else ():
                scale = 1.0 if scales is None else float(scales[sequence.number])
                if losses[sequence.number] == torch.inf:
                    scale = 0.0
                self._differentiate(joint, sequence, gradients, scale)
        return losses

    def _groups(self, count: int) -> Iterator[Iterator[Sequence]]:
        """Runs of sequences, of which ``count`` floats are kept for each node."""
        rows_f, rows_y = (list(x.cu_seqlens_host) for x in (self.frames, self.labels))
        lengths = zip(pairwise(rows_f), pairwise(rows_y), strict=True)
        nodes = [(t_end - t) * (u_end - u + 1) for (t, t_end), (u, u_end) in lengths]

        def members(begin: int, end: int) -> Iterator[Sequence]:
            node = 0
            for n in range(begin, end):
                labels = slice(rows_y[n], rows_y[n + 1])
                states = slice(labels.start + n, labels.stop + n + 1)
                own = slice(node, node + nodes[n])
                yield Sequence(n, slice(rows_f[n], rows_f[n + 1]), states, labels, own)
                node = own.stop

        for begin, end in groups(nodes, _group_bytes() // (_PLANE_BYTES + 4 * count)):
            yield members(begin, end)

    def _clear(self, gradients: tuple[Tensor, ...]) -> None:
        """Begin with zeros, but where inputs may be: there, past the last sequence alone."""
        if not gradients:
            return
        of_encoded, of_predicted, of_weight, of_bias = gradients
        of_encoded[self.frames.total :] = 0
        of_predicted[self.labels.total + self.labels.num_sequences :] = 0
        of_weight.zero_()
        of_bias.zero_()

    def _sum_paths(self, own: slice, planes: Tensor, with_gradient: bool) -> Tensor:
        """Log-likelihoods; how probable each step is takes the place of its log-probability."""
        ends = slice(own.start, own.stop + 1)
        cu_frames, cu_labels = (x.cu_seqlens[ends].contiguous() for x in (self.frames, self.labels))
        first_nodes = lattice.node_offsets(cu_frames, cu_labels)[:-1]
        given = planes[0], planes[1], cu_frames, cu_labels, first_nodes
        if not with_gradient:
            return lattice.transducer_log_likelihood(*given)
        total, _, _ = lattice.transducer_occupancies(*given, in_place=True)
        return total

    def _differentiate(
        self, joint: Joint, sequence: Sequence, gradients: tuple[Tensor, ...], scale: float
    ) -> None:
        """Write the gradient of a sequence's rows, and add to those of weight and bias."""
        of_encoded, of_predicted, of_weight, of_bias = gradients
        if scale == 0:
            of_encoded[sequence.frames] = 0
            of_predicted[sequence.states] = 0
            return
        of_states = of_weight.new_zeros(of_predicted[sequence.states].shape)
        parts = of_encoded, of_states, of_weight, of_bias
        for chunk in sequence.chunks(sum(of_weight.shape)):
            joint.differentiate(chunk, parts, scale, self.fastemit)
        of_predicted[sequence.states] = of_states


def _group_bytes() -> int:
    return min(workspace(), _GROUP_BYTES * torch.get_num_threads())
