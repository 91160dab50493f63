"""Likeliest path of a transducer through a given transcript."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_NONE = -np.inf


def likeliest_frames(
    blank: np.ndarray,
    label: np.ndarray,
    lasting: np.ndarray | None = None,
    durations: Sequence[int] = (),
) -> list[int] | None:
    """Find the frame in which the likeliest path says each label.

    Paths are those of the loss (`effasr_kernels.transducer_loss`): with durations, a blank lasts at
    least one frame, a label must not reach the end, and a blank comes last.

    Args:
        blank: (T, U + 1), log-probabilities of the blank after u labels.
        label: (T, U), of label u after those before it.
        lasting: (T, U + 1, D), of each duration; None for a transducer without durations.
        durations: D of them, in frames.

    Returns:
        The frames of the U labels, in order; None if there is no path.
    """
    frames, count = blank.shape[0], label.shape[1]
    # (frames, log-probabilities), (T, U + 1) and (T, U)
    blanks, labels = [(1, blank)], [(0, label)]
    if lasting is not None:
        each = [(d, lasting[..., n]) for n, d in enumerate(durations)]
        blanks = [(d, blank + score) for d, score in each if d]
        labels = [(d, label + score[:, :count]) for d, score in each]
    best = np.full((frames + 1, count + 1), _NONE)
    best[0, 0] = 0.0
    for frame in range(frames):
        row = best[frame]
        for lasts, score in labels:
            if lasts == 0:
                # Labels in a row in one frame: sums from any beginning.
                sums = np.concatenate([[0.0], score[frame].cumsum()])
                row[:] = np.maximum.accumulate(row - sums) + sums
        for lasts, score in labels:
            if lasts and frame + lasts < frames:
                there = best[frame + lasts]
                there[1:] = np.maximum(there[1:], row[:-1] + score[frame])
        for lasts, score in blanks:
            if frame + lasts <= frames:
                there = best[frame + lasts]
                np.maximum(there, row + score[frame], out=there)
    if frames == 0 or best[frames, count] == _NONE:
        return [] if count == 0 else None
    said = [0] * count
    frame, after = frames, count
    while frame or after:
        ways = [
            (best[frame - d, after] + score[frame - d, after], frame - d, after)
            for d, score in blanks
            if frame >= d
        ]
        if after and frame < frames:
            ways += [
                (best[frame - d, after - 1] + score[frame - d, after - 1], frame - d, after - 1)
                for d, score in labels
                if frame >= d
            ]
        _, frame, before = max(ways)
        if before < after:
            said[before] = frame
        after = before
    return said
