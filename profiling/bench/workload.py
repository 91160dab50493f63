"""The benchmarked batch: a static shape with utterance lengths as in real corpora."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from effasr_kernels import PackedLayout

FRAMES_PER_SECOND = 12.5
LISTED = Path(__file__).parents[1] / "lengths" / "librispeech_dev_clean.txt"
_TOKENS_PER_SECOND, _PROMPT = 3.6, 5
_LONGEST_SECONDS = 40.0


def read_durations(path: Path) -> list[float]:
    """Return durations in seconds.

    Args:
        path: JSON lines with ``duration``; a table with tabs and a header with
            ``duration_seconds``; or one number a line, where ``#`` begins a comment.

    Raises:
        ValueError: There is no duration in the file.
    """
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".tsv":
            found = [float(row["duration_seconds"]) for row in csv.DictReader(file, delimiter="\t")]
        elif path.suffix in (".jsonl", ".json"):
            found = [float(json.loads(line)["duration"]) for line in file if line.strip()]
        else:
            found = [float(line) for line in file if line.strip() and line[0] != "#"]
    if not found:
        raise ValueError(f"{path} has no durations.")
    return found


def drawn_durations(count: int = 2_000) -> list[float]:
    """Log-normal, with a median of 6 s: for where there is no list."""
    generator = random.Random(0)
    return [generator.lognormvariate(1.8, 0.65) for _ in range(count)]


@dataclass(frozen=True)
class Widths:
    """A model's widths.

    Attributes:
        heads: H.
        vocabulary: V, without the blank.
        channels: Channels of the subsampling.
        mels: Bands of the features.
        pieces: V of a transducer, with the blank.
        speech_tokens: U of a micro-batch of 8,448 frames.
        speech_classes: V of Canary flash.
    """

    heads: int = 8
    vocabulary: int = 16_384
    channels: int = 256
    mels: int = 80
    pieces: int = 1_024
    speech_tokens: int = 2_560
    speech_classes: int = 5_248


@dataclass(frozen=True)
class Workload:
    """One packed batch, and what a model does with it.

    Attributes:
        rows: Frames of the static shape, which has fewer token rows; see `tokens`.
        head_width: D.
        durations: Durations to draw utterances from.
        device: Device of the tensors.
        dtype: Dtype of floating tensors.
        widths: The rest of the model.
        sequences: N of the static shape; by default one for 8 frames, as in training.
    """

    rows: int
    head_width: int
    durations: Sequence[float]
    device: torch.device
    dtype: torch.dtype
    widths: Widths = field(default_factory=Widths)
    sequences: int | None = None

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Frames and tokens of each utterance: drawn until the batch is full."""
        generator = random.Random(1)
        frames, tokens, left, places = [], [], self.rows, self.tokens
        while left > 0 and places > 1:
            seconds = min(generator.choice(self.durations), _LONGEST_SECONDS)
            length = min(max(1, round(seconds * FRAMES_PER_SECOND)), left)
            words = round(length / FRAMES_PER_SECOND * _TOKENS_PER_SECOND) + _PROMPT
            # A transcript that fits into half of its frames can always be aligned.
            words = max(1, min(words, length // 2, places))
            frames.append(length)
            tokens.append(words)
            left, places = left - length, places - words
        return frames, tokens

    @property
    def tokens(self) -> int:
        """Token rows of the static shape."""
        return self.rows // 2 if self.rows < 1_000 else self.rows * 2 // 5

    @property
    def width(self) -> int:
        """C, of the model."""
        return self.widths.heads * self.head_width

    @cached_property
    def frame_layout(self) -> PackedLayout:
        """Layout of the frames of the utterances."""
        return self._layout(self.lengths[0], self.rows)

    @cached_property
    def token_layout(self) -> PackedLayout:
        """Layout of their tokens."""
        return self._layout(self.lengths[1], self.tokens)

    def _layout(self, lengths: list[int], rows: int) -> PackedLayout:
        sequences = max(len(lengths), self.sequences or -(-self.rows // 8))
        longest = round(_LONGEST_SECONDS * FRAMES_PER_SECOND)
        return PackedLayout.from_lengths(
            lengths, self.device, rows=rows, num_sequences=sequences, static_max_seqlen=longest
        )

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return a leaf with normal values, equal in every run."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        values = torch.randn(*shape, device=self.device, generator=generator) * scale
        return values.to(self.dtype).requires_grad_()

    def rows_of(self, layout: PackedLayout, *shape: int, scale: float = 1.0) -> Tensor:
        """Return a leaf of packed rows, zero in the tail."""
        values = self.draw(layout.rows, *shape, scale=scale).detach()
        values[layout.total :] = 0
        return values.requires_grad_()

    def labels(self, classes: int) -> Tensor:
        """Return a class for each token row, (U,)."""
        generator = torch.Generator(self.device).manual_seed(3)
        shape = (self.tokens,)
        return torch.randint(classes, shape, device=self.device, generator=generator)

    def describe(self) -> str:
        """Return the sizes, for a row of the results."""
        frames = self.frame_layout
        return (
            f"T={self.rows} U={self.tokens} N={len(self.lengths[0])}/{frames.num_sequences} "
            f"longest={frames.max_seqlen} H={self.widths.heads} D={self.head_width}"
        )
