r"""`transducer_loss` in Triton, in memory that is flat in the batch size.

Forward, group by group of sequences, chunk by chunk of their lattices' nodes (`_plan`): the rows of
the joint's output and their logits of blank and label; their normalizers, from one pass over the
vocabulary that stores no logits; then the lattices of the group. Backward, the same way: how much
of the upstream gradient passes each step; the gradient of the chunk's logits, which are made again;
its products with weight and rows; and its sums over states and over frames. Gradients are computed
in the backward, so they are exact for any upstream gradient, and nobody waits for the GPU. The
joint's output is summed in float32 and rounded to the dtype of the arguments, as is the gradient of
the logits; products, normalizers and sums are float32.

With D columns, V classes and R nodes, products are 8 R D V operations, of which 2 R D V are logits
made again. Normalizers and shares of nodes are kept for the backward, 8 bytes for each node of the
static shape (frame rows times states of the longest transcript), if that fits in a quarter of the
workspace (`workspace.set_workspace`). If not, the backward makes them again, group by group: 10 R D
V operations; or 8 R D V, if the rounded logits of eight of the longest sequences fit in three
quarters of the workspace, where they are then kept from the one product to the next.

Peak memory, beside the arguments and their gradients: the workspace, and what is kept, at most a
quarter of it; 4 D V for the gradient of weight in float32; and for a sequence, or a frame, that is
larger than its part of the workspace, what that alone needs: 12 bytes for each node (16 where
nothing was kept), and 4 D + b (D + V) for each state of a frame, with b the bytes of an element.
Nothing grows with the number of sequences but their offsets.

The host divides the nodes, from lengths that it knows. In compiled code, and for a layout whose
offsets only the device knows, it waits for them, so a CUDA graph cannot hold this operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr_kernels.launch import refusal
from effasr_kernels.packed import PackedLayout
from effasr_kernels.transducer_loss._lattice import losses, occupancies
from effasr_kernels.transducer_loss._plan import Cost, most_nodes
from effasr_kernels.transducer_loss._sums import Sums
from effasr_kernels.transducer_loss._work import Work
from effasr_kernels.transducer_loss.registration import call
from effasr_kernels.transducer_loss.workspace import workspace


def why_not(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    weight: Tensor,
    bias: Tensor,
    *,
    blank_id: int,
    activation: str,
    fastemit: float,
    durations: tuple[int, ...] | None = None,
    sigma: float = 0.0,
) -> str | None:
    """Any shape is served; durations are not."""
    if durations is not None:
        return "durations are the reference's alone"
    return refusal(encoded, predicted, weight, bias)


def forward(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    weight: Tensor,
    bias: Tensor,
    *,
    blank_id: int,
    activation: str,
    fastemit: float,
    durations: tuple[int, ...] | None = None,
    sigma: float = 0.0,
) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
    """See `effasr_kernels.transducer_loss.transducer_loss`; saves what `saved_like` lists."""
    tensors = encoded, predicted, targets, weight, bias
    work = Work(tensors, layout_frames, layout_targets, blank_id, activation)
    loss = weight.new_empty(layout_frames.num_sequences, dtype=torch.float32)
    saved = saved_like(encoded, predicted, targets, layout_frames, layout_targets)
    keeps = saved[0].numel() > 0
    groups = work.groups(Cost(node=12), work.row_bytes())
    rows = work.rows(groups)
    for group in groups:
        log_blank, log_label = work.plane(group), work.plane(group)
        kept = saved[0][group.first_node :] if keeps else None
        work.score(group, rows, log_blank, log_label, kept)
        share, base = (saved[1], 0) if keeps else (log_blank, group.first_node)
        planes = log_blank, log_label, share
        losses(group, work.offsets, *planes, base, loss, layout_targets.bound)
    return (loss,), saved


def saved_like(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    *_: object,
    **__: object,
) -> tuple[Tensor, Tensor]:
    """Empty tensors like what `forward` saves, both float32: normalizers and shares of nodes.

    Both have room for the nodes of the static shape, or none where that is too much, or unknown.
    """
    nodes = most_nodes(layout_frames, layout_targets)
    fits = nodes is not None and 8 * nodes <= workspace() // 4
    size = nodes if nodes is not None and fits else 0
    normalizer, share = (encoded.new_empty(size, dtype=torch.float32) for _ in range(2))
    return normalizer, share


def backward(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    weight: Tensor,
    bias: Tensor,
    *,
    blank_id: int,
    activation: str,
    fastemit: float,
    durations: tuple[int, ...] | None = None,
    sigma: float = 0.0,
) -> dict[str, Tensor | None]:
    """The gradients of ``encoded``, ``predicted``, ``weight`` and ``bias``."""
    tensors = encoded, predicted, targets, weight, bias
    work = Work(tensors, layout_frames, layout_targets, blank_id, activation)
    kept = saved[0].numel() > 0
    keeps_logits = not kept and work.logits_fit()
    logit_bytes = work.logit_bytes
    groups = work.groups(
        Cost(12 + 4 * (not kept) + keeps_logits * logit_bytes, state=4 * work.width),
        work.gradient_cost(0 if keeps_logits else logit_bytes),
        swapped=keeps_logits,
    )
    rows = work.rows(groups)
    sums = Sums(work, groups, rows)
    # Where the same is computed again, results stay as they are.
    loss = results[0] if kept else torch.empty_like(results[0])
    for group in groups:
        occ_blank, occ_label = work.plane(group), work.plane(group)
        normalizer, share, base = saved[0], saved[1], 0
        logits = None
        if not kept:
            normalizer, share, base = work.plane(group), occ_blank, group.first_node
            if keeps_logits:
                logits = work.logits(group.nodes)
            work.score(group, rows, occ_blank, occ_label, normalizer, logits)
            planes = occ_blank, occ_label, share
            losses(group, work.offsets, *planes, base, loss, layout_targets.bound)
        occupancies(
            group,
            work.offsets,
            *(share, base, loss, grads[0], occ_blank, occ_label),
            layout_targets.bound,
            fastemit,
        )
        sums.add(group, occ_blank, occ_label, normalizer, base, logits)
    return sums.gradients()


run = call.kernel(__name__, forward, backward)
