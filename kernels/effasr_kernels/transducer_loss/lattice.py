"""The log-likelihood of a transducer's lattice over all paths, and the occupancies of its steps."""

from __future__ import annotations

import torch
from torch import Tensor


def log_likelihood(log_blank: Tensor, log_label: Tensor) -> Tensor:
    """Compute only the log-likelihood of `occupancies`, with half the work."""
    return _forward(*_steps(log_blank, log_label))[-1, -1]


def occupancies(log_blank: Tensor, log_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Run the forward and backward recursions of one sequence, a whole anti-diagonal at a time.

    .. math::
        \alpha_{t,u} &= \alpha_{t-1,u} \, b_{t-1,u} + \alpha_{t,u-1} \, l_{t,u-1} \\
        \beta_{t,u} &= b_{t,u} \, \beta_{t+1,u} + l_{t,u} \, \beta_{t,u+1}

    with alpha(0, 0) = beta(T, U) = 1, as logarithms in float64. (In float32 the error of an
    occupancy exceeds 1 % at T = 1000.)

    Returns the log-likelihood, (), and the probabilities that a path takes the blank and the label
    of each node, (T, U + 1); all float64. If the log-likelihood is -inf, they are zero.
    """
    blank, label = _steps(log_blank, log_label)
    alpha = _forward(blank, label)
    beta = _backward(blank, label)
    total = alpha[-1, -1]
    # Without a path, -inf - -inf would be NaN instead of zero.
    offset = total.masked_fill(total == -torch.inf, torch.inf)
    past = alpha[:-1] - offset
    took_blank = (past + blank + beta[1:]).exp()
    shifted = torch.cat([beta[1:, 1:], beta.new_full((beta.shape[0] - 1, 1), -torch.inf)], dim=1)
    took_label = (past + label + shifted).exp()
    return total, unskew(took_blank), unskew(took_label)


def _steps(log_blank: Tensor, log_label: Tensor) -> tuple[Tensor, Tensor]:
    """Both step probabilities by diagonal; the label of the last state is never taken."""
    never = log_label.new_full((log_label.shape[0], 1), -torch.inf)
    return skew(log_blank), skew(torch.cat([log_label, never], dim=1))


def _forward(blank: Tensor, label: Tensor) -> Tensor:
    """Log alpha by diagonal, (T + U + 1, U + 1)."""
    diagonals, states = blank.shape
    alpha = blank.new_full((diagonals + 1, states), -torch.inf)
    alpha[0, 0] = 0
    for d in range(diagonals):
        stay = alpha[d] + blank[d]
        emit = alpha[d] + label[d]
        alpha[d + 1, 0] = stay[0]
        torch.logaddexp(stay[1:], emit[:-1], out=alpha[d + 1, 1:])
    return alpha


def _backward(blank: Tensor, label: Tensor) -> Tensor:
    """Log beta by diagonal, (T + U + 1, U + 1)."""
    diagonals, states = blank.shape
    beta = blank.new_full((diagonals + 1, states), -torch.inf)
    beta[-1, -1] = 0
    for d in reversed(range(diagonals)):
        stay = blank[d] + beta[d + 1]
        emit = label[d, :-1] + beta[d + 1, 1:]
        beta[d, -1] = stay[-1]
        torch.logaddexp(stay[:-1], emit, out=beta[d, :-1])
    return beta


def skew(x: Tensor) -> Tensor:
    """Rearrange (T, S) by anti-diagonal: row t + u, column u; -inf elsewhere."""
    frames, states = x.shape
    diagonals = frames + states - 1
    out = x.new_full((states, diagonals), -torch.inf, dtype=torch.float64)
    out.as_strided((states, frames), (diagonals + 1, 1)).copy_(x.T)
    return out.T.contiguous()


def unskew(x: Tensor) -> Tensor:
    """The inverse of `skew`."""
    diagonals, states = x.shape
    frames = diagonals - states + 1
    return x.T.contiguous().as_strided((states, frames), (diagonals + 1, 1)).T
