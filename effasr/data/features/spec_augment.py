"""SpecAugment on packed mel rows, sampled on the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.checks import check
from effasr.data.features.log_mel import MelFrames
from effasr_kernels import mask_features


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecAugmentConfig:
    """Masking of the features in training; by default nothing is masked.

    NVIDIA's Canary recipes use 2 frequency masks of 27 bands and 10 time masks of 0.05.

    Attributes:
        freq_masks: Bands of frequencies hidden per utterance.
        freq_width: Widest of them, in mel bins.
        time_masks: Stretches of time hidden per utterance.
        time_width: Longest of them, as a share of the utterance.
        after_ctc: Masking begins, for good, once the running average of the CTC loss has fallen
            under this share of the loss that the corpus allows without listening, its plateau:
            masks keep CTC there longer. Null: with the first step.
    """

    freq_masks: int = 0
    freq_width: int = 27
    time_masks: int = 0
    time_width: float = 0.05
    after_ctc: float | None = None

    def __post_init__(self) -> None:
        for name in ("freq_masks", "freq_width", "time_masks"):
            check(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        rule = "be in [0, 1], a share of the utterance"
        check(0 <= self.time_width <= 1, "time_width", rule, self.time_width, "for 5 % write 0.05")


def spec_augment(mel: MelFrames, config: SpecAugmentConfig, on: Tensor | None = None) -> Tensor:
    """Hide random bands and stretches of each utterance, by zeros.

    Every utterance draws its own masks from torch's global generator of the device: the width of
    each uniformly from 0 to its bound, then its place. As many numbers are drawn whatever the
    lengths are, and nothing waits for the device. Where ``on`` (bool ()) is false, masks are empty.

    References:
        Park et al., 2019, https://arxiv.org/abs/1904.08779; time masks in proportion to the
        utterance: https://arxiv.org/abs/1912.05533.
    """

    def shares(masks: int) -> Tensor | None:
        size = 2, mel.layout.num_sequences, masks
        drawn = torch.rand(size, device=mel.values.device) if masks else None
        return drawn if drawn is None or on is None else drawn * on

    if not (config.freq_masks or config.time_masks):
        return mel.values
    return mask_features(
        mel.values,
        # Silence put behind an utterance is not worth hiding.
        mel.lengths if mel.spoken is None else mel.spoken,
        mel.layout,
        rows_per_slot=mel.subsampling,
        freq_shares=shares(config.freq_masks),
        freq_width=config.freq_width,
        time_shares=shares(config.time_masks),
        time_width=config.time_width,
    )
