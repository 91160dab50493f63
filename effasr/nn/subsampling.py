"""Convolutions that turn eight mel rows into one encoder frame, over a whole packed batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.data.features import SUBSAMPLING, MelFrames, spread_layout

_IMAGE_SLOTS = 1_024


class _Grid(NamedTuple):
    """Where the slots of 8 mel rows stand in images of equal height.

    Attributes:
        source: int64 (images, slots), the frame row of each slot; T for a slot of zeros.
        lengths: int64 (images, slots), real mel rows of the slot's utterance from the slot on.
        image: int64 (T,), where each frame comes out.
        row: int64 (T,), its row there.
    """

    source: Tensor
    lengths: Tensor
    image: Tensor
    row: Tensor


class Subsampling(nn.Module):
    """Three convolutions of stride 2 in time and frequency, then a linear layer.

    The function is Hugging Face's ``ParakeetEncoderSubsamplingConv2D`` (NeMo's ``dw_striding``) of
    each utterance alone, with zeros beyond its real rows after every layer. The packed batch is
    one image, in which a spare slot of zeros follows each utterance: a convolution of three rows
    never sees two utterances. An image over 1,024 slots is cut; each part repeats the last slot
    of the part before, which is all that its first frame can see. So no tensor that a
    convolution sees outgrows 32-bit indices.
    """

    def __init__(self, mel_bins: int, channels: int, width: int):
        """Build the layers.

        Args:
            mel_bins: Bands, a multiple of 8.
            channels: Of the convolutions.
            width: Of the encoder frames.
        """
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.depthwise1 = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels)
        self.pointwise1 = nn.Linear(channels, channels)
        self.depthwise2 = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels)
        self.pointwise2 = nn.Linear(channels, channels)
        self.linear = nn.Linear(channels * (mel_bins // SUBSAMPLING), width)

    def forward(self, mel: MelFrames) -> Tensor:
        """Subsample: T slots of mel rows to (T, width); the tail's rows are finite."""
        rows, bins = mel.layout.rows, mel.values.shape[1]
        grid = _grid(mel)
        slots = F.pad(mel.values.view(rows, SUBSAMPLING * bins), (0, 0, 0, 1))
        images, height = grid.source.shape
        x = slots[grid.source].view(images, 1, height * SUBSAMPLING, bins)
        x = x.to(self.conv.weight.dtype)
        x = _masked(self.conv(x), grid.lengths, 4).relu_()
        # The second of a pair mixes no rows: one mask after it is the same as two.
        x = _masked(_over_channels(self.pointwise1, self.depthwise1(x)), grid.lengths, 2).relu_()
        # Every row of the last layer that is kept is real.
        x = _over_channels(self.pointwise2, self.depthwise2(x)).relu_()
        return self.linear(x.transpose(1, 2)[grid.image, grid.row].flatten(1))


def _grid(mel: MelFrames) -> _Grid:
    layout, device = mel.layout, mel.layout.device
    spread = spread_layout(layout)
    height = max(1, min(_IMAGE_SLOTS, spread.rows))
    images = -(-spread.rows // height)
    # The first slot of an image is the last of the one before.
    place = torch.arange(images, device=device)[:, None] * height
    place = place + torch.arange(-1, height, device=device)
    inside = (place >= 0) & (place < spread.rows)
    place = place.clamp(0, spread.rows - 1)
    ids = spread.sequence_ids()[place]
    position = place - spread.cu_seqlens.long()[ids]
    lengths = F.pad(mel.lengths, (0, 1))[ids] - position * SUBSAMPLING
    lengths = lengths.masked_fill(~inside, 0).clamp(min=0)
    source = torch.where(lengths > 0, place - ids, layout.rows)
    spread_rows = torch.arange(layout.rows, device=device) + mel.slot_ids
    return _Grid(source, lengths, spread_rows // height, spread_rows % height + 1)


def _over_channels(linear: nn.Linear, x: Tensor) -> Tensor:
    """A 1 x 1 convolution of (images, C, rows, F), as one matrix product.

    On a CPU this takes a fraction of the time of the convolution's backward.
    """
    weight = linear.weight.expand(x.shape[0], -1, -1)
    y = torch.baddbmm(linear.bias[:, None], weight, x.flatten(2))
    return y.view_as(x)


def _masked(x: Tensor, lengths: Tensor, rows_per_slot: int) -> Tensor:
    """Set the rows of (images, C, slots * rows_per_slot, F) that are not real to zero, in place."""
    step = SUBSAMPLING // rows_per_slot
    first = torch.arange(rows_per_slot, device=x.device) * step
    mask = (first < lengths[..., None]).flatten(1)
    return x.mul_(mask[:, None, :, None])
