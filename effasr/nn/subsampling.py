"""Convolutional subsampling of mel rows by 4 or 8, over a packed batch."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from effasr.data.features.log_mel import MelFrames
from effasr.nn.linear import Linear
from effasr_kernels import strided_depthwise, subsampling_stem
from effasr_kernels.shared.cpu.linear import linear


class ConvSubsampling(nn.Module):
    """Two or three convolutions of stride 2 in time and frequency, then a linear layer.

    The function is transformers' ``ParakeetEncoderSubsamplingConv2D`` (NeMo's ``dw_striding``) of
    each utterance alone, with zeros beyond its real rows after every layer. Channels are last
    between the layers, so that a 1 x 1 convolution is a matrix product over all places. The first
    layer's activation, by far the largest of the model, exists only within `subsampling_stem`.

    If ``causal``, it is NeMo's ``dw_striding`` with ``causal_downsampling``: output o of a layer
    reads the inputs 2 o - 2 to 2 o, in time and in frequency. `Framing` counts its frames.
    """

    def __init__(
        self, mel_bins: int, channels: int, width: int, factor: int = 8, *, causal: bool = False
    ):
        super().__init__()
        self.factor, self.causal = factor, causal
        self.conv = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.depthwise1 = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels)
        self.pointwise1 = Linear(channels, channels)
        if factor == 8:
            self.depthwise2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels)
            self.pointwise2 = Linear(channels, channels)
        self.linear = Linear(channels * bands(mel_bins, factor, causal=causal)[-1], width)

    def forward(self, mel: MelFrames) -> Tensor:
        """Subsample mel rows to (T, width); rows of the tail are finite."""
        if self.causal:
            return self.project(self._causal(mel).relu().flatten(1))
        x = subsampling_stem(
            mel.values.to(self.conv.weight.dtype),
            *_taps(self.conv),
            *_taps(self.depthwise1),
            mel.layout,
            mel.lengths,
            rows_per_slot=self.factor,
        )
        # The products at padding rows are finite and not read by the next convolution.
        x = self.pointwise1(x)
        if self.factor == 8:
            quarter = (mel.lengths + 3) // 4
            x = strided_depthwise(x, *_taps(self.depthwise2), mel.layout, quarter, relu=True)
            x = self.pointwise2(x)
        # In place on a view, as the result of a linear layer is, its backward would copy the rows
        # three times.
        return self.project(x.relu().flatten(1))

    def _causal(self, mel: MelFrames) -> Tensor:
        """Compute all layers but the last: (T, bands, channels), before the last ReLU.

        Every layer is the symmetric one of inputs that come one row and one band later.
        """
        x = mel.values.to(self.conv.weight.dtype)
        # At least 7 rows of zeros follow an utterance, which none after it reads otherwise.
        x = F.conv2d(F.pad(x[None, None], (2, 1, 2, 1)), self.conv.weight, self.conv.bias, stride=2)
        layout = mel.layout.scaled(self.factor // 2)
        x, lengths = x[0, :, : layout.rows].permute(1, 2, 0), mel.lengths // 2 + 1
        for number, (depthwise, pointwise) in enumerate(self.stages(), 2):
            begins = (layout.positions() == 0)[:, None, None]
            later = F.pad(x, (0, 0, 1, 1 - x.shape[1] % 2, 1, 0))[:-1].masked_fill(begins, 0.0)
            layout = mel.layout.scaled(self.factor >> number)
            taps = _taps(depthwise)
            x = pointwise(strided_depthwise(later, *taps, layout, lengths + 1, relu=True))
            lengths = lengths // 2 + 1
        return x

    def stages(self) -> Iterator[tuple[nn.Conv2d, Linear]]:
        yield self.depthwise1, self.pointwise1
        if self.factor == 8:
            yield self.depthwise2, self.pointwise2

    def project(self, x: Tensor) -> Tensor:
        """Apply the last layer: (T, frequencies times channels) to (T, width)."""
        return linear(x, self.project_weight(), self.linear.bias)

    def project_weight(self) -> Tensor:
        """The last layer's weight for channels last; it is stored as (channel, frequency)."""
        weight, channels = self.linear.weight, self.conv.weight.shape[0]
        return weight.view(weight.shape[0], channels, -1).transpose(1, 2).flatten(1)


def bands(mel_bins: int, factor: int, *, causal: bool) -> list[int]:
    counts = [mel_bins]
    for _ in range(factor.bit_length() - 1):
        counts.append(counts[-1] // 2 + 1 if causal else counts[-1] // 2)
    return counts[1:]


def _taps(conv: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Weight (C, 9) and bias (C,) of a convolution of one input channel per filter."""
    assert conv.bias is not None
    return conv.weight.flatten(1), conv.bias
