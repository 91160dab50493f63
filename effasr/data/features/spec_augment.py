"""SpecAugment on packed mel rows, sampled on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.data.features.log_mel import MelFrames


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecAugmentConfig:
    """Masking of the features in training; by default nothing is masked.

    NVIDIA's Canary recipes use 2 frequency masks of 27 bands and 10 time masks of 0.05.

    Attributes:
        freq_masks: Bands of frequencies hidden per utterance.
        freq_width: Widest of them, in mel bins.
        time_masks: Stretches of time hidden per utterance.
        time_width: Longest of them, as a share of the utterance.
    """

    freq_masks: int = 0
    freq_width: int = 27
    time_masks: int = 0
    time_width: float = 0.05

    def __post_init__(self) -> None:
        for name in ("freq_masks", "freq_width", "time_masks"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, but is {getattr(self, name)}.")
        if not 0 <= self.time_width <= 1:
            raise ValueError(
                f"`time_width` must be in [0, 1], a share of the utterance, but is "
                f"{self.time_width}: for 5 % write 0.05."
            )


def spec_augment(mel: MelFrames, config: SpecAugmentConfig) -> Tensor:
    """Hide random bands and stretches of each utterance, by zeros.

    Every utterance draws its own masks from torch's global generator of the device: the width of
    each uniformly from 0 to its bound, then its place. As many numbers are drawn whatever the
    lengths are, and nothing waits for the device.

    Returns:
        float32 (s T, mel_bins), like ``mel.values``, which is left as it is.

    References:
        Park et al., 2019, https://arxiv.org/abs/1904.08779; time masks in proportion to the
        utterance: https://arxiv.org/abs/1912.05533.
    """
    values = mel.values
    count, bins = mel.layout.num_sequences, values.shape[1]
    if config.freq_masks:
        longest = torch.full((count, 1), min(config.freq_width, bins), device=values.device)
        whole = torch.full_like(longest, bins)
        begin, end = _draw(whole, longest, config.freq_masks)
        bin_ids = torch.arange(bins, device=values.device)
        inside = (bin_ids >= begin[..., None]) & (bin_ids < end[..., None])
        values = values.masked_fill(mel.per_row(inside.any(1)), 0.0)
    if config.time_masks:
        # Silence put behind an utterance is not worth hiding.
        whole = (mel.lengths if mel.spoken is None else mel.spoken)[:, None]
        begin, end = _draw(whole, (whole * config.time_width).long(), config.time_masks)
        rows = mel.row_positions[:, None]
        inside = (rows >= mel.per_row(begin)) & (rows < mel.per_row(end))
        values = values.masked_fill(inside.any(1, keepdim=True), 0.0)
    return values


def _draw(whole: Tensor, longest: Tensor, masks: int) -> tuple[Tensor, Tensor]:
    """Draw intervals inside ``0:whole``, at most ``longest`` wide: two int64 (N, masks)."""
    shares = torch.rand(2, whole.shape[0], masks, device=whole.device)
    # rand is below 1, but its product with an int in float32 may round up to that int.
    width = torch.minimum((shares[0] * (longest + 1)).long(), longest)
    last = whole - width
    begin = torch.minimum((shares[1] * (last + 1)).long(), last)
    return begin, begin + width
