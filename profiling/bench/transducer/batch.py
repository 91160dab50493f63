"""A batch of utterances for a transducer, packed and padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bench.contender import Padding
from bench.transducer.lattice import Nodes
from bench.workload import Workload
from effasr_kernels import PackedLayout


@dataclass(frozen=True)
class Batch:
    """Inputs of every contender; no utterance is empty.

    Attributes:
        frames: T_n, and where they are in ``encoded``.
        labels: U_n, and where they are in ``targets``.
        encoded: f, (T, J), a leaf.
        predicted: g, (U + N, J), a leaf.
        targets: y, (U,), int64.
        weight: W, (V, J), a leaf; (V + D, J) with durations.
        bias: b, (V,), a leaf; (V + D,) with durations.
        durations: The D of a TDT, in frames; none of an RNN-T.
    """

    frames: PackedLayout
    labels: PackedLayout
    encoded: Tensor
    predicted: Tensor
    targets: Tensor
    weight: Tensor
    bias: Tensor
    durations: tuple[int, ...] = ()

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Tensors that get a gradient, by name."""
        return {
            "encoded": self.encoded,
            "predicted": self.predicted,
            "weight": self.weight,
            "bias": self.bias,
        }

    @property
    def blank_id(self) -> int:
        """The last class, as most peers require."""
        return self.weight.shape[0] - len(self.durations) - 1

    @property
    def upstream(self) -> Tensor:
        """The gradient of each loss."""
        return torch.ones(self.frames.num_sequences, device=self.encoded.device)

    @property
    def padded_logits(self) -> int:
        """Number of logits with padding."""
        sequences, classes = self.frames.num_sequences, self.weight.shape[0]
        return sequences * self.frames.max_seqlen * (self.labels.max_seqlen + 1) * classes

    @cached_property
    def nodes(self) -> Nodes:
        """Nodes of the lattices."""
        return Nodes(self.frames, self.labels)


def draw(
    workload: Workload,
    frames: Sequence[int],
    labels: Sequence[int],
    joint: int,
    classes: int,
    durations: tuple[int, ...] = (),
) -> Batch:
    """Return a batch of these lengths, equal in every run; the rest as the workload has it."""
    device, total, rows = workload.device, sum(labels), classes + len(durations)
    generator = torch.Generator(device).manual_seed(4)
    scale = joint**-0.5
    return Batch(
        PackedLayout.from_lengths(frames, device),
        PackedLayout.from_lengths(labels, device),
        workload.draw(sum(frames), joint),
        workload.draw(total + len(labels), joint),
        torch.randint(classes - 1, (total,), device=device, generator=generator),
        workload.draw(rows, joint, scale=scale),
        workload.draw(rows, scale=scale),
        durations,
    )


class Padded:
    """The same batch padded to its longest utterance, in a separate dtype.

    Attributes:
        leaves: Tensors of the batch that get a gradient, padded: f (B, T, J) and g (B, U + 1, J).
        targets: (B, U), int64.
        frame_counts: (B,), int32.
        label_counts: (B,), int32.
    """

    def __init__(self, batch: Batch, dtype: torch.dtype | None = None):
        """Copy the batch, outside of what is timed."""
        self._frames, self._states = Padding(batch.frames), Padding(batch.labels.lengthened(1))
        of = {"encoded": self._frames, "predicted": self._states}
        dtype = batch.encoded.dtype if dtype is None else dtype
        self.leaves = {
            name: (of[name].pad(x) if name in of else x.detach().clone()).to(dtype).requires_grad_()
            for name, x in batch.leaves.items()
        }
        padded = batch.targets.new_zeros(batch.labels.num_sequences, batch.labels.max_seqlen)
        column = torch.arange(padded.shape[1], device=padded.device)
        padded[column < batch.nodes.states[:, None] - 1] = batch.targets
        self.targets = padded
        self.frame_counts = self._frames.lengths.int()
        self.label_counts = (self._states.lengths - 1).int()

    def packed(self, name: str, x: Tensor) -> Tensor:
        """Return the inverse, for a result or a gradient."""
        padding = {"encoded": self._frames, "predicted": self._states}.get(name)
        return x if padding is None else padding.pack(x)
