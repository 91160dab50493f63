"""What a run trains on, and how it is batched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from effasr.data.filter_config import FilterConfig
from effasr.data.filters import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Manifests, tokenizer, budgets and loading.

    Attributes:
        train: Manifests to train on, of any kind that `effasr.data.manifests.read` takes.
        validation: Manifests to evaluate on during training.
        tokenizer: Folder of the tokenizer.
        language: The language of utterances that name none.
        frame_budget: Encoder frames (80 ms) of a micro-batch.
        token_budget: Decoder tokens (prompts and texts) of a micro-batch; by default what the
            corpus fills at the same time as the frame budget.
        max_sequences: Utterances of a micro-batch; by default one per 8 frames (0.64 s).
        micro_batches: Micro-batches of a global step, over all ranks: the gradient of a step
            does not depend on the number of ranks that share them.
        min_duration: Shorter utterances are dropped; seconds.
        max_duration: Longer utterances are dropped; seconds.
        filters: What else is left out, and how much may be.
        workers: Processes that load audio for each rank; 0 loads in the training process.
        prefetch: Micro-batches that each worker prepares ahead.
        on_bad_audio: ``raise`` stops at audio that cannot be read; ``skip`` leaves it out,
            counted and listed.
    """

    train: str | tuple[str, ...] = ()
    validation: str | tuple[str, ...] = ()
    tokenizer: str = ""
    language: str = "en"
    frame_budget: int = 8000
    token_budget: int | None = None
    max_sequences: int | None = None
    micro_batches: int = 1
    min_duration: float = 0.1
    max_duration: float = 40.0
    filters: FilterConfig = field(default_factory=FilterConfig)
    workers: int = 4
    prefetch: int = 2
    on_bad_audio: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        for name in ("train", "validation"):
            value = getattr(self, name)
            paths = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, name, paths)
        for name in ("frame_budget", "micro_batches", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}.")
        for name in ("token_budget", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, but is {value}: leave it out to derive it."
                )
        if self.workers < 0:
            raise ValueError(f"`workers` must be at least 0, but is {self.workers}.")
        if self.on_bad_audio not in ("raise", "skip"):
            raise ValueError(
                f"`on_bad_audio` must be 'raise' or 'skip', but is {self.on_bad_audio!r}."
            )
        self.limits()

    def limits(
        self,
        *,
        ctc: bool = True,
        max_frames: int | None = None,
        max_positions: int | None = None,
    ) -> Limits:
        """What an utterance may be under this configuration.

        Args:
            ctc: Whether the model has a CTC head, for which texts must not be too long.
            max_frames: See `Limits`.
            max_positions: See `Limits`.
        """
        return Limits(
            min_duration=self.min_duration,
            max_duration=self.max_duration,
            frame_budget=self.frame_budget,
            token_budget=self.token_budget,
            max_frames=max_frames,
            max_positions=max_positions,
            max_tokens_per_second=self.filters.max_tokens_per_second,
            max_characters_per_second=self.filters.max_characters_per_second,
            languages=self.filters.languages,
            characters=self.filters.characters,
            ctc=ctc,
        )
