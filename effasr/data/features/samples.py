"""Samples of packed audio in slots, for encoders whose convolutions read the waveform."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.data.features.config import FeatureConfig
from effasr.data.features.log_mel import check_frames
from effasr.data.features.segments import segment_sum
from effasr_kernels import PackedLayout, PackedSequence


@dataclass(frozen=True)
class SampleFrames:
    """Samples in slots of one hop: an utterance of n frames has n + ``spare`` slots."""

    values: Tensor  # float32 (slots, hop); zero after the samples of an utterance
    layout: PackedLayout  # Layout of the encoder frames, T rows
    lengths: Tensor  # int64 (N,), samples of each utterance
    # Its last frame reads beyond the slots of the frames, and so many samples may follow that are
    # no frame, but count for its mean and variance
    spare: int

    @property
    def slots(self) -> PackedLayout:
        return self.layout.lengthened(self.spare)


class Samples(nn.Module):
    """Samples of each utterance, with zero mean and unit variance if they are normalized.

    Equal to transformers' ``Wav2Vec2FeatureExtractor`` of each utterance alone, or with
    ``epsilon`` 1e-5 to its ``OmniASRFeatureExtractor``.
    """

    def __init__(self, config: FeatureConfig):
        super().__init__()
        self.config = config

    @torch.no_grad()
    def forward(self, audio: PackedSequence, frames: PackedLayout) -> SampleFrames:
        """Lay out float32 (samples,) at ``config.sample_rate``; ``frames`` as for `LogMel`."""
        check_frames(self.config, audio.layout, frames)
        lengths = audio.layout.cu_seqlens.long().diff()
        spare = -(-self.config.window // self.config.hop)
        result = SampleFrames(audio.values, frames, lengths, spare)
        slots, hop = result.slots, self.config.hop
        ids = slots.sequence_ids()
        position = slots.positions()[:, None] * hop + torch.arange(hop, device=ids.device)
        outside = position >= F.pad(lengths, (0, 1))[ids][:, None]
        # One sample of silence follows the last.
        source = position + audio.layout.cu_seqlens[ids][:, None]
        source = source.masked_fill_(outside, audio.layout.rows)
        values = F.pad(audio.values, (0, 1)).index_select(0, source.flatten()).view(-1, hop)
        if self.config.normalize:
            count = lengths.clamp(min=1)
            mean = segment_sum(values.sum(1), slots) / count
            values = (values - F.pad(mean, (0, 1))[ids][:, None]).masked_fill_(outside, 0.0)
            variance = segment_sum(values.square().sum(1), slots) / count
            values *= (F.pad(variance, (0, 1))[ids][:, None] + self.config.epsilon).rsqrt()
        return SampleFrames(values, frames, lengths, spare)
