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
from effasr_kernels.shared import lattice
from effasr_kernels.shared.lattice_losses import groups
from effasr_kernels.shared.ragged import widen
from effasr_kernels.transducer_loss import TransducerArguments, workspace
from effasr_kernels.transducer_loss.reference import differentiable_losses

_GROUP_BYTES = 32 * 2**20
"""Memory of a group for each thread. More is not faster, as allocating new memory takes time."""
_PLANE_BYTES = 12


def unsupported_reason(a: TransducerArguments) -> str | None:
    if a.durations is not None:
        return "does not support durations"
    return None


def run(a: TransducerArguments) -> Tensor:
    losses = _Losses(
        *(a.layout_frames, a.layout_targets, a.targets[: a.layout_targets.total].long()),
        *(a.blank_id, a.activation, a.fastemit, a.encoded.dtype),
    )
    return differentiable_losses(a, losses)


@dataclass(frozen=True, slots=True)
class _Losses:
    """See `shared.lattice_losses.Losses`; inputs are encoded, predicted, weight and bias."""

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
            stored_logits = logits[:size] if 0 < size <= logits.shape[0] else None
            joint = Joint(
                *(inputs, self.targets, self.blank_id, self.activation, self.dtype),
                *(planes[:, :size], stored_logits),
            )
            for sequence in group:
                for chunk in sequence.chunks(sum(weight.shape)):
                    joint.score(chunk)
            members = slice(group[0].number, group[-1].number + 1)
            losses[members] = 0 - self._sum_paths(members, joint.planes, bool(gradients))
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
                node_range = slice(node, node + nodes[n])
                yield Sequence(n, slice(rows_f[n], rows_f[n + 1]), states, labels, node_range)
                node = node_range.stop

        for begin, end in groups(nodes, _group_bytes() // (_PLANE_BYTES + 4 * count)):
            yield members(begin, end)

    def _clear(self, gradients: tuple[Tensor, ...]) -> None:
        """Set the gradients to zero; of packed inputs only in the tail, as they may alias."""
        if not gradients:
            return
        of_encoded, of_predicted, of_weight, of_bias = gradients
        of_encoded[self.frames.total :] = 0
        of_predicted[self.labels.total + self.labels.num_sequences :] = 0
        of_weight.zero_()
        of_bias.zero_()

    def _sum_paths(self, members: slice, planes: Tensor, with_gradient: bool) -> Tensor:
        """Return log-likelihoods, and replace log-probabilities of steps by their occupancies."""
        ends = slice(members.start, members.stop + 1)
        cu_frames, cu_labels = (x.cu_seqlens[ends].contiguous() for x in (self.frames, self.labels))
        first_nodes = lattice.node_offsets(cu_frames, cu_labels)[:-1]
        steps = planes[0], planes[1]
        occupancies = steps if with_gradient else None
        return lattice.transducer(*steps, cu_frames, cu_labels, first_nodes, occupancies)

    def _differentiate(
        self, joint: Joint, sequence: Sequence, gradients: tuple[Tensor, ...], scale: float
    ) -> None:
        """Write the gradient of a sequence's rows, and add to the gradients of weight and bias."""
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


_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Sequence:
    """The rows of a sequence, and its nodes relative to the first of its group."""

    number: int
    frames: slice
    states: slice
    labels: slice
    nodes: slice

    def chunks(self, width: int) -> Iterator[Chunk]:
        """Yield chunks of its frames in order, where a node needs ``width`` floats."""
        states = self.states.stop - self.states.start
        count = max(1, _CHUNK_BYTES // (4 * width * states))
        node = self.nodes.start
        for begin in range(self.frames.start, self.frames.stop, count):
            end = min(begin + count, self.frames.stop)
            nodes = slice(node, node + (end - begin) * states)
            yield Chunk(self, slice(begin, end), nodes, (end - begin, states))
            node = nodes.stop


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some frames of a sequence and their nodes; ``shape`` is (frames, states)."""

    sequence: Sequence
    frames: slice
    nodes: slice
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Joint:
    """The joint network, and the numbers of each node that are kept between the passes."""

    inputs: tuple[Tensor, ...]  # encoded, predicted, weight and bias
    targets: Tensor  # y, int64
    blank_id: int  # the blank's class
    activation: str  # ``"relu"`` or ``"tanh"``
    dtype: torch.dtype  # dtype to which the activation's output is rounded
    # float32 (3, nodes): the log-probabilities of blank and label, which the caller replaces by the
    # occupancies before `differentiate`; and the sum of the exponentials
    planes: Tensor
    logits: Tensor | None  # (nodes, V), exponentials of logits minus their maximum; None: recompute

    def score(self, chunk: Chunk) -> None:
        z = self._logits(self._join(chunk))
        blank = z[:, self.blank_id].clone()
        label = z.view(*chunk.shape, -1)[:, :-1].gather(2, self._columns(chunk))[..., 0]
        exponentials = torch.exp(z, out=z if self.logits is None else self.logits[chunk.nodes])
        log_blank, log_label, sums = self.planes[:, chunk.nodes]
        torch.sum(exponentials, -1, out=sums)
        log_sums = sums.log()
        torch.sub(blank, log_sums, out=log_blank)
        # The last state has no label.
        log_label.view(chunk.shape)[:, :-1] = label - log_sums.view(chunk.shape)[:, :-1]

    def differentiate(
        self, chunk: Chunk, gradients: tuple[Tensor, ...], scale: float, fastemit: float
    ) -> None:
        """Add a chunk to the gradients; the gradient of ``encoded`` is complete and is written."""
        of_encoded, of_states, of_weight, of_bias = gradients
        h = self._join(chunk)
        dz = self._logits(h).exp_() if self.logits is None else self.logits[chunk.nodes]
        took_blank, took_label, sums = self.planes[:, chunk.nodes]
        took_blank *= scale
        took_label *= scale * (1 + fastemit)
        dz *= ((took_blank + took_label) / sums)[:, None]
        dz[:, self.blank_id] -= took_blank
        of_labels = took_label.view(chunk.shape)[:, :-1, None]
        dz.view(*chunk.shape, -1)[:, :-1].scatter_add_(2, self._columns(chunk), -of_labels)
        of_weight.addmm_(dz.T, h)
        of_bias += dz.sum(0)
        da = dz @ self.inputs[2]
        if self.activation == "relu":
            da = torch.ops.aten.threshold_backward(da, h, 0)
        else:
            da = torch.ops.aten.tanh_backward(da, h)
        da = da.view(*chunk.shape, -1)
        of_states += da.sum(0)
        # May overwrite the rows of ``encoded``, which are no longer needed.
        of_encoded[chunk.frames] = da.sum(1)

    def _join(self, chunk: Chunk) -> Tensor:
        """The joint's output, (nodes, J)."""
        encoded, predicted, *_ = self.inputs
        h = widen(encoded[chunk.frames])[:, None] + widen(predicted[chunk.sequence.states])
        h = h.relu_() if self.activation == "relu" else h.tanh_()
        # Rounded like the output of a layer in that dtype.
        return h.to(self.dtype).to(h.dtype).flatten(0, 1)

    def _logits(self, h: Tensor) -> Tensor:
        """The logits, (nodes, V), minus the maximum of each node."""
        *_, weight, bias = self.inputs
        z = torch.addmm(bias, h, weight.T)
        z -= z.amax(-1, keepdim=True)
        return z

    def _columns(self, chunk: Chunk) -> Tensor:
        """The label of each node, without the last state, (frames, U, 1)."""
        return self.targets[chunk.sequence.labels].expand(chunk.shape[0], -1)[..., None]
