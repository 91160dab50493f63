"""The joint network and its logits on a CPU, in chunks of frames of a sequence.

The temporary tensors of a chunk fit in a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.shared.ragged import widen

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
    """The joint network, and the numbers of each node that are kept between the passes.

    Attributes:
        inputs: encoded, predicted, weight and bias.
        targets: y, int64.
        blank_id: The blank's class.
        activation: ``"relu"`` or ``"tanh"``.
        dtype: Dtype to which the activation's output is rounded.
        planes: float32 (3, nodes): the log-probabilities of blank and label, which the caller
            replaces by the occupancies before `differentiate`; and the sum of the exponentials.
        logits: (nodes, V), exponentials of the logits minus their maximum; None to recompute them.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    blank_id: int
    activation: str
    dtype: torch.dtype
    planes: Tensor
    logits: Tensor | None

    def score(self, chunk: Chunk) -> None:
        """Compute the planes and the logits of a chunk."""
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
        """Add a chunk to the gradients; that of ``encoded`` is complete and is written.

        Args:
            chunk: A chunk whose planes hold occupancies. They and the logits are overwritten.
            gradients: Gradients of encoded, the sequence's rows of predicted, weight and bias.
            scale: Weight of the loss in the sum that is differentiated.
            fastemit: Lambda of FastEmit.
        """
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
        """The label of each node except those of the last state, (frames, U, 1)."""
        return self.targets[chunk.sequence.labels].expand(chunk.shape[0], -1)[..., None]
