"""Suppression of tokens in transcripts, as the decoder's configuration asks."""

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
    begin_bias: Tensor  # (V,), with ``begin`` suppressed as well

    @classmethod
    def from_decoder(cls, decoder: Decoder, classes: int | None = None) -> Self | None:
        """Return None if the configuration suppresses nothing."""
        config, weight = decoder.config, decoder.output_weight
        classes = len(weight) if classes is None else classes
        always = sorted({token for token in config.suppress if token < classes})
        begin = sorted({token for token in config.begin_suppress if token < classes} - {*always})
        if not always and not begin:
            return None
        tokens, first = (
            torch.tensor(barred, dtype=torch.int64, device=weight.device)
            for barred in (always, begin)
        )
        bias = decoder.output_bias
        bias = weight.new_zeros(len(weight)) if bias is None else bias.detach()
        least = max(FORBIDDEN, torch.finfo(bias.dtype).min)
        bias = bias.index_fill(0, tokens, least)
        return cls(tokens, first, bias, bias.index_fill(0, first, least))

    def likeliest(
        self, decoder: Decoder, hidden: Tensor, begins: Tensor, classes: int | None = None
    ) -> Tensor:
        """Choose the best allowed token (N,) of rows (N, width), without waiting for the device."""
        if hidden.device.type == "cpu":  # nothing to wait for: rows that begin are chosen again
            best = decoder.likeliest(hidden, classes, self.bias)
            if begins.any():
                best[begins] = decoder.likeliest(hidden[begins], classes, self.begin_bias)
            return best
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
