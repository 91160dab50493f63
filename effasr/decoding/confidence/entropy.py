"""Confidence of a distribution by its entropy."""

from __future__ import annotations

import math

from torch import Tensor

ALPHA = 1 / 3
"""Order of the entropy, which worked best in the paper."""


def entropy_confidence(log_probs: Tensor, alpha: float = ALPHA) -> Tensor:
    r"""Return the confidence in distributions, from 0 for uniform to 1 for certain ones.

    It is the Tsallis entropy with exponential normalization:

    .. math:: H = \frac{\sum_v p_v^\alpha - 1}{1 - \alpha}, \quad
        c = \frac{e^{-H} - e^{-H_{max}}}{1 - e^{-H_{max}}}, \quad
        H_{max} = \frac{V^{1 - \alpha} - 1}{1 - \alpha}

    Args:
        log_probs: (..., V) with V of at least 2.
        alpha: Order of the entropy, from 0 to 1, both excluded; lower orders are more sensitive to
            unlikely classes.

    Returns:
        (...), float64.

    References:
        Laptev and Ginsburg, 2022, https://arxiv.org/abs/2212.08703.
    """
    if not 0 < alpha < 1 or log_probs.shape[-1] < 2:
        raise ValueError(
            "`alpha` must be between 0 and 1 and `log_probs` have at least 2 classes, but they are "
            f"{alpha} and {log_probs.shape[-1]}."
        )
    most = (log_probs.shape[-1] ** (1 - alpha) - 1) / (1 - alpha)
    entropy = ((alpha * log_probs.double()).exp().sum(-1) - 1) / (1 - alpha)
    least = math.exp(-most)
    return (((-entropy).exp() - least) / (1 - least)).clamp(0.0, 1.0)
