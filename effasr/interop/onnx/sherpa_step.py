"""A step of a streaming encoder with the inputs and outputs of NeMo's cache-aware encoders.

sherpa-onnx gives the graph the mel rows of the next chunk and three tensors of the step before,
whose sizes it takes from the metadata. What they hold is known to the graph alone: here, the caches
of `StreamingStep`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from effasr.interop.onnx.streaming_step import StreamingStep
from effasr.model.asr import ASRModel
from effasr_kernels import Context

NAMES = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
"""NeMo's names of the caches; those of the next step end with ``_next``."""


class SherpaStep(nn.Module):
    """Mel rows of a chunk to what the joiner or CTC's search reads.

    ``cache_last_channel`` holds the keys and values of earlier frames, (B, layers, left, 2 width);
    ``cache_last_time`` the inputs of the convolutions and the mel rows of earlier frames, flat,
    (B, 1, 1, n); ``cache_last_channel_len`` how many frames were before, (B,).
    """

    def __init__(self, model: ASRModel, context: Context, output: str):
        """Share the weights of a model."""
        super().__init__()
        self.step, self.output = StreamingStep(model, context), output
        self.rows = context.chunk * self.step.encoder.config.subsampling

    def begin(self, streams: int) -> dict[str, Tensor]:
        """Return the caches before the first step by NeMo's names."""
        caches = self.step.begin(streams)
        return dict(zip(NAMES, self._packed(caches), strict=True))

    def forward(
        self,
        audio_signal: Tensor,
        length: Tensor,
        cache_last_channel: Tensor,
        cache_last_time: Tensor,
        cache_last_channel_len: Tensor,
    ) -> tuple[Tensor, ...]:
        """Encode the next chunk of each stream."""
        # audio_signal: float32 (B, mel_bins, rows); length: int64 (B,), the number of rows;
        # cache_last_channel_len: int64, see the class -> (B, c, V + 1), (B, J, c)
        frames = torch.full_like(length, self.step.context.chunk)
        caches = self._unpacked(cache_last_channel, cache_last_time, cache_last_channel_len)
        found = self.step(audio_signal.mT, length, frames, **caches)
        named = dict(zip(self.step.outputs, found, strict=True))
        result = named[self.output]
        if self.output == "encoder_projected":
            result = result.mT
        after = {name: named[name.replace("cache", "next")] for name in caches}
        return result, frames, *self._packed(after)

    def _packed(self, caches: dict[str, Tensor]) -> tuple[Tensor, ...]:
        both = torch.cat([caches["cache_keys"], caches["cache_values"]], -2)
        flat = [caches["cache_conv"].transpose(0, 1).flatten(1), caches["cache_mel"].flatten(1)]
        return (
            both.transpose(0, 1).flatten(3),
            torch.cat(flat, 1)[:, None, None],
            caches["cache_frames"],
        )

    def _unpacked(self, channel: Tensor, time: Tensor, count: Tensor) -> dict[str, Tensor]:
        config = self.step.encoder.config
        keys, values = channel.transpose(0, 1).unflatten(3, (2 * config.heads, -1)).chunk(2, -2)
        rows = self.step.kept * config.subsampling, self.step.mel_bins
        flat = time[:, 0, 0]
        inputs, mel = flat.split([flat.shape[1] - rows[0] * rows[1], rows[0] * rows[1]], 1)
        sizes = config.layers, config.conv_kernel - 1, 2 * config.width
        return {
            "cache_mel": mel.unflatten(1, rows),
            "cache_keys": keys,
            "cache_values": values,
            "cache_conv": inputs.unflatten(1, sizes).transpose(0, 1),
            "cache_frames": count,
            # sherpa-onnx decodes whole chunks only.
            "cache_missing": torch.zeros_like(count),
        }
