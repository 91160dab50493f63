"""Lattices of transducers: the log-likelihood of all paths, and the occupancies of their steps.

A step advances by a frame (a blank) or a label; with durations (TDT) by several frames, and a label
by frames, too. Recursions take an anti-diagonal at a time, as logarithms in float64. (In float32
the error of an occupancy exceeds 1 % at T = 1000.)
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def log_likelihood(
    log_blank: Tensor,
    log_label: Tensor,
    log_duration: Tensor | None = None,
    durations: Sequence[int] = (),
) -> Tensor:
    """Compute only the log-likelihood of `occupancies`, with half the work."""
    steps = _steps(durations)
    arcs = _arcs(log_blank, log_label, log_duration, durations)
    return _sum_paths(torch.stack(list(map(_move, arcs, steps))), steps)[-1, -1]


def occupancies(
    log_blank: Tensor,  # (T, U + 1), of the blank at each node
    log_label: Tensor,  # (T, U), of the next label
    log_duration: Tensor | None = None,  # (T, U + 1, D)
    durations: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    r"""Run the forward and backward recursions of one sequence.

    .. math::
        \alpha_{t,u} = \alpha_{t-1,u} \, b_{t-1,u} + \alpha_{t,u-1} \, l_{t,u-1}

    or, with durations,

    .. math::
        \alpha_{t,u} = \sum_{d \geq 1} \alpha_{t-d,u} \, b_{t-d,u} \, q^d_{t-d,u}
            + \sum_d \alpha_{t-d,u-1} \, l_{t-d,u-1} \, q^d_{t-d,u-1}

    for t < T; for (T, U), where paths end, only the first sum; with alpha(0, 0) = 1. Beta is the
    same sum in the reversed lattice.

    Returns the log-likelihood, (); the probabilities that a path takes the blank and the label of
    each node, (T, U + 1); and with durations each duration, (T, U + 1, D). All are float64. If the
    log-likelihood is -inf, the probabilities are zero.
    """
    steps = _steps(durations)
    arcs = _arcs(log_blank, log_label, log_duration, durations)
    alpha = _sum_paths(torch.stack(list(map(_move, arcs, steps))), steps)
    # In the reversed lattice an arc leads to the node where it starts.
    reversed_beta = _sum_paths(arcs.flip(1, 2), steps)
    total = alpha[-1, -1]
    # Without a path, -inf - -inf would be NaN instead of zero.
    past = alpha - total.masked_fill(total == -torch.inf, torch.inf)
    took_blank, took_label = torch.zeros_like(alpha), torch.zeros_like(alpha)
    took_duration = alpha.new_zeros(*alpha.shape, len(durations))
    for arc, step in zip(arcs, steps, strict=True):
        passed = (past + arc + _move(reversed_beta, step).flip(0, 1)).exp_()
        frames, labels = step
        (took_label if labels else took_blank).add_(passed)
        if durations:
            took_duration[..., durations.index(frames)] += passed
    used = (took_blank, took_label, took_duration) if durations else (took_blank, took_label)
    return total, *(probabilities[:-1] for probabilities in used)


_Step = tuple[int, int]
"""Numbers of frames and of labels by which a step advances."""


def _steps(durations: Sequence[int]) -> list[_Step]:
    """The steps of the blank, which advance by at least one frame, then the steps of labels."""
    if not durations:
        return [(1, 0), (0, 1)]
    return [(d, 0) for d in durations if d > 0] + [(d, 1) for d in durations]


def _arcs(
    log_blank: Tensor, log_label: Tensor, log_duration: Tensor | None, durations: Sequence[int]
) -> Tensor:
    """Log-probability of each step from each node and from frame T: float64 (K, T + 1, U + 1)."""
    frames, states = log_blank.shape
    blank, label = log_blank.double(), log_label.double()
    steps = _steps(durations)
    arcs = blank.new_full((len(steps), frames + 1, states), -torch.inf)
    for arc, (d, labels) in zip(arcs, steps, strict=True):
        inside = max(frames - d, 0)
        scores = label if labels else blank
        if log_duration is not None:
            scores = scores + log_duration[:, : scores.shape[1], durations.index(d)]
        # A label must lead to an existing frame, as paths end with a blank.
        arc[:inside, : scores.shape[1]] = scores[:inside]
        if not labels and d <= frames:
            arc[inside, -1] = scores[inside, -1]
    return arcs


def _move(table: Tensor, step: _Step) -> Tensor:
    """Move the value of each node, (T + 1, U + 1), to where the step leads; -inf elsewhere."""
    rows, columns = table.shape
    frames, labels = step
    return F.pad(table, (labels, 0, frames, 0), value=-torch.inf)[:rows, :columns]


def _sum_paths(arcs: Tensor, steps: Sequence[_Step]) -> Tensor:
    """Log of the sum over paths from the first node to each, (T + 1, U + 1)."""
    by_diagonal = torch.stack([_skew(arc) for arc in arcs], dim=1)
    diagonals, _, states = by_diagonal.shape
    # Before the first diagonal and the first column there is padding of -inf.
    first, width = max(map(sum, steps)), states + 1
    sums = arcs.new_full((first + diagonals, width), -torch.inf)
    sums[first, 1] = 0
    origin = [(first - frames - labels) * width + 1 - labels for frames, labels in steps]
    index = torch.arange(states, device=arcs.device)
    index = torch.tensor(origin, device=arcs.device)[:, None] + index
    for diagonal in range(1, diagonals):
        index += width
        incoming = sums.take(index).add_(by_diagonal[diagonal])
        torch.logsumexp(incoming, 0, out=sums[first + diagonal, 1:])
    # The inverse of `_skew`.
    frames = diagonals - states + 1
    columns = sums[first:, 1:].T.contiguous()
    return columns.as_strided((states, frames), (diagonals + 1, 1)).T


def _skew(x: Tensor) -> Tensor:
    """Rearrange (T, S) by anti-diagonal: row t + u, column u; -inf elsewhere."""
    frames, states = x.shape
    diagonals = frames + states - 1
    out = x.new_full((states, diagonals), -torch.inf)
    out.as_strided((states, frames), (diagonals + 1, 1)).copy_(x.T)
    return out.T.contiguous()
