"""Sinusoidal position embeddings: relative, Canary's and Whisper's."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Embed positions or distances by interleaved sines and cosines, as Transformer-XL.

    Channels 2c and 2c + 1 are the sine and the cosine of ``position * 10000 ** (-2c / width)``.

    Args:
        positions: (R,), any number type.
        width: Channels, even.

    Returns:
        float32 (R, width).
    """
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, None].float() * (1.0 / 10_000.0**exponents)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def relative_sinusoids(reach: int, width: int, device: torch.device) -> Tensor:
    """Embed the distances from ``1 - reach`` to ``reach - 1``: float32 (2 reach - 1, width)."""
    return sinusoids(torch.arange(1 - reach, reach, device=device), width)


def decoder_sinusoids(positions: Tensor, width: int) -> Tensor:
    """Embed token positions as NeMo's ``FixedPositionalEncoding`` and Canary's decoder.

    All sines, then all cosines, over ``sqrt(width)``. The wavelengths differ slightly from the
    usual ones: Canary spaces them from 1 to ``10000 ** ((width - 2) / width)``.

    Args:
        positions: (R,), any number type.
        width: Channels; even, at least 4.

    Returns:
        float32 (R, width).
    """
    step = math.log(10_000.0) * (width - 2) / width / (width // 2 - 1)
    channels = torch.arange(width // 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * torch.exp(-step * channels)
    return torch.cat([angles.sin(), angles.cos()], dim=1) / math.sqrt(width)


def whisper_sinusoids(positions: Tensor, width: int) -> Tensor:
    """Embed frame positions as Whisper's encoder.

    All sines, then all cosines, of wavelengths from 1 to 10000 times 2 pi. Arguments and result are
    those of `decoder_sinusoids`.

    References:
        Radford et al., 2022, https://arxiv.org/abs/2212.04356.
    """
    step = math.log(10_000.0) / (width // 2 - 1)
    channels = torch.arange(width // 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * torch.exp(-step * channels)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
