"""Forward and backward of `transducer_loss` on a GPU, whatever sums the lattices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.transducer_loss._plan import Cost, most_nodes
from effasr_kernels.transducer_loss._sums import Sums
from effasr_kernels.transducer_loss._sweeps import Scores, Sweeps, Trace
from effasr_kernels.transducer_loss._work import Work
from effasr_kernels.transducer_loss.workspace import workspace

Kind = Callable[[tuple[int, ...] | None], type[Sweeps]]
"""Which sweeps serve some durations."""


def forward(
    kind: Kind,
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
    overwritten: tuple[str, ...] = (),
) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    """See `effasr_kernels.transducer_loss.transducer_loss`; saves what `saved_like` lists."""
    tensors = encoded, predicted, targets, weight, bias
    layouts = layout_frames, layout_targets
    work = Work(tensors, *layouts, blank_id, activation, fastemit, durations or (), sigma)
    sweeps = kind(durations)(work)
    loss = weight.new_empty(layout_frames.num_sequences, dtype=torch.float32)
    saved = saved_like(kind, encoded, predicted, targets, *layouts, durations=durations)
    normalizer, trace, kept = _unpack(sweeps, saved)
    groups = work.groups(Cost(work.score_bytes(sweeps.trace_dtype)), work.row_bytes())
    rows = work.rows(groups)
    for group in groups:
        scores = kept or work.scores(group)
        at = group.first_node
        work.score(group, rows, scores, None if normalizer is None else normalizer[at:])
        sweeps.losses(group, scores, trace or sweeps.room(scores), loss)
    return (loss,), saved


def saved_like(
    kind: Kind,
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    *_: object,
    durations: tuple[int, ...] | None = None,
    **__: object,
) -> tuple[Tensor, ...]:
    """Empty tensors like what `forward` saves: of nodes, normalizers, then what sweeps need again.

    All have room for the nodes of the static shape, or none where that is too much, or unknown.
    """
    sweeps, nodes = kind(durations), most_nodes(layout_frames, layout_targets)
    sizes: list[tuple[tuple[int, ...], torch.dtype]] = [((), torch.float32)]
    if sweeps.trace_dtype is not None:
        sizes.append(((), sweeps.trace_dtype))
    if sweeps.keeps_scores:
        sizes += [((), torch.float32)] * 2
        if durations is not None:
            sizes.append(((len(durations),), torch.float32))
    each = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in sizes)
    size = nodes if nodes is not None and each * nodes <= workspace() // 4 else 0
    return tuple(encoded.new_empty(size, *shape, dtype=dtype) for shape, dtype in sizes)


def _unpack(
    sweeps: Sweeps, saved: Sequence[Tensor]
) -> tuple[Tensor | None, Trace | None, Scores | None]:
    """Normalizers, trace and scores that are kept for the backward, as far as they are."""
    normalizer, *rest = saved
    if not normalizer.numel():
        return None, None, None
    trace = Trace(0, normalizer if sweeps.trace_dtype is None else rest.pop(0))
    return normalizer, trace, Scores(0, *rest) if sweeps.keeps_scores else None


def backward(
    kind: Kind,
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
    overwritten: tuple[str, ...] = (),
) -> dict[str, Tensor | None]:
    """The gradients of ``encoded``, ``predicted``, ``weight`` and ``bias``."""
    tensors = encoded, predicted, targets, weight, bias
    layouts = layout_frames, layout_targets
    work = Work(tensors, *layouts, blank_id, activation, fastemit, durations or (), sigma)
    sweeps = kind(durations)(work)
    normalizer, trace, kept = _unpack(sweeps, saved)
    keeps_logits = normalizer is None and work.logits_fit()
    logit_bytes = work.logit_bytes
    node_bytes = 4 + work.score_bytes(None if trace else sweeps.trace_dtype) + sweeps.scratch_bytes
    groups = work.groups(
        Cost(node_bytes + keeps_logits * logit_bytes, state=4 * work.width),
        work.gradient_cost(0 if keeps_logits else logit_bytes),
        swapped=keeps_logits,
    )
    rows = work.rows(groups)
    sums = Sums(work, groups, rows, overwritten)
    # Where the same is computed again, results stay as they are.
    loss = torch.empty_like(results[0]) if normalizer is None else results[0]
    for group in groups:
        passing = work.scores(group)
        logits = None
        if normalizer is None or trace is None:
            if keeps_logits:
                logits = work.logits(group.nodes)
            own, base, scores = work.plane(group), group.first_node, passing
            work.score(group, rows, scores, own, logits)
            left = sweeps.room(scores)
            sweeps.losses(group, scores, left, loss)
        else:
            own, base, scores, left = normalizer, 0, kept or passing, trace
        sweeps.occupancies(group, scores, left, loss, grads[0], passing)
        sums.add(group, passing, own, base, logits)
    return sums.gradients()
