r"""Sum over all alignments and its derivatives, one program per sequence.

An optional blank precedes each label and follows the last. Let :math:`b_j` be the logarithmic mass
of the alignments that end in the blank before label j and :math:`l_j` that of the alignments that
end in label j. A frame with log-probabilities e updates them by

.. math::
    c_j  &= \log(\exp l_{j-1} + \exp b_j)                                      \\
    b'_j &= c_j + e_{blank}                                                    \\
    l'_j &= \log(\exp l_j + \exp(y_j = y_{j-1} \,?\; b_j : c_j)) + e_{y_j}

that is by two sums of two terms each and one shift. The masses are kept in float64; float32
exponentials and logarithms are only applied to their differences, so the error of a step does not
grow with the mass, which falls by a few nats per frame.

Each sum also gives the share of its first term: the probability, given the frames so far, of the
predecessor state. The backward pass needs only these shares. It begins in the two states in which
alignments end and distributes the mass of each state to its predecessors: sums and products of
numbers in [0, 1], without exponentials, infinities or differences of large numbers. The mass of a
state is its occupancy, the derivative of the log-likelihood by the log-probability of its class.

For random logits of 2,000 frames and 300 labels the error of the occupancies is 2e-8 (root mean
square) and at most 1.5e-6; rounding the log-probabilities to float32 alone causes 1.4e-6. Masses
in float32, with the largest of each frame shifted to 0, would give 4e-5; forward and backward
masses in float32 with a float64 offset for each frame 9e-4; `torch.nn.functional.ctc_loss` in
float32 gives 3e-2.
"""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl

from effasr_kernels.shared.logarithm import log2_of_more

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NOTHING = tl.constexpr(-1e30)
"""Logarithm of zero mass; finite, because the difference of two infinities is NaN."""


@triton.jit
def _merge(x, y):
    """Return log2(2**x + 2**y), float64, and the share of the first term, float32."""
    small = tl.exp2((-tl.abs(x - y)).to(tl.float32))
    share = tl.where(x >= y, 1.0, small) / (1.0 + small)
    return tl.maximum(x, y) + log2_of_more(small).to(tl.float64), share


@triton.jit
def _log2_probability(score, log_normalizer):
    log_probability = (score.to(tl.float64) - log_normalizer.to(tl.float64)) * _LOG2E
    return tl.where(log_probability < _NOTHING, _NOTHING, log_probability)


@triton.jit
def _extent(cu_seqlens, n):
    begin = tl.load(cu_seqlens + n)
    return begin.to(tl.int64), tl.load(cu_seqlens + n + 1) - begin


@triton.jit
def _transcript(targets, first_label, labels, BLOCK: tl.constexpr):
    """Return the labels, padded with -1, and whether each differs from its predecessor."""
    j = tl.arange(0, BLOCK)
    label_classes = tl.load(targets + first_label + j, mask=j < labels, other=-1).to(tl.int64)
    inner = (j > 0) & (j < labels)
    previous = tl.load(targets + first_label + j - 1, mask=inner, other=-2).to(tl.int64)
    return label_classes, label_classes != previous


@triton.jit(do_not_specialize=["columns"])
def sweep_forward(
    # float32 (T, K + 1), logits of the blank (column 0) and of each label. The logit of a label is
    # overwritten with the share of its mass that was in the same label a frame before.
    scores,
    log_normalizer,  # float32 (T,)
    targets,  # int32 or int64 (U,)
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    moved,  # float32 (T, K + 1), written: share of label j - 1 in the mass c_j
    ended,  # float32 (N,), written: share of alignments that end in the last label
    loss,  # float32 (N,), written
    columns,  # K + 1
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # number of frames with loads in flight
):
    """Compute the loss of one sequence and the shares of predecessor states at each frame."""
    n = tl.program_id(0)
    first_frame, frames = _extent(cu_frames, n)
    first_label, labels = _extent(cu_targets, n)
    j = tl.arange(0, BLOCK)
    _, differs = _transcript(targets, first_label, labels, BLOCK)
    is_label = j < labels
    repeats = tl.sum((is_label & (differs == 0)).to(tl.int32), axis=0)
    # Without a step only the initial state has mass, which is final only for an empty transcript.
    steps = tl.where(frames < labels + repeats, 0, frames)

    nothing = tl.full((BLOCK,), _NOTHING, tl.float64)
    blank = tl.where(j == 0, 0.0, nothing)
    label = nothing
    remaining = tl.maximum(j - 1, 0)
    for t in tl.range(0, steps, num_stages=STAGES):
        frame = first_frame + t
        row = frame * columns
        label_score = tl.load(scores + row + 1 + j, mask=is_label, other=0.0)
        blank_score = tl.load(scores + row)
        normalizer = tl.load(log_normalizer + frame)
        previous = tl.where(j > 0, tl.gather(label, remaining, 0), nothing)
        advanced, moved_share = _merge(previous, blank)
        label, stayed_share = _merge(label, tl.where(differs, advanced, blank))
        tl.store(moved + row + j, moved_share, mask=j <= labels)
        tl.store(scores + row + 1 + j, stayed_share, mask=is_label)
        blank = advanced + _log2_probability(blank_score, normalizer)
        label += _log2_probability(label_score, normalizer)

    last_label = tl.sum(tl.where(j == labels - 1, label, 0.0), axis=0)
    last_label = tl.where(labels > 0, last_label, _NOTHING)
    last_blank = tl.sum(tl.where(j == labels, blank, 0.0), axis=0)
    mass, ended_share = _merge(last_label, last_blank)
    tl.store(ended + n, ended_share)
    # The mass of every feasible transcript exceeds this threshold; NaN stays NaN.
    tl.store(loss + n, tl.where(mass < 0.5 * _NOTHING, float("inf"), -mass * _LN2).to(tl.float32))


@triton.jit(do_not_specialize=["columns", "blank_id"])
def sweep_backward(
    moved,  # float32 (T, K + 1), output of `sweep_forward`
    stayed,  # float32 (T, K + 1), `scores` as overwritten by `sweep_forward`
    ended,  # float32 (N,), output of `sweep_forward`
    loss,  # float32 (N,)
    grad_loss,  # float32 (N,)
    targets,  # int32 or int64 (U,)
    cu_frames,  # int32 (N + 1,)
    cu_targets,  # int32 (N + 1,)
    occupancies,  # float32 (T, K + 1), of blank and labels; written where the scale is not 0
    classes,  # int32 (U,), written: class of a label first of its class and not blank; else -1
    scale,  # float32 (T,), written: the sequence's gradient, 0 where its loss is infinite
    columns,  # K + 1
    blank_id,  # class of the blank
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # number of frames with loads in flight
):
    """Compute the occupancies of one sequence, the scale of its frames and its distinct labels."""
    n = tl.program_id(0)
    first_frame, frames = _extent(cu_frames, n)
    first_label, labels = _extent(cu_targets, n)
    j = tl.arange(0, BLOCK)
    label_classes, differs = _transcript(targets, first_label, labels, BLOCK)
    is_label = j < labels
    factor = tl.where(tl.load(loss + n) == float("inf"), 0.0, tl.load(grad_loss + n))
    for start in range(0, frames, BLOCK):
        tl.store(scale + first_frame + start + j, factor + j * 0.0, mask=start + j < frames)

    is_excluded = label_classes == blank_id
    for i in range(0, labels):
        is_excluded = is_excluded | (
            (label_classes == tl.load(targets + first_label + i)) & (i < j)
        )
    tl.store(
        classes + first_label + j,
        tl.where(is_excluded, -1, label_classes).to(tl.int32),
        mask=is_label,
    )

    steps = tl.where(factor == 0.0, 0, frames)
    end_share = tl.load(ended + n).to(tl.float64)
    label = tl.where(j == labels - 1, end_share, 0.0)
    blank = tl.where(j == labels, 1.0 - end_share, 0.0)
    right = tl.minimum(j + 1, BLOCK - 1)
    for t in tl.range(0, steps, num_stages=STAGES):
        row = (first_frame + steps - 1 - t) * columns
        moved_share = tl.load(moved + row + j, mask=j <= labels, other=0.0).to(tl.float64)
        stayed_share = tl.load(stayed + row + 1 + j, mask=is_label, other=0.0).to(tl.float64)
        tl.store(occupancies + row, tl.sum(blank.to(tl.float32), axis=0))
        tl.store(occupancies + row + 1 + j, label.to(tl.float32), mask=is_label)
        stays = label * stayed_share
        comes = label - stays
        advanced = blank + tl.where(differs, comes, 0.0)
        moves = advanced * moved_share
        blank = advanced - moves + tl.where(differs, 0.0, comes)
        label = stays + tl.where(j + 1 < BLOCK, tl.gather(moves, right, 0), 0.0)
