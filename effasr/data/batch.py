"""One micro-batch: packed audio, packed tokens, and the layouts they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels import PackedLayout, PackedSequence

IGNORED = -100
"""Target of a token row that no loss counts: a prompt, or the tail of a static shape."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the model needs for one forward and backward.

    All layouts have the same N; the sequences past ``len(ids)`` are empty.

    Attributes:
        audio: float32 (samples,), mono, at the model's sample rate.
        frames: Layout of the encoder's output frames, T rows.
        tokens: int64 (U,), what the decoder reads: prompt, then transcript.
        targets: int64 (U,), what it must say next; `IGNORED` in prompts and in the tail.
        text: int64 (U',), the transcript alone, for CTC and the transducer.
        monotonic: bool (N,), whether the text follows the speech in order (a transcription,
            not a translation), so that CTC and guided attention apply; else its ``text`` is empty.
        ids: The utterances, in order.
        audio_seconds: Their total duration in seconds.
    """

    audio: PackedSequence
    frames: PackedLayout
    tokens: PackedSequence
    targets: Tensor
    text: PackedSequence
    monotonic: Tensor
    ids: tuple[str, ...]
    audio_seconds: float
    num_targets: int
    """Rows of ``targets`` that a loss counts."""
    num_monotonic_targets: int
    """Those of them that belong to a transcription."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device; asynchronous from pinned memory."""
        move = {"device": device, "non_blocking": True}
        return Batch(
            self.audio.to(**move),
            self.frames.to(**move),
            self.tokens.to(**move),
            self.targets.to(**move),
            self.text.to(**move),
            self.monotonic.to(**move),
            self.ids,
            self.audio_seconds,
            self.num_targets,
            self.num_monotonic_targets,
        )

    def pin_memory(self) -> Batch:
        """The same batch in pinned memory; called by torch's DataLoader."""
        return Batch(
            self.audio.pin_memory(),
            self.frames.pin_memory(),
            self.tokens.pin_memory(),
            self.targets.pin_memory(),
            self.text.pin_memory(),
            self.monotonic.pin_memory(),
            self.ids,
            self.audio_seconds,
            self.num_targets,
            self.num_monotonic_targets,
        )
