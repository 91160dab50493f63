"""How recordings become text: what to search with, and how much to hold at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_COUNTS = "beam", "max_symbols", "frame_budget", "max_sequences", "extra_tokens", "workers"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingConfig:
    """How recordings are cut, batched and decoded.

    Attributes:
        method: ``attention``, ``transducer``, ``ctc``, or ``auto``: the first of them that the
            model has.
        beam: Hypotheses that are kept of each utterance; 1 for greedy search. Only a transducer can
            be searched with more.
        max_symbols: Most labels that greedy search of a transducer may emit at one frame.
        frame_budget: Encoder frames of a batch (80 ms each at the usual sizes).
        max_sequences: Utterances of a batch.
        chunk_seconds: A longer recording is cut at pauses into chunks of at most this length, or
            of what ``encoder.max_frames`` allows, if that is less.
        search_seconds: How far a cut may move towards a pause.
        tokens_per_frame: With ``extra_tokens``, a bound on the length of a transcript, for the
            attention decoder may repeat itself for ever: ``tokens_per_frame * frames + extra``. A
            beam has it, too.
        extra_tokens: See ``tokens_per_frame``.
        precision: Of matrix products, in the sense of autocast.
        workers: Threads that load audio.
        words: Whether to find when each word is said; needs a model with a CTC head.
    """

    method: Literal["auto", "attention", "transducer", "ctc"] = "auto"
    beam: int = 1
    max_symbols: int = 10
    frame_budget: int = 4096
    max_sequences: int = 256
    chunk_seconds: float = 30.0
    search_seconds: float = 3.0
    tokens_per_frame: float = 2.0
    extra_tokens: int = 16
    precision: Literal["float32", "bfloat16"] = "float32"
    workers: int = 4
    words: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        if self.chunk_seconds < 1.0:
            raise ValueError(f"`chunk_seconds` must be at least 1, but is {self.chunk_seconds}.")
        if not 0.0 <= self.search_seconds <= self.chunk_seconds / 2:
            raise ValueError(
                f"`search_seconds` must be from 0 to half of `chunk_seconds` = "
                f"{self.chunk_seconds}, but is {self.search_seconds}."
            )
        if not self.tokens_per_frame >= 0.0:
            raise ValueError(
                f"`tokens_per_frame` must be at least 0, but is {self.tokens_per_frame}."
            )

    def max_tokens(self, frames: int) -> int:
        """The most tokens that the transcript of this many encoder frames may have."""
        return int(self.tokens_per_frame * frames) + self.extra_tokens
