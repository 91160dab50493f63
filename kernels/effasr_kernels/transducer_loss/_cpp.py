"""`transducer_loss` on a CPU with lattices in C++; memory does not grow with the batch size.

Sequences are processed in groups. For each group, the logits and the log-probabilities of blank and
label are computed in chunks of frames; then the lattices, with one thread per sequence; then the
gradient of the logits, in place, and its products, again in chunks.

Peak memory, beside the arguments and their gradients: one group's logits and 12 bytes for each
node, in the workspace (`set_workspace`) but at most 32 MiB per thread; and one chunk. For
a sequence that needs more, the logits are computed twice, and 12 bytes for each node are kept.
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
from effasr_kernels.transducer_loss import TransducerArguments, workspace
from effasr_kernels.transducer_loss._cpp_nodes import Joint, Sequence

_GROUP_BYTES = 32 * 2**20
"""Memory of a group for each thread. More is not faster, as allocating new memory takes time."""
_PLANE_BYTES = 12


def unsupported_reason(a: TransducerArguments) -> str | None:
    """The reason why this backend does not support these arguments, or None."""
    if a.durations is not None:
        return "does not support durations"
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
    # An overwritten input must be the argument itself; its chunks are widened instead.
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
        """Divide sequences into groups, which keep ``count`` further floats for each node."""
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
        """Set the gradients to zero; those of packed inputs only in the tail, as they may alias."""
        if not gradients:
            return
        of_encoded, of_predicted, of_weight, of_bias = gradients
        of_encoded[self.frames.total :] = 0
        of_predicted[self.labels.total + self.labels.num_sequences :] = 0
        of_weight.zero_()
        of_bias.zero_()

    def _sum_paths(self, own: slice, planes: Tensor, with_gradient: bool) -> Tensor:
        """Return log-likelihoods, and replace log-probabilities of steps by their occupancies."""
        ends = slice(own.start, own.stop + 1)
        cu_frames, cu_labels = (x.cu_seqlens[ends].contiguous() for x in (self.frames, self.labels))
        first_nodes = lattice.node_offsets(cu_frames, cu_labels)[:-1]
        arguments = planes[0], planes[1], cu_frames, cu_labels, first_nodes
        if not with_gradient:
            return lattice.transducer_log_likelihood(*arguments)
        total, _, _ = lattice.transducer_occupancies(*arguments, in_place=True)
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
