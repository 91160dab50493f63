r"""The recursions of a token-and-duration transducer: like `lattice`, with steps of several frames.

A node (t, u) passes its mass on by its steps: the blank of duration d to (t + d, u), the label to
(t + d, u + 1), if that frame exists. Registers hold the mass that arrives on each of the next
diagonals by blanks and by labels, so that all durations need only one shift to the next state.
Paths end with a blank that leads to the frame past the last, in the last state.

The backward needs the mass of each node, alpha, and the log-probabilities again. The part of the
occupancy of a node n that arrives by a step s from m is

.. math:: \exp(\alpha_m + \log p_s - \alpha_n)

so these are again products of numbers in [0, 1], and the occupancies that enter and leave an
anti-diagonal are equal except for rounding. Masses are logarithms in float64; exponentials and
logarithms are computed only of their differences, in float32.
"""

# Tuples are joined by +, as Triton's compiler does not support starred items.
# ruff: noqa: RUF005

# pyright: reportGeneralTypeIssues=false
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import launch
from effasr_kernels.shared.logarithm import log2_of_more
from effasr_kernels.transducer_loss.triton.lattice import _LN2, _NOTHING, _extent, _log2
from effasr_kernels.transducer_loss.triton.plan import Group, Scores, Trace

LONGEST = 8
"""The longest duration for which registers hold the diagonals."""
_NARROWEST = 32


class DurationSweeps:
    """The recursions of a TDT. Their trace is the mass of each node."""

    trace_dtype: ClassVar[torch.dtype] = torch.float64
    keeps_scores: ClassVar[bool] = True

    def __init__(
        self,
        offsets: tuple[Tensor, Tensor, Tensor],
        bound: int,
        fastemit: float,
        durations: tuple[int, ...],
    ):
        self._offsets, self._fastemit = offsets, fastemit
        # One state per thread; the longest durations need half as many threads for registers.
        widest = 512 if durations[-1] <= LONGEST // 2 else 256
        block = min(widest, max(_NARROWEST, 1 << bound.bit_length()))
        strip = {"num_warps": block // 32, "num_stages": 1, "BLOCK": block, "STAGES": 2}
        self._options: dict[str, Any] = {**strip, "DURATIONS": durations, "COUNT": len(durations)}

    def room(self, scores: Scores) -> Trace:
        return Trace(scores.base, torch.empty_like(scores.blank, dtype=torch.float64))

    def losses(self, group: Group, scores: Scores, trace: Trace, loss: Tensor) -> None:
        edge = scores.blank.new_empty(group.frames, dtype=torch.float64)
        launch(
            sweep_durations_forward,
            (group.sequences,),
            *(*scores[1:], *self._offsets, trace.values, edge, loss),
            *(group.first_sequence, group.first_frame, scores.base),
            **self._options,
        )

    def occupancies(
        self,
        group: Group,
        scores: Scores,
        trace: Trace,
        loss: Tensor,
        grad_loss: Tensor,
        out: Scores,
    ) -> None:
        edge = scores.blank.new_empty(group.frames, dtype=torch.float64)
        launch(
            sweep_durations_backward,
            (group.sequences,),
            *(*scores[1:], trace.values, *self._offsets, loss, grad_loss, *out[1:], edge),
            *(group.first_sequence, group.first_frame, scores.base, out.base),
            float(1 + self._fastemit),
            **self._options,
        )


@triton.jit
def _add(x, y):
    """The logarithm of 2**x + 2**y, float64."""
    small = tl.exp2((-tl.abs(x - y)).to(tl.float32))
    return tl.maximum(x, y) + log2_of_more(small).to(tl.float64)


@triton.jit
def _part(mass, step, node_mass):
    """The part of a node's mass that arrives by a step from a node of ``mass``; at most 1."""
    return tl.exp2(tl.minimum(mass + step - node_mass, 0.0).to(tl.float32)).to(tl.float64)


@triton.jit(do_not_specialize=["first_sequence", "first_frame", "base"])
def sweep_durations_forward(
    log_blank,  # float32, of nodes from `base` on
    log_label,  # float32, of nodes from `base` on; not read in last states
    log_duration,  # float32 (..., D), of nodes from `base` on
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    first_nodes,  # int64 (N + 1,)
    alpha,  # float64, of nodes from `base` on, written
    edge,  # float64, for each frame of the group: mass that labels pass to the next strip
    loss,  # float32 (N,), written
    first_sequence,
    first_frame,
    base,  # node of the first elements
    DURATIONS: tl.constexpr,  # durations in frames, increasing
    COUNT: tl.constexpr,  # D
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # stages of the pipeline of loads
):
    """Compute the loss of one sequence and the mass of each node."""
    MOST: tl.constexpr = DURATIONS[COUNT - 1]
    n = first_sequence + tl.program_id(0)
    frame, frames = _extent(cu_frames, n)
    _, labels = _extent(cu_targets, n)
    node = tl.load(first_nodes + n) - base
    edge += frame - first_frame
    states = labels + 1
    j = tl.arange(0, BLOCK)
    left_lane = tl.maximum(j - 1, 0)
    nothing = tl.full((BLOCK,), _NOTHING, tl.float64)
    # Without frames only an empty transcript has a path: its start is its end.
    ended = tl.where((frames == 0) & (labels == 0) & (j == 0), 0.0, nothing)
    for first in range(0, tl.where(frames == 0, 0, states), BLOCK):
        u = first + j
        # Mass that arrives on the next diagonals by blanks, and by labels in the next column.
        stay = (tl.where(u == 0, 0.0, nothing),) + (nothing,) * (MOST - 1)
        emit = (nothing,) * (MOST + 1)
        # One more step than diagonals, for the end node.
        steps = frames + tl.minimum(BLOCK, states - first)
        for d in tl.range(0, steps, num_stages=STAGES):
            t = d - j
            is_node = (t >= 0) & (t < frames) & (u < states)
            index = node + tl.where(is_node, t, 0).to(tl.int64) * states + u
            blank = tl.load(log_blank + index, mask=is_node, other=0.0)
            label = tl.load(log_label + index, mask=is_node & (u < labels), other=0.0)
            comes = tl.where(j > 0, tl.gather(emit[0], left_lane, 0), nothing)
            if first > 0:
                crossing = tl.load(edge + d, mask=d < frames, other=_NOTHING)
                comes = tl.where(j > 0, comes, crossing)
            ended = tl.where((t == frames) & (u == labels), stay[0], ended)
            mass = tl.where(is_node, _add(stay[0], comes), nothing)
            tl.store(alpha + index, mass, mask=is_node)
            by_blank = mass + _log2(blank)
            by_label = tl.where(u < labels, mass + _log2(label), nothing)
            stay = stay[1:] + (nothing,)
            emit = emit[1:] + (nothing,)
            for i in tl.static_range(COUNT):
                lasts = tl.load(log_duration + index * COUNT + i, mask=is_node, other=0.0)
                lasts = _log2(lasts)
                if DURATIONS[i] > 0:
                    sum_stay = _add(stay[DURATIONS[i] - 1], by_blank + lasts)
                    stay = stay[: DURATIONS[i] - 1] + (sum_stay,) + stay[DURATIONS[i] :]
                sum_emit = _add(emit[DURATIONS[i]], by_label + lasts)
                emit = emit[: DURATIONS[i]] + (sum_emit,) + emit[DURATIONS[i] + 1 :]
            tl.store(edge + t, emit[0], mask=is_node & (j == BLOCK - 1))
        tl.debug_barrier()
    is_end = tl.where(frames == 0, 0, labels % BLOCK) == j
    mass = tl.sum(tl.where(is_end, ended, 0.0), axis=0)
    # A mass below this bound means that no path exists. A loss of NaN stays NaN.
    tl.store(loss + n, tl.where(mass < 0.5 * _NOTHING, float("inf"), -mass * _LN2).to(tl.float32))


@triton.jit(do_not_specialize=["first_sequence", "first_frame", "base", "out_base", "fast"])
def sweep_durations_backward(
    log_blank,
    log_label,
    log_duration,
    alpha,
    cu_frames,
    cu_targets,
    first_nodes,
    loss,  # float32 (N,)
    grad_loss,  # float32 (N,); treated as zero for an infinite loss
    occ_blank,  # float32, of nodes from `out_base` on, written; may be `log_blank`
    occ_label,  # float32, written, multiplied by `fast`; may be `log_label`
    d_duration,  # float32 (..., D), written; may be `log_duration`
    edge,  # float64, for each frame of the group: occupancy of a strip's first state
    first_sequence,
    first_frame,
    base,  # node of the first elements
    out_base,  # node of the first elements of the outputs
    fast,  # 1 + lambda of FastEmit
    DURATIONS: tl.constexpr,  # durations in frames, increasing
    COUNT: tl.constexpr,  # D
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # stages of the pipeline of loads
):
    """Compute the occupancies of one sequence and the gradient of the duration logits."""
    MOST: tl.constexpr = DURATIONS[COUNT - 1]
    n = first_sequence + tl.program_id(0)
    frame, frames = _extent(cu_frames, n)
    _, labels = _extent(cu_targets, n)
    to_out = tl.load(first_nodes + n) - out_base
    node = tl.load(first_nodes + n) - base
    edge += frame - first_frame
    states = labels + 1
    factor = tl.where(tl.load(loss + n) == float("inf"), 0.0, tl.load(grad_loss + n))
    # The mass of the end, which is not a node of the tables.
    total = tl.load(alpha + node, mask=frames < 0, other=_NOTHING)
    for i in tl.static_range(COUNT):
        if DURATIONS[i] > 0:
            exists = frames >= DURATIONS[i]
            last = node + tl.where(exists, frames - DURATIONS[i], 0).to(tl.int64) * states + labels
            arc = _log2(tl.load(log_blank + last, mask=exists, other=0.0))
            arc += _log2(tl.load(log_duration + last * COUNT + i, mask=exists, other=0.0))
            total = _add(total, tl.load(alpha + last, mask=exists, other=_NOTHING) + arc)
    j = tl.arange(0, BLOCK)
    right_lane = tl.minimum(j + 1, BLOCK - 1)
    zero = tl.zeros((BLOCK,), tl.float64)
    strips = tl.where(frames == 0, 0, tl.cdiv(states, BLOCK))
    for strip in range(0, strips):
        first = (strips - 1 - strip) * BLOCK
        u = first + j
        # Occupancies and masses of the nodes 1, 2, ... frames later, and of the nodes of the next
        # column 0, 1, ... frames later.
        later, later_mass = (zero,) * MOST, (zero,) * MOST
        beside, beside_mass = (zero,) * (MOST + 1), (zero,) * (MOST + 1)
        steps = frames + tl.minimum(BLOCK, states - first)
        for step in tl.range(0, steps, num_stages=STAGES):
            t = steps - 1 - step - j
            is_node = (t >= 0) & (t < frames) & (u < states)
            inside = tl.where(is_node, t, 0).to(tl.int64) * states + u
            index = node + inside
            if strip > 0:
                is_last = is_node & (j == BLOCK - 1)
                over = tl.load(edge + t, mask=is_last, other=0.0)
                over_mass = tl.load(alpha + index + 1, mask=is_last, other=0.0)
                beside = (tl.where(is_last, over, beside[0]),) + beside[1:]
                beside_mass = (tl.where(is_last, over_mass, beside_mass[0]),) + beside_mass[1:]
            mass = tl.load(alpha + index, mask=is_node, other=0.0)
            by_blank = mass + _log2(tl.load(log_blank + index, mask=is_node, other=0.0))
            has_label = is_node & (u < labels)
            by_label = mass + _log2(tl.load(log_label + index, mask=has_label, other=0.0))
            blank, label = zero, zero
            lasting, passed = (), ()
            for i in tl.static_range(COUNT):
                lasts = tl.load(log_duration + index * COUNT + i, mask=is_node, other=0.0)
                lasts = _log2(lasts)
                # Labels lead to an existing frame; only blanks enter the end.
                leads = has_label & (t + DURATIONS[i] < frames)
                part = _part(by_label, lasts, beside_mass[DURATIONS[i]]) * beside[DURATIONS[i]]
                part = tl.where(leads, part, 0.0)
                label += part
                if DURATIONS[i] > 0:
                    stays = _part(by_blank, lasts, later_mass[DURATIONS[i] - 1])
                    stays *= later[DURATIONS[i] - 1]
                    blank += stays
                    part += stays
                lasting = lasting + (lasts,)
                passed = passed + (part,)
            # A sequence without a gradient may hold NaN.
            alive = tl.where(factor == 0.0, 0, is_node.to(tl.int32)) != 0
            blank = tl.where(alive, blank, 0.0)
            label = tl.where(alive, label, 0.0)
            total_here = blank + label
            out = to_out + inside
            tl.store(occ_blank + out, blank.to(tl.float32), mask=is_node)
            tl.store(occ_label + out, (label * fast).to(tl.float32), mask=is_node)
            for i in tl.static_range(COUNT):
                softmax = tl.exp2(tl.cast(lasting[i], tl.float32)).to(tl.float64)
                d = tl.where(alive, softmax * total_here - passed[i], 0.0).to(tl.float32)
                tl.store(d_duration + out * COUNT + i, d, mask=is_node)
            is_end = (t == frames) & (u == labels)
            total_here = tl.where(is_end, factor.to(tl.float64), total_here)
            mass = tl.where(is_end, total, tl.where(is_node, mass, 0.0))
            tl.store(edge + t, total_here, mask=is_node & (j == 0))
            later, later_mass = (total_here,) + later[: MOST - 1], (mass,) + later_mass[: MOST - 1]
            total_here = tl.where(j + 1 < BLOCK, tl.gather(total_here, right_lane, 0), 0.0)
            beside = (total_here,) + beside[:MOST]
            beside_mass = (tl.gather(mass, right_lane, 0),) + beside_mass[:MOST]
        tl.debug_barrier()
