"""The benchmarked batch of an operation: a static shape with utterance lengths as in corpora."""

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
TOKENS_PER_SECOND = 3.6  # of English
PROMPT = (7, 4, 16, 5)
LISTED = Path(__file__).parents[1] / "lengths" / "librispeech_dev_clean.txt"
_DECODER_PROMPT = 5
_LONGEST_SECONDS = 40.0


def read_durations(path: Path) -> list[float]:
    """Return seconds: ``duration`` of JSON lines, ``duration_seconds`` of a .tsv, or lines."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".tsv":
            table = csv.DictReader(file, delimiter="\t")
            durations = [float(row["duration_seconds"]) for row in table]
        elif path.suffix in (".jsonl", ".json"):
            durations = [float(json.loads(line)["duration"]) for line in file if line.strip()]
        else:
            durations = [float(line) for line in file if line.strip() and line[0] != "#"]
    if not durations:
        raise ValueError(f"{path} has no durations.")
    return durations


def drawn_durations(count: int = 2_000) -> list[float]:
    """Log-normal, with a median of 6 s: for where there is no list."""
    generator = random.Random(0)
    return [generator.lognormvariate(1.8, 0.65) for _ in range(count)]


@dataclass(frozen=True)
class Widths:
    heads: int = 8  # H
    vocabulary: int = 16_384  # V, without the blank
    channels: int = 256  # of the subsampling
    mels: int = 80
    pieces: int = 1_024  # V of a transducer, with the blank
    speech_tokens: int = 2_560  # U of a micro-batch of 8,448 frames
    speech_classes: int = 5_248  # V of Canary flash


@dataclass(frozen=True)
class Workload:
    """One packed batch of drawn utterances, and what a model does with it."""

    rows: int  # frames of the static shape, which has fewer token rows
    head_width: int  # D
    durations: Sequence[float]
    device: torch.device
    dtype: torch.dtype
    widths: Widths = field(default_factory=Widths)
    sequences: int | None = None  # N of the static shape; as in training, one for 8 frames

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Frames and tokens of each utterance: drawn until the batch is full."""
        generator = random.Random(1)
        frames, tokens = [], []
        free_rows, free_tokens = self.rows, self.tokens
        while free_rows > 0 and free_tokens > 1:
            seconds = min(generator.choice(self.durations), _LONGEST_SECONDS)
            length = min(max(1, round(seconds * FRAMES_PER_SECOND)), free_rows)
            words = round(length / FRAMES_PER_SECOND * TOKENS_PER_SECOND) + _DECODER_PROMPT
            # A transcript that fits into half of its frames can always be aligned.
            words = max(1, min(words, length // 2, free_tokens))
            frames.append(length)
            tokens.append(words)
            free_rows, free_tokens = free_rows - length, free_tokens - words
        return frames, tokens

    @property
    def tokens(self) -> int:
        return self.rows // 2 if self.rows < 1_000 else self.rows * 2 // 5

    @property
    def width(self) -> int:
        return self.widths.heads * self.head_width

    @cached_property
    def frame_layout(self) -> PackedLayout:
        return self._layout(self.lengths[0], self.rows)

    @cached_property
    def token_layout(self) -> PackedLayout:
        return self._layout(self.lengths[1], self.tokens)

    def _layout(self, lengths: list[int], rows: int) -> PackedLayout:
        sequences = max(len(lengths), self.sequences or -(-self.rows // 8))
        longest = round(_LONGEST_SECONDS * FRAMES_PER_SECOND)
        layout = PackedLayout.from_lengths(
            lengths, self.device, rows=rows, num_sequences=sequences, static_max_seqlen=longest
        )
        # As in training, where all layers share them.
        return layout.with_tile_tables()

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        values = torch.randn(*shape, device=self.device, generator=generator) * scale
        return values.to(self.dtype).requires_grad_()

    def rows_of(self, layout: PackedLayout, *shape: int, scale: float = 1.0) -> Tensor:
        """Return a leaf of packed rows, zero in the tail."""
        values = self.draw(layout.rows, *shape, scale=scale).detach()
        values[layout.total :] = 0
        return values.requires_grad_()

    def labels(self, classes: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(3)
        shape = (self.tokens,)
        return torch.randint(classes, shape, device=self.device, generator=generator)

    def describe(self) -> str:
        frames = self.frame_layout
        return (
            f"T={self.rows} U={self.tokens} N={len(self.lengths[0])}/{frames.num_sequences} "
            f"longest={frames.max_seqlen} H={self.widths.heads} D={self.head_width}"
        )
