"""What a search hands back, whatever its method."""

from __future__ import annotations

from dataclasses import dataclass

from effasr.decoding.ctc_alignment import Span


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was recognised in one utterance.

    Attributes:
        tokens: The transcript, without prompt and end.
        truncated: Whether the decoder was stopped before it said that the text ends.
        spans: Encoder frames of each token; None where they were not asked for, or where there
            are too few frames for the tokens.
    """

    tokens: tuple[int, ...]
    truncated: bool = False
    spans: tuple[Span, ...] | None = None
