"""Suppression of tokens in transcripts, as the decoder's configuration asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from effasr.model.decoder import Decoder
from effasr_kernels import projected_top_k

FORBIDDEN = -1e30  # logit of a suppressed token: finite, so that no sum of scores is NaN


@dataclass(frozen=True, slots=True)
class Suppression:
    always: Tensor  # int64 (S,), tokens that are never decoded
    begin: Tensor  # int64 (B,), tokens that no transcript begins with
    bias: Tensor  # (V,), of the output layer, with ``always`` suppressed

    @classmethod
    def from_decoder(cls, decoder: Decoder, classes: int | None = None) -> Self | None:
        """Return None if the configuration suppresses nothing."""
        config, weight = decoder.config, decoder.output_weight
        classes = len(weight) if classes is None else classes
        always = sorted({token for token in config.suppress if token < classes})
        begin = sorted({token for token in config.begin_suppress if token < classes} - {*always})
        if not always and not begin:
            return None
        tokens = torch.tensor(always, dtype=torch.int64, device=weight.device)
        bias = decoder.output_bias
        bias = weight.new_zeros(len(weight)) if bias is None else bias.detach()
        least = max(FORBIDDEN, torch.finfo(bias.dtype).min)
        return cls(
            always=tokens,
            begin=torch.tensor(begin, dtype=torch.int64, device=weight.device),
            bias=bias.index_fill(0, tokens, least),
        )

    def likeliest(
        self, decoder: Decoder, hidden: Tensor, begins: Tensor, classes: int | None = None
    ) -> Tensor:
        """Choose the best allowed token (N,) of rows (N, width), without waiting for the device."""
        # Among the best n + 1 tokens, with n tokens to avoid, at least one is allowed.
        count = len(self.begin) + 1
        _, best = projected_top_k(
            hidden, decoder.output_weight, bias=self.bias, k=count, classes=classes
        )
        barred = (best[..., None] == self.begin).any(-1) & begins[:, None]
        first = (~barred).to(torch.int32).argmax(1, keepdim=True)
        return best.gather(1, first)[:, 0]

    def applied(self, logits: Tensor, begins: Tensor) -> Tensor:
        """Return logits, float32 (N, V), with suppressed tokens at `FORBIDDEN`; ``begins`` (N,)."""
        logits = logits.index_fill(1, self.always, FORBIDDEN)
        return torch.where(begins[:, None], logits.index_fill(1, self.begin, FORBIDDEN), logits)
