"""Rows of the joint and of its logits on a CPU, some frames of a sequence at a time.

Beside what it keeps for each node, a chunk needs little enough to stay in a core's cache.
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
    """Where a sequence is: its rows, and its nodes, counted from the first of its group."""

    number: int
    frames: slice
    states: slice
    labels: slice
    nodes: slice

    def chunks(self, width: int) -> Iterator[Chunk]:
        """Its frames in order, where a node makes ``width`` floats."""
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
    """Some frames of a sequence, and their nodes; ``shape`` counts frames and states."""

    sequence: Sequence
    frames: slice
    nodes: slice
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Joint:
    """The network, and what is kept of each node between the passes.

    Attributes:
        inputs: encoded, predicted, weight and bias.
        targets: y, int64.
        blank_id: The blank's class.
        activation: ``"relu"`` or ``"tanh"``.
        dtype: To which the activation's output is rounded.
        planes: float32 (3, nodes): log-probabilities of blank and label, in the place of which the
            probabilities of these steps are expected; and the sum of a node's exponentials.
        logits: (nodes, V), exponentials of logits below the largest; None to make them again.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    blank_id: int
    activation: str
    dtype: torch.dtype
    planes: Tensor
    logits: Tensor | None

    def score(self, chunk: Chunk) -> None:
        """Fill the planes, and the logits."""
        z = self._logits(self._join(chunk))
        blank = z[:, self.blank_id].clone()
        label = z.view(*chunk.shape, -1)[:, :-1].gather(2, self._columns(chunk))[..., 0]
        exponentials = torch.exp(z, out=z if self.logits is None else self.logits[chunk.nodes])
        log_blank, log_label, sums = self.planes[:, chunk.nodes]
        torch.sum(exponentials, -1, out=sums)
        log_sums = sums.log()
        torch.sub(blank, log_sums, out=log_blank)
        # In the last state there is no label.
        log_label.view(chunk.shape)[:, :-1] = label - log_sums.view(chunk.shape)[:, :-1]

    def differentiate(
        self, chunk: Chunk, gradients: tuple[Tensor, ...], scale: float, fastemit: float
    ) -> None:
        """Add to the gradients, but for that of ``encoded``, which is complete and is written.

        Args:
            chunk: Of which the planes hold probabilities; they and the logits are used up.
            gradients: Of encoded; of the sequence's rows of predicted; of weight; of bias.
            scale: Of the loss in the sum that is differentiated.
            fastemit: What labels count more.
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
        # Perhaps over the rows themselves, which nobody needs any more.
        of_encoded[chunk.frames] = da.sum(1)

    def _join(self, chunk: Chunk) -> Tensor:
        """The joint's output, (nodes, J)."""
        encoded, predicted, *_ = self.inputs
        h = widen(encoded[chunk.frames])[:, None] + widen(predicted[chunk.sequence.states])
        h = h.relu_() if self.activation == "relu" else h.tanh_()
        # As a layer of that dtype would, for a product of matrices.
        return h.to(self.dtype).to(h.dtype).flatten(0, 1)

    def _logits(self, h: Tensor) -> Tensor:
        """(nodes, V), less the largest of each node."""
        *_, weight, bias = self.inputs
        z = torch.addmm(bias, h, weight.T)
        z -= z.amax(-1, keepdim=True)
        return z

    def _columns(self, chunk: Chunk) -> Tensor:
        """The label that each node but those of the last state may emit, (frames, U, 1)."""
        return self.targets[chunk.sequence.labels].expand(chunk.shape[0], -1)[..., None]
