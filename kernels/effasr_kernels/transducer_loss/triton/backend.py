r"""`transducer_loss` in Triton, in memory that does not grow with the batch size.

The forward processes groups of sequences in chunks of their lattices' nodes (`plan`). For each
chunk it computes the rows of the joint's output and their logits of blank and label; their
normalizers, in one pass over the vocabulary that stores no logits; and the log-probabilities of
durations, if any. Then it sums the lattices of the group (`lattice` or `duration_lattice`). The
backward uses the same groups and chunks: it computes the occupancies of the steps, weighted by the
upstream gradient; the gradient of the chunk's logits, which are recomputed; its products with
weight and rows; and its sums over states and over frames. Gradients are computed in the backward,
so they are exact for any upstream gradient, need no synchronization, and may overwrite the inputs:
the chunk that writes a frame's gradient, and the group that writes a state's gradient, are the
last to read it. The joint's output is summed in float32 and rounded to the dtype of the arguments,
as is the gradient of the logits; products, normalizers and sums are float32.

With J columns, C rows of the weight (V classes and D durations) and R nodes, products are 8 R J C
operations, of which 2 R J C recompute logits. If they fit in a quarter of the workspace
(`set_workspace`), normalizers and shares of nodes are kept for the backward: 8 bytes for
each node of the static shape (frame rows times states of the longest transcript), or 20 + 4 D with
durations: their backward needs log-probabilities and masses. Otherwise the backward recomputes
them, group by group, with 10 R J C operations; or with 8 R J C, if the rounded logits of eight of
the longest sequences fit in three quarters of the workspace, where they are then kept between the
two products.

Peak memory, beside the arguments and their gradients (overwritten inputs need no gradient): the
workspace; the kept numbers, at most a quarter of it; 4 J C bytes for the gradient of weight in
float32; and for a sequence or a frame that is larger than its part of the workspace, 12 bytes for
each node (16 if nothing was kept; with durations 16 + 4 D and 20 + 4 D) and 4 J + b (J + C) for
each state of a frame, with b the bytes of an element. Only offsets grow with the number of
sequences.

Without ``max_nodes`` the host divides the nodes by the lengths. In compiled code, and for a layout
whose offsets are only on the device, it waits for them, so a CUDA graph cannot contain the call.

With ``max_nodes``, P, the device divides them (`division`), and the host reads no length. All
sequences are one group, and normalizers and shares are always kept, so the memory beside the
workspace is 16 P bytes, or (36 + 8 D) P with durations. Products have rows for P nodes and, for
each chunk, one row less than the states of the longest transcript; rows past the last node are
zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.transducer_loss import TransducerArguments, workspace
from effasr_kernels.transducer_loss.triton.duration_lattice import LONGEST, DurationSweeps
from effasr_kernels.transducer_loss.triton.lattice import LabelSweeps
from effasr_kernels.transducer_loss.triton.plan import Cost, Scores, Trace, most_nodes
from effasr_kernels.transducer_loss.triton.sums import Sums
from effasr_kernels.transducer_loss.triton.work import Work


def unsupported_reason(a: TransducerArguments) -> str | None:
    if a.durations is not None and a.durations[-1] > LONGEST:
        return f"supports durations of up to {LONGEST} frames, not {a.durations[-1]}"
    return None


def _kind(a: TransducerArguments) -> type[LabelSweeps] | type[DurationSweeps]:
    return LabelSweeps if a.durations is None else DurationSweeps


def _sweeps(a: TransducerArguments, work: Work) -> LabelSweeps | DurationSweeps:
    return _kind(a)(work.offsets, work.bound, a.fastemit, work.durations)


def forward(a: TransducerArguments) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    """Saves what `saved_like` lists."""
    work = Work(a)
    sweeps = _sweeps(a, work)
    loss = a.weight.new_empty(a.layout_frames.num_sequences, dtype=torch.float32)
    saved = saved_like(a)
    normalizer, trace, kept_scores = _unpack(sweeps, saved)
    groups = work.groups(Cost(work.score_bytes(sweeps.trace_dtype)), work.row_bytes())
    rows = work.rows(groups)
    for group in groups:
        scores = kept_scores or work.scores(group)
        at = group.first_node
        work.score(group, rows, scores, None if normalizer is None else normalizer[at:])
        sweeps.losses(group, scores, trace or sweeps.room(scores), loss)
    return (loss,), saved


def saved_like(a: TransducerArguments) -> tuple[Tensor, ...]:
    """Empty tensors for what `forward` saves: normalizers, then the trace and scores of the sweeps.

    They have an element for each node of the static shape; none if that is too large or unknown.
    """
    sweeps, nodes = _kind(a), a.max_nodes
    if nodes is None:
        nodes = most_nodes(a.layout_frames, a.layout_targets)
    sizes: list[tuple[tuple[int, ...], torch.dtype]]
    sizes = [((), torch.float32), ((), sweeps.trace_dtype)]
    if sweeps.keeps_scores:
        sizes += [((), torch.float32)] * 2
        if a.durations is not None:
            sizes.append(((len(a.durations),), torch.float32))
    each = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in sizes)
    fits_workspace = nodes is not None and each * nodes <= workspace() // 4
    # With a capacity for nodes everything is in one group, whatever its size.
    size = nodes if nodes is not None and (fits_workspace or a.max_nodes is not None) else 0
    return tuple(a.encoded.new_empty(size, *shape, dtype=dtype) for shape, dtype in sizes)


def _unpack(
    sweeps: LabelSweeps | DurationSweeps, saved: Sequence[Tensor]
) -> tuple[Tensor | None, Trace | None, Scores | None]:
    """The normalizers, trace and scores in ``saved``; None for those that were not kept."""
    normalizer, trace, *score_planes = saved
    if not normalizer.numel():
        return None, None, None
    return normalizer, Trace(0, trace), Scores(0, *score_planes) if sweeps.keeps_scores else None


def backward(a: TransducerArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    work = Work(a)
    sweeps = _sweeps(a, work)
    normalizer, trace, kept_scores = _unpack(sweeps, saved)
    keeps_logits = normalizer is None and work.logits_fit()
    logit_bytes = work.logit_bytes
    node_bytes = 4 + work.score_bytes(None if trace else sweeps.trace_dtype)
    groups = work.groups(
        Cost(node_bytes + keeps_logits * logit_bytes, state=4 * work.width),
        work.gradient_cost(0 if keeps_logits else logit_bytes),
        swapped=keeps_logits,
    )
    rows = work.rows(groups)
    sums = Sums(work, groups, rows, a.overwritten)
    # If the losses are computed again, they must not overwrite the results.
    loss = torch.empty_like(results[0]) if normalizer is None else results[0]
    for group in groups:
        passing = work.scores(group)
        logits = None
        if normalizer is None or trace is None:
            if keeps_logits:
                logits = work.logits(group.nodes)
            normalizers, base, scores = work.plane(group), group.first_node, passing
            work.score(group, rows, scores, normalizers, logits)
            group_trace = sweeps.room(scores)
            sweeps.losses(group, scores, group_trace, loss)
        else:
            normalizers, base, scores, group_trace = normalizer, 0, kept_scores or passing, trace
        sweeps.occupancies(group, scores, group_trace, loss, grads[0], passing)
        sums.add(group, passing, normalizers, base, logits)
    return sums.gradients()
