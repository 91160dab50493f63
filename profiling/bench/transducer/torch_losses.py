"""Ways to a transducer's loss that need torch alone: dense, by sub-batches, by tiles of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from bench.contender import Contender, leaf
from bench.transducer.batch import Batch, Padded
from bench.transducer.lattice import Nodes
from effasr_kernels import PackedLayout


@dataclass(frozen=True)
class Part:
    """Some utterances of a padded batch.

    Attributes:
        nodes: Nodes of their lattices.
        targets: (b, U), int64, no longer than the longest of them.
        frame_counts: (b,), int32.
        label_counts: (b,), int32.
        blank_id: The blank's class.
    """

    nodes: Nodes
    targets: Tensor
    frame_counts: Tensor
    label_counts: Tensor
    blank_id: int

    def classes(self, shape: torch.Size) -> Tensor:
        """Return the label of each node (b, t, u), int64 (b, T, U + 1, 1); 0 for none."""
        return F.pad(self.targets, (0, 1))[:, None, :, None].expand(*shape[:3], 1)

    def index(self, shape: torch.Size) -> Tensor:
        """Index of each packed node in the padded shape (b, T, U + 1, ...)."""
        sequence, frame, state = self.nodes.places(0, self.nodes.count)
        return (sequence * shape[1] + frame) * shape[2] + state


Loss = Callable[[Tensor, Part], Tensor]
"""Computes losses (b,) from logits (b, T, U + 1, V)."""


def padded(
    batch: Batch, loss: Loss, *, size: int | None = None, dtype: torch.dtype | None = None
) -> Contender:
    """Joint and projection of padded tensors, then a loss; of sub-batches where ``size`` is given.

    The latter is how NeMo bounds the joint (``fused_batch_size``): a Python loop over the batch,
    each sub-batch cut to its longest utterance, one backward in the end.
    """
    whole = Padded(batch, dtype)
    parts, bounds = [], []
    sequences = batch.frames.num_sequences
    for begin in range(0, sequences, size or sequences):
        span = slice(begin, begin + (size or sequences))
        layouts = [
            PackedLayout.from_lengths(layout.lengths[span], batch.encoded.device)
            for layout in (batch.frames, batch.labels)
        ]
        longest = [layout.max_seqlen for layout in layouts]
        bounds.append((span, *longest))
        parts.append(
            Part(
                Nodes(*layouts),
                whole.targets[span, : longest[1]].contiguous(),
                whole.frame_counts[span],
                whole.label_counts[span],
                batch.blank_id,
            )
        )

    def call() -> Tensor:
        encoded, predicted, weight, bias = whole.leaves.values()
        losses = []
        for (span, frames, labels), part in zip(bounds, parts, strict=True):
            f, g = encoded[span, :frames, None], predicted[span, None, : labels + 1]
            losses.append(loss(F.linear((f + g).relu_(), weight, bias), part).float())
        return torch.cat(losses)

    return Contender(whole.leaves, call, [batch.upstream], whole.packed)


def plain(logits: Tensor, part: Part) -> Tensor:
    """Compute losses with autograd: log-probabilities of all classes, then blank and label."""
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    labels = log_probs.gather(3, part.classes(logits.shape))
    index = part.index(logits.shape)
    planes = (x.flatten().index_select(0, index) for x in (log_probs[..., part.blank_id], labels))
    return part.nodes.losses(*planes)


def merged(logits: Tensor, part: Part) -> Tensor:
    """Compute losses as NeMo's numba loss: float32, with the logits' gradient in the forward."""
    return _Merged.apply(logits.float(), part)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: Part) -> Tensor:  # type: ignore[override]
        gradient = logits - logits.logsumexp(-1, keepdim=True)
        classes, index = part.classes(logits.shape), part.index(logits.shape)
        planes = gradient[..., part.blank_id], gradient.gather(3, classes)
        losses, *occupied = part.nodes.occupancies(*(x.flatten()[index] for x in planes))
        if not ctx.needs_input_grad[0]:
            return losses
        blank, label = (
            x.new_zeros(logits.shape[:3].numel()).index_copy_(0, index, x).view(*logits.shape[:3])
            for x in occupied
        )
        gradient.exp_().mul_((blank + label)[..., None])
        gradient[..., part.blank_id] -= blank
        gradient.scatter_add_(3, classes, -label[..., None])
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * grad.view(-1, 1, 1, 1), None


def chunked(batch: Batch, rows: int) -> Contender:
    """Return NVIDIA's FlashRNNT as described: packed rows in tiles, recomputed in the backward.

    Only one tile's joint output and logits exist at a time. Log-probabilities of blank and label
    are kept, and the gradient overwrites the logits. As in FlashRNNT, each tile adds float32
    gradients of the whole batch's inputs. Its Triton kernels are compiled torch code here.
    """
    leaves = {name: leaf(x) for name, x in batch.leaves.items()}
    nodes = batch.nodes
    starts = [layout.cu_seqlens.long() for layout in (batch.frames, batch.labels)]
    targets = F.pad(batch.targets, (0, 1))

    def tile(
        encoded: Tensor, predicted: Tensor, weight: Tensor, bias: Tensor, begin: int, end: int
    ) -> tuple[Tensor, Tensor]:
        sequence, frame, state = nodes.places(begin, end)
        label = starts[1][sequence] + state
        hidden = _Join.apply(encoded, predicted, starts[0][sequence] + frame, label + sequence)
        # In the last state there is no label; which is scored then does not matter.
        return _Score.apply(F.linear(hidden, weight, bias), targets[label], batch.blank_id)

    def call() -> Tensor:
        planes = [
            checkpoint(
                tile,
                *leaves.values(),
                begin,
                min(begin + rows, nodes.count),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for begin in range(0, nodes.count, rows)
        ]
        return nodes.losses(*(torch.cat(tiles) for tiles in zip(*planes, strict=True)))

    return Contender(leaves, call, [batch.upstream])


class _Join(torch.autograd.Function):
    """The rows of the joint's output."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, encoded: Tensor, predicted: Tensor, frame: Tensor, state: Tensor
    ) -> Tensor:
        hidden = encoded.index_select(0, frame).add_(predicted.index_select(0, state)).relu_()
        ctx.save_for_backward(hidden, frame, state)
        ctx.rows = encoded.shape[0], predicted.shape[0]
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, *places = ctx.saved_tensors
        wide = grad.float().mul_(hidden > 0)
        sums = (
            wide.new_zeros(rows, wide.shape[1]).index_add_(0, place, wide).to(grad.dtype)
            for rows, place in zip(ctx.rows, places, strict=True)
        )
        return *sums, None, None


class _Score(torch.autograd.Function):
    """Log-probabilities of blank and label, float32; the logits' gradient takes their place."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, label: Tensor, blank_id: int
    ) -> tuple[Tensor, Tensor]:
        normalizer = _compiled(_normalizer, logits.is_cuda)(logits.detach())
        ctx.save_for_backward(logits, label, normalizer)
        ctx.blank_id = blank_id
        of_label = logits.gather(1, label[:, None])[:, 0]
        return logits[:, blank_id].float() - normalizer, of_label.float() - normalizer

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        logits, label, normalizer = ctx.saved_tensors
        gradient = logits.detach()
        write = _compiled(_write_gradient, logits.is_cuda)
        write(gradient, label, normalizer, *grads, ctx.blank_id)
        return gradient, None, None


def _normalizer(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(-1)


def _write_gradient(
    logits: Tensor, label: Tensor, normalizer: Tensor, blanks: Tensor, labels: Tensor, blank_id: int
) -> None:
    column = torch.arange(logits.shape[1], device=logits.device)
    gradient = (logits.float() - normalizer[:, None]).exp() * -(blanks + labels)[:, None]
    gradient += torch.where(column == blank_id, blanks[:, None], 0.0)
    gradient += torch.where(column == label[:, None], labels[:, None], 0.0)
    logits.copy_(gradient)


@cache
def _compiled(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    """Fused where that pays; the last tile has fewer rows."""
    return torch.compile(function, dynamic=True) if on_gpu else function
