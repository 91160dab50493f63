"""Greedy CTC search of streams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.decoding.streaming.emitted import Emitted
from effasr.model.asr import ASRModel


class CTCStreams:
    """Decodes as `effasr.decoding.ctc_greedy`; a symbol is not repeated across chunks either."""

    def __init__(self, model: ASRModel, slots: int):
        """Prepare a number of slots, each for a stream at a time."""
        self._model, self._blank = model, model.vocab_size
        self._last = [self._blank] * slots

    def start(self, slot: int) -> None:
        """Begin a stream in a slot."""
        self._last[slot] = self._blank

    @torch.inference_mode()
    def step(self, encoded: Tensor, frames: Sequence[int]) -> list[list[Emitted]]:
        """Return the new tokens of each slot.

        Args:
            encoded: (S, c, encoder width).
            frames: Real frames of each slot, which come first.
        """
        best = self._model.ctc_logits(encoded.flatten(0, 1)).argmax(-1)
        found: list[list[Emitted]] = []
        for slot, symbols in enumerate(best.view(encoded.shape[:2]).tolist()):
            tokens, last = list[Emitted](), self._last[slot]
            for frame, symbol in enumerate(symbols[: frames[slot]]):
                if symbol not in (last, self._blank):
                    tokens.append(Emitted(symbol, frame))
                last = symbol
            self._last[slot] = last
            found.append(tokens)
        return found
