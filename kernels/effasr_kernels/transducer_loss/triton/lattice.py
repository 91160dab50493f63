r"""The forward and backward recursions of a transducer's lattice, with one program per sequence.

Node (t, u) is entered by the blank of (t - 1, u) or by the label of (t, u - 1). Of its mass

.. math::
    \alpha_{t,u} = \alpha_{t-1,u} \, b_{t-1,u} + \alpha_{t,u-1} \, l_{t,u-1}

the *share* of the smaller term is stored, negative if it is the label's. The backward needs nothing
else: it starts with the whole mass in the last blank, and divides the occupancy of a node among its
predecessors by these shares. So it computes products of numbers in [0, 1], without exponentials,
and the sum over an anti-diagonal is constant except for rounding. Masses are logarithms in float64;
exponentials and logarithms are computed only of their differences, in float32, as in
`effasr_kernels.ctc_loss`.

A program holds an anti-diagonal of ``BLOCK`` states in registers, and processes a longer transcript
in strips of this many states. A strip writes one number for each frame to memory, for the next.
"""

# pyright: reportGeneralTypeIssues=false
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import launch
from effasr_kernels.shared.logarithm import log2_of_more
from effasr_kernels.transducer_loss.triton.plan import Group, Scores, Trace

_NARROWEST, _WIDEST = 64, 1024
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NOTHING = tl.constexpr(-1e30)
"""The logarithm of zero mass; finite, as the difference of two infinities is NaN."""
_NO_SHARE = tl.constexpr(1e-37)
"""A share of zero; not 0, as it needs a sign."""


class LabelSweeps:
    """The recursions of an RNN-T; `duration_lattice.DurationSweeps` has the same methods."""

    trace_dtype: ClassVar[torch.dtype] = torch.float32  # of a share for each node
    keeps_scores: ClassVar[bool] = False  # whether the backward needs log-probabilities again

    def __init__(
        self,
        offsets: tuple[Tensor, Tensor, Tensor],  # of frames, targets (int32) and nodes (int64)
        bound: int,  # upper bound of the transcripts' lengths
        fastemit: float,
        durations: tuple[int, ...] = (),
    ):
        self._offsets, self._fastemit, self._options = offsets, fastemit, _strip(bound)

    def room(self, scores: Scores) -> Trace:
        """A buffer for a trace that is used only with ``scores`` and may overwrite some of them."""
        return Trace(scores.base, scores.blank)

    def losses(self, group: Group, scores: Scores, trace: Trace, loss: Tensor) -> None:
        """Write the loss of each sequence, float32 (N,), and the trace of the group's nodes."""
        edge = scores.blank.new_empty(group.frames, dtype=torch.float64)
        launch(
            sweep_forward,
            (group.sequences,),
            *(scores.blank, scores.label, *self._offsets, trace.values, edge, loss),
            *(group.first_sequence, group.first_frame, group.first_node, trace.base),
            **self._options,
        )

    def occupancies(
        self,
        group: Group,
        scores: Scores,  # the log-probabilities given to `losses`, if ``keeps_scores``
        trace: Trace,  # the trace that `losses` wrote
        loss: Tensor,  # float32 (N,)
        grad_loss: Tensor,  # float32 (N,); treated as zero for an infinite loss
        out: Scores,  # of the group's nodes, written; maybe ``scores``
    ) -> None:
        """Compute the occupancies of the steps, weighted by the gradient of the losses."""
        edge = out.blank.new_empty(group.frames, dtype=torch.float64)
        launch(
            sweep_backward,
            (group.sequences,),
            *(trace.values, *self._offsets, loss, grad_loss, out.blank, out.label, edge),
            *(group.first_sequence, group.first_frame, group.first_node, trace.base),
            float(1 + self._fastemit),
            **self._options,
        )


def _strip(bound: int) -> dict[str, int]:
    """Options of the launch: states of a strip, two per thread with up to 16 warps."""
    block = min(_WIDEST, max(_NARROWEST, 1 << bound.bit_length()))
    return {"num_warps": max(1, min(16, block // 64)), "num_stages": 1, "BLOCK": block, "STAGES": 4}


@triton.jit
def _merge(x, y):
    """The logarithm of 2**x + 2**y, float64, and the smaller share, float32, negative for y's."""
    small = tl.exp2((-tl.abs(x - y)).to(tl.float32))
    share = small / (1.0 + small)
    share = tl.where(share < _NO_SHARE, _NO_SHARE, share)
    return tl.maximum(x, y) + log2_of_more(small).to(tl.float64), tl.where(x >= y, -share, share)


@triton.jit
def _log2(log_probability):
    scaled = log_probability.to(tl.float64) * _LOG2E
    return tl.where(scaled < _NOTHING, _NOTHING, scaled)


@triton.jit
def _extent(offsets, n):
    begin = tl.load(offsets + n)
    return begin, tl.load(offsets + n + 1) - begin


@triton.jit(do_not_specialize=["first_sequence", "first_frame", "first_node", "share_base"])
def sweep_forward(
    log_blank,
    log_label,
    cu_frames,
    cu_targets,
    first_nodes,
    share,
    edge,
    loss,
    first_sequence,
    first_frame,
    first_node,
    share_base,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the loss of one sequence and the share of each node."""
    # ``edge``, float64, is a buffer with the mass that each of the group's frames passes to the
    # next strip.
    n = first_sequence + tl.program_id(0)
    frame, frames = _extent(cu_frames, n)
    _, labels = _extent(cu_targets, n)
    node = tl.load(first_nodes + n)
    to_share = node - share_base
    node -= first_node
    edge += frame - first_frame
    states = labels + 1
    j = tl.arange(0, BLOCK)
    left_lane = tl.maximum(j - 1, 0)
    nothing = tl.full((BLOCK,), _NOTHING, tl.float64)
    # Without frames only an empty transcript has a path: its start is its end.
    ended = tl.where((frames == 0) & (labels == 0) & (j == 0), 0.0, nothing)
    for first in range(0, tl.where(frames == 0, 0, states), BLOCK):
        u = first + j
        # Mass that the blank passes to the next frame, and the label to the next state.
        stay = tl.where(u == 0, 0.0, nothing)
        emit = nothing
        steps = frames + tl.minimum(BLOCK, states - first) - 1
        for d in tl.range(0, steps, num_stages=STAGES):
            t = d - j
            is_node = (t >= 0) & (t < frames) & (u < states)
            index = tl.where(is_node, t, 0).to(tl.int64) * states + u
            blank = tl.load(log_blank + node + index, mask=is_node, other=0.0)
            label = tl.load(log_label + node + index, mask=is_node & (u < labels), other=0.0)
            comes = tl.where(j > 0, tl.gather(emit, left_lane, 0), nothing)
            if first > 0:
                crossing = tl.load(edge + d, mask=d < frames, other=_NOTHING)
                comes = tl.where(j > 0, comes, crossing)
            mass, smaller = _merge(stay, comes)
            tl.store(share + to_share + index, smaller, mask=is_node)
            mass = tl.where(is_node, mass, nothing)
            stay = mass + _log2(blank)
            emit = tl.where(u < labels, mass + _log2(label), nothing)
            ended = tl.where((t == frames - 1) & (u == labels), stay, ended)
            tl.store(edge + t, emit, mask=is_node & (j == BLOCK - 1))
        tl.debug_barrier()
    is_end = tl.where(frames == 0, 0, labels % BLOCK) == j
    mass = tl.sum(tl.where(is_end, ended, 0.0), axis=0)
    # A mass below this bound means that no path exists. A loss of NaN stays NaN.
    tl.store(loss + n, tl.where(mass < 0.5 * _NOTHING, float("inf"), -mass * _LN2).to(tl.float32))


@triton.jit(do_not_specialize=["first_sequence", "first_frame", "first_node", "share_base", "fast"])
def sweep_backward(
    share,
    cu_frames,
    cu_targets,
    first_nodes,
    loss,
    grad_loss,
    occ_blank,
    occ_label,
    edge,
    first_sequence,
    first_frame,
    first_node,
    share_base,
    fast,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the occupancies of one sequence."""
    # ``edge``, float64, is a buffer with the occupancy that the first state of a strip passes back
    # to the previous strip, for each of the group's frames.
    n = first_sequence + tl.program_id(0)
    frame, frames = _extent(cu_frames, n)
    _, labels = _extent(cu_targets, n)
    node = tl.load(first_nodes + n)
    to_share = node - share_base
    node -= first_node
    edge += frame - first_frame
    states = labels + 1
    factor = tl.where(tl.load(loss + n) == float("inf"), 0.0, tl.load(grad_loss + n))
    j = tl.arange(0, BLOCK)
    right_lane = tl.minimum(j + 1, BLOCK - 1)
    strips = tl.where(frames == 0, 0, tl.cdiv(states, BLOCK))
    for strip in range(0, strips):
        first = (strips - 1 - strip) * BLOCK
        u = first + j
        # Occupancies of the blank and of the label of each node.
        blank = tl.zeros((BLOCK,), tl.float64)
        label = tl.zeros((BLOCK,), tl.float64)
        steps = frames + tl.minimum(BLOCK, states - first) - 1
        for step in tl.range(0, steps, num_stages=STAGES):
            t = steps - 1 - step - j
            is_node = (t >= 0) & (t < frames) & (u < states)
            index = tl.where(is_node, t, 0).to(tl.int64) * states + u
            smaller = tl.load(share + to_share + index, mask=is_node, other=0.0)
            # A sequence without a gradient may hold NaN.
            smaller = tl.where(factor == 0.0, 0.0, smaller)
            size = tl.where(tl.abs(smaller) <= _NO_SHARE, 0.0, tl.abs(smaller))
            if strip > 0:
                is_last = is_node & (j == BLOCK - 1)
                label = tl.where(is_last, tl.load(edge + t, mask=is_last, other=0.0), label)
            is_end = (t == frames - 1) & (u == labels)
            blank = tl.where(is_node, tl.where(is_end, factor.to(tl.float64), blank), 0.0)
            label = tl.where(is_node, label, 0.0)
            tl.store(occ_blank + node + index, blank.to(tl.float32), mask=is_node)
            tl.store(occ_label + node + index, (label * fast).to(tl.float32), mask=is_node)
            passes = blank + label
            less = passes * size.to(tl.float64)
            more = passes - less
            blank = tl.where(smaller < 0.0, more, less)
            back = tl.where(smaller < 0.0, less, more)
            tl.store(edge + t, back, mask=is_node & (j == 0))
            label = tl.where(j + 1 < BLOCK, tl.gather(back, right_lane, 0), 0.0)
        tl.debug_barrier()
