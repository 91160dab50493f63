"""Result of a search."""

from __future__ import annotations

from dataclasses import dataclass

from effasr.decoding.ctc_alignment import Span


@dataclass(frozen=True, slots=True)
class Decoded:
    """Transcript of one utterance.

    Attributes:
        tokens: Token ids without prompt and end token.
        truncated: Whether the decoder reached its limit before the end token.
        spans: Encoder frames of each token; None if not requested, or if there are too few frames.
    """

    tokens: tuple[int, ...]
    truncated: bool = False
    spans: tuple[Span, ...] | None = None
