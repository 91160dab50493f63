"""Settings of one process of the Whisper benchmark: plain values, passed as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Task = Literal["finetune", "transcribe"]

FINETUNING = ("transformers", "effasr_silence", "effasr", "effasr_filled")
CTRANSLATE2 = "ctranslate2_float32", "ctranslate2_int8"
TRANSCRIBING = ("transformers", *CTRANSLATE2, "effasr_silence", "effasr")
SYSTEMS: dict[Task, tuple[str, ...]] = {"finetune": FINETUNING, "transcribe": TRANSCRIBING}


@dataclass(frozen=True)
class Size:
    """The shape of a Whisper model.

    Attributes:
        width: Width of encoder and decoder.
        layers: Layers of each.
        heads: Heads of their attention; feed-forward networks are four times as wide as the model.
        window_s: Whole seconds that the encoder was made for; shorter utterances are followed by
            silence, except where ``minimum_s`` is 0.
    """

    width: int
    layers: int
    heads: int
    window_s: int = 30


SIZES = {
    "dry_run": Size(32, 1, 2, window_s=4),
    "tiny": Size(384, 4, 6),
    "base": Size(512, 6, 8),
    "small": Size(768, 12, 12),
}


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        task: One of the two tasks.
        model: A name of `SIZES`.
        folder: The checkpoints that `whisper_bench.checkpoint.prepare` wrote.
        lengths: A file of durations; see `bench.workload.read_durations`.
        utterances: Number of utterances drawn from it; ``transcribe`` decodes them all in a run.
        batch: Utterances of a batch of padded features.
        threads: Threads of each system.
    """

    task: Task
    model: str
    folder: str
    lengths: str
    utterances: int
    batch: int
    threads: int

    @property
    def size(self) -> Size:
        """Sizes of the model."""
        return SIZES[self.model]

    @property
    def exported(self) -> Path:
        """The checkpoint that transformers reads: exported by effasr."""
        return Path(self.folder) / "exported"

    @property
    def imported(self) -> Path:
        """The checkpoint that effasr imports: written by transformers."""
        return Path(self.folder) / "transformers"

    def converted(self, compute_type: str) -> Path:
        """Return the checkpoint that CTranslate2 reads."""
        return Path(self.folder) / f"ctranslate2_{compute_type}"

    def minimum_s(self, system: str) -> int:
        """Return seconds that an utterance lasts at least, by silence behind it."""
        return 0 if system in ("effasr", "effasr_filled") else self.size.window_s

    def to_json(self) -> str:
        """Return the settings as JSON for the command line of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the inverse of `to_json`."""
        return cls(**json.loads(text))
