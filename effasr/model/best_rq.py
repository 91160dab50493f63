"""BEST-RQ: pretraining of an encoder on audio alone.

The mel rows of each encoder frame are projected by a frozen random matrix, and the nearest of a
frozen random codebook is the target of the frame. Spans of the input are replaced by noise, and the
encoder predicts the targets there.

References:
    Chiu et al., Self-supervised learning with random-projection quantizer for speech recognition,
    2022, https://arxiv.org/abs/2202.01855. Several codebooks with a softmax each: Zhang et al.,
    Google USM, 2023, https://arxiv.org/abs/2303.01037.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from effasr import ranges
from effasr.checks import check, check_positive
from effasr.data.features.config import FeatureConfig
from effasr.data.features.log_mel import MelFrames, normalized
from effasr.data.features.segments import segment_sum
from effasr_kernels import PackedLayout, PackedSequence, linear_cross_entropy

_IGNORED = -100

_FEATURE_SCALE, _LARGEST_FEATURE = 32, 255
_LARGEST_WEIGHT = 127
_CODE_SCALE = 256
"""Features, projections and codes are rounded to integers, so that float64 sums of their products
are exact, and the codes do not depend on the order in which a matrix product adds."""

_ROWS = 1024
"""Frames whose distances to all codes exist at a time: 64 MiB for 8192 codes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestRQConfig:
    """Targets and masks of BEST-RQ.

    Attributes:
        codebooks: Codebooks, each with a projection and a softmax of its own; the loss is their
            mean.
        codes: Codes of each.
        code_width: Channels of a code.
        masked_share: Expected share of the frames that are masked. 0.33 is what spans of 400 ms
            have that begin at each row of 10 ms with a probability of 0.01.
        span_s: Length of a masked span in seconds, rounded to encoder frames; spans may overlap.
        noise: Standard deviation of the noise in place of masked features.
        seed: Seed of projections and codebooks, whatever the seed of the run is.
    """

    codebooks: int = 4
    codes: int = 8192
    code_width: int = 16
    masked_share: float = 0.33
    span_s: float = 0.4
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "codebooks", "code_width")
        check(self.codes >= 2, "codes", "be at least 2", self.codes)
        share = self.masked_share
        check(0 < share < 1, "masked_share", "lie between 0 and 1", share, "0.33 is usual")
        check(0 < self.span_s <= 10, "span_s", "be seconds, up to 10", self.span_s)
        check(self.noise >= 0, "noise", "be at least 0", self.noise)
        check(0 <= self.seed < 2**32, "seed", "be from 0 to 2**32 - 1", self.seed)


class RandomQuantizer(nn.Module):
    """Frozen random projections and codebooks; the seed gives them, and no checkpoint holds them.

    The code of a frame has the largest product with its projection: with codes of norm 1 that is
    the nearest to the projection's direction.
    """

    projection: Tensor
    codes: Tensor

    def __init__(self, config: BestRQConfig, inputs: int):
        super().__init__()
        self.config, self.inputs = config, inputs
        width = config.code_width
        for name, rows in (("projection", inputs), ("codes", config.codes)):
            empty = torch.empty(config.codebooks, rows, width, dtype=torch.int32)
            # Integers, which casts of the weights leave as they are.
            self.register_buffer(name, empty, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the projections and the codebooks; a meta module gets them on the host."""
        device = torch.device("cpu") if self.codes.is_meta else self.codes.device
        config = self.config
        # The stream of RandomState never changes, unlike that of numpy's newer generators.
        draw = np.random.RandomState(config.seed)
        shape = config.codebooks, self.inputs, config.code_width
        projection = draw.randint(-_LARGEST_WEIGHT, _LARGEST_WEIGHT + 1, shape)
        codes = draw.standard_normal((config.codebooks, config.codes, config.code_width))
        codes /= np.linalg.norm(codes, axis=-1, keepdims=True)
        self.projection = torch.tensor(projection, dtype=torch.int32, device=device)
        rounded = np.rint(_CODE_SCALE * codes)
        self.codes = torch.tensor(rounded, dtype=torch.int32, device=device)

    @torch.no_grad()
    def forward(self, frames: Tensor) -> Tensor:
        """Codes of stacked, normalised mel rows: (T, inputs) to int64 (K, T)."""
        with torch.autocast(frames.device.type, enabled=False):
            rounded = (frames * _FEATURE_SCALE).round().nan_to_num(0.0)
            whole = rounded.clamp(-_LARGEST_FEATURE, _LARGEST_FEATURE).double()
            codes = [self._nearest(rows) for rows in whole.split(_ROWS)]
        return torch.cat(codes, 1)

    def _nearest(self, frames: Tensor) -> Tensor:
        books = zip(self.projection.double(), self.codes.double(), strict=True)
        return torch.stack([(frames @ by @ codes.T).argmax(-1) for by, codes in books])


class BestRQ(nn.Module):
    """Masks the input of an encoder, and computes the loss of its output.

    ``code_counts``, int64 (K, codes), counts the codes of the frames in training, masked or not;
    `effasr.training.untranscribed.code_use` reads it.
    """

    code_counts: Tensor

    def __init__(self, config: BestRQConfig, features: FeatureConfig, width: int):
        super().__init__()
        self.config, self._is_normalized = config, features.normalize
        inputs = features.rows_per_frame * features.mel_bins
        self.quantizer = RandomQuantizer(config, inputs)
        self.heads = nn.ModuleList(nn.Linear(width, config.codes) for _ in range(config.codebooks))
        frame_s = features.framing.samples / features.sample_rate
        self.span = max(1, round(config.span_s / frame_s))
        self._begins = 1 - (1 - config.masked_share) ** (1 / self.span)
        counts = torch.zeros(config.codebooks, config.codes, dtype=torch.int64)
        self.register_buffer("code_counts", counts, persistent=False)

    def reset_parameters(self) -> None:
        """Set the counts to zero; a meta module gets them on the host."""
        device = torch.device("cpu") if self.code_counts.is_meta else self.code_counts.device
        self.code_counts = torch.zeros(self.code_counts.shape, dtype=torch.int64, device=device)

    def mask(self, mel: MelFrames, values: Tensor) -> tuple[Tensor, Tensor]:
        """Replace spans of an input by noise.

        Every utterance with frames has a span. Random numbers come from torch's global generator
        of the device, as many whatever the lengths are.
        """
        # values: float32 (s T, mel_bins), the input, such as these features with SpecAugment ->
        # bool (T,)
        masked = draw_spans(mel.layout, self.span, self._begins)
        rows = masked.repeat_interleave(mel.subsampling) & mel.mask
        noise = torch.randn_like(values).mul_(self.config.noise)
        return torch.where(rows[:, None], noise, values), masked

    def codes(self, mel: MelFrames) -> Tensor:
        """Codes of each encoder frame, int64 (K, T); without meaning in the tail."""
        values = mel.values if self._is_normalized else normalized(mel)
        return self.quantizer(values.view(mel.layout.rows, -1))

    def forward(self, mel: MelFrames, masked: Tensor, encoded: PackedSequence) -> Tensor:
        """(N,), the cross-entropy of an utterance, a mean over its masked frames, times its frames.

        The sum over utterances, divided by all frames, is thus a mean that does not depend on how
        many frames were masked. It is a mean over the codebooks, too.
        """
        # masked: bool (T,), which frames the encoder did not see
        with ranges.range("best_rq"):
            codes, layout = self.codes(mel), mel.layout
            if self.training:
                self._count(codes, layout)
            targets = codes.masked_fill(~masked, _IGNORED)
            total = encoded.values.new_zeros(layout.rows, dtype=torch.float32)
            for head, target in zip(self.heads, targets, strict=True):
                total = total + linear_cross_entropy(
                    encoded.values,
                    head.weight,  # type: ignore[arg-type]
                    target,
                    bias=head.bias,  # type: ignore[arg-type]
                    ignore_index=_IGNORED,
                )
            frames = layout.cu_seqlens.diff()
            counted = segment_sum(masked.float(), layout).clamp(min=1)
            return segment_sum(total, layout) * (frames / counted / len(self.heads))

    @torch.no_grad()
    def _count(self, codes: Tensor, layout: PackedLayout) -> None:
        self.code_counts.scatter_add_(1, codes, layout.mask().long().expand_as(codes))


def draw_spans(layout: PackedLayout, span: int, begins: float) -> Tensor:
    """Draw spans of frames: bool (T,), at least one in each sequence, False in the tail."""
    device, rows = layout.device, layout.rows
    offsets, real = layout.cu_seqlens.long(), layout.mask()
    first = (torch.rand(rows, device=device) < begins) & real
    lengths = offsets.diff()
    share = torch.rand(layout.num_sequences, device=device)
    # rand is below 1, but its product with an int in float32 may round up to that int.
    chosen = offsets[:-1] + torch.minimum((share * lengths).long(), lengths - 1)
    before = torch.nn.functional.pad(first.long().cumsum(0), (1, 0))
    lacking = (before[offsets[1:]] == before[offsets[:-1]]) & (lengths > 0)
    extra = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    extra.index_add_(0, torch.where(lacking, chosen, rows), lacking.long())
    begun = torch.nn.functional.pad((first.long() + extra[:-1]).cumsum(0), (1, 0))
    row = torch.arange(rows, device=device)
    earliest = torch.maximum(row - (span - 1), offsets[layout.sequence_ids()])
    return (begun[row + 1] > begun[earliest]) & real
