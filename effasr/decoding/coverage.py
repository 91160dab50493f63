"""Coverage of the speech by the cross-attention of hypotheses in a beam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_THRESHOLD = 0.5
"""A frame is covered above this sum of attention over all tokens."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Attention of K hypotheses of N utterances to each frame.

    A frame is covered once the tokens of a hypothesis, its end included, have attended to it with
    more than 0.5 in total. Attending again gains nothing, so loops are not rewarded. The paper
    counts such frames; here it is their share, so that one weight suits short and long recordings
    whose scores are normalised by length. The attention is averaged over the heads of the decoder's
    last layer, where the paper's decoder has one head. Tokens of the prompt do not count.

    Attributes:
        frames: int64 (N,), of each utterance.
        attended: float64 (N, K, longest), weights summed over tokens; 0 past the end.

    References:
        Chorowski and Jaitly, 2017, https://arxiv.org/abs/1612.02695.
    """

    frames: Tensor
    attended: Tensor

    @classmethod
    def begin(cls, frames: Sequence[int], beam: int, device: torch.device) -> Coverage:
        """Return hypotheses without tokens."""
        shape = len(frames), beam, max(frames, default=0)
        attended = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(torch.tensor(frames, device=device), attended)

    def shares(self) -> Tensor:
        """Return the share of covered frames: float64 (N, K), 0 for an utterance without frames."""
        covered = (self.attended > _THRESHOLD).sum(-1)
        return covered.double() / self.frames.clamp(min=1)[:, None]

    def extended(self, weights: Tensor, reading: Tensor) -> Coverage:
        """Add the attention of one token.

        Args:
            weights: float64 (N K, at least the longest), 0 past the end.
            reading: bool (N, 1), utterances whose prompt is being read, which does not count.
        """
        weights = weights[:, : self.attended.shape[2]].view_as(self.attended)
        return replace(self, attended=self.attended + weights.masked_fill(reading[..., None], 0))

    def reordered(self, parent: Tensor) -> Coverage:
        """Continue with these parents, int64 (N, K)."""
        index = parent[..., None].expand_as(self.attended)
        return replace(self, attended=self.attended.gather(1, index))

    def keep(self, index: Tensor) -> Coverage:
        """Return only these utterances, int64 (M,)."""
        return Coverage(self.frames[index], self.attended[index])
