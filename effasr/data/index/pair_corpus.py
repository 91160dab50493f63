"""Text pairs as the only data of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from effasr.data.audio.augmentation.config import AudioAugmentationConfig
from effasr.data.audio.waveform import AudioSegment
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import TextExample
from effasr.data.config import DataConfig
from effasr.data.filters.config import FilterConfig
from effasr.data.filters.rules import Dropped
from effasr.data.index.text_corpus import TextCorpus
from effasr.data.mixture_summary import Mixture, MixtureSummary
from effasr.data.prompt import Prompt
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.population import Population
from effasr.data.tokenizer import Tokenizer

_NO_AUDIO = AudioSegment("", 0.0, 0.0, (0,))


@dataclass(frozen=True, slots=True, eq=False)
class PairCorpus:
    """Text pairs that are all that a run trains on; made by `PairCorpus.load`.

    It serves the loader and the trainer as `effasr.data.index.corpus.Corpus` does: an epoch has
    each pair once, or what the shares of a mixture draw.

    Attributes:
        pairs: The pairs; ``lengths.frames`` are tokens of the text encoder.
        prompt: The most frequent prompt.
        mixture: Requested share of each source; None without shares.
        seconds: 0, as there is no audio.
        text: None; no pairs go beside these.
    """

    pairs: TextCorpus
    prompt: Prompt
    mixture: Mixture | None
    seconds: float = field(default=0.0, init=False)
    text: None = field(default=None, init=False)

    @classmethod
    def load(
        cls,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        max_positions: int | None = None,
        sources: Sequence[int] | None = None,
    ) -> PairCorpus:
        """Read manifests of text pairs and tokenize them.

        Args:
            paths: See `effasr.data.manifest.pairs.pairs`.
            tokenizer: Tokenizer of texts and prompts.
            config: ``frame_budget`` is the text encoder's tokens of a micro-batch,
                ``token_budget`` the decoder's, by default what fills at the same time.
            max_positions: Most decoder tokens that the model accepts; None for no limit.
            sources: As `TextCorpus.load`.

        Raises:
            ValueError: A manifest is malformed, no pair is left, or a setting is of audio.
        """
        _check(config)
        pairs = TextCorpus.load(
            paths,
            tokenizer,
            config,
            token_budget=config.token_budget,
            row_budget=config.known_frame_budget,
            max_positions=max_positions,
            sources=sources,
        )
        return cls(pairs, pairs.prompt, None if config.mix is None else pairs.mixture)

    def __len__(self) -> int:
        return len(self.pairs)

    def with_experts(self, number: Callable[[Prompt, str | None], int]) -> PairCorpus:
        """Return the same pairs, with the expert of each; see `TextCorpus.with_experts`."""
        return replace(self, pairs=self.pairs.with_experts(number))

    @property
    def lengths(self) -> UtteranceLengths:
        """Tokens of the text encoder and of the decoder, of each pair."""
        return self.pairs.lengths

    @property
    def shape(self) -> StaticShape:
        """The static shape of every batch."""
        return self.pairs.shape

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """Pairs of the manifests that were left out, with the reasons."""
        return self.pairs.dropped

    @property
    def sources(self) -> np.ndarray:
        """The source of each pair, uint16 (n,)."""
        return self.pairs.sources

    @property
    def amounts(self) -> np.ndarray:
        """Tokens of the text encoder, by which shares are measured: int32 (n,)."""
        return self.lengths.frames

    @property
    def samples(self) -> np.ndarray:
        """Samples of each pair, int64 (n,): none."""
        return np.zeros(len(self), dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        """Digest of lengths, texts, sources and order, which a resumed run compares."""
        return self.pairs.fingerprint

    def populations(self, seed: int) -> Population | None:
        """Return the function that draws an epoch's pairs; None if an epoch has each once."""
        if self.mixture is None:
            return None
        return self.mixture.populations(self.sources, self.amounts, seed=seed)

    def steps(self, micro_batches: int) -> int:
        """Return the approximate global steps of an epoch."""
        members = slice(None) if (draw := self.populations(seed=0)) is None else draw(0)
        frames = int(self.lengths.frames[members].sum(dtype=np.int64)) / self.shape.frame_budget
        tokens = int(self.lengths.tokens[members].sum(dtype=np.int64)) / self.shape.token_budget
        return max(1, round(max(frames, tokens) / micro_batches))

    def summaries(
        self, plan: EpochPlan, text_plan: EpochPlan | None = None
    ) -> list[MixtureSummary]:
        """Return the shares that a plan gives the sources; empty without a mixture."""
        if self.mixture is None:
            return []
        drawn = self.mixture.count(self.sources, self.amounts, plan.indices)
        return [self.mixture.summary(drawn)]

    @property
    def speakers(self) -> int:
        """Number of speakers: 0."""
        return 0

    @property
    def monotonic(self) -> np.ndarray:
        """Whether a text follows speech word by word, bool (n,): False, as there is none."""
        return np.zeros(len(self), dtype=bool)

    @property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each text to write, with its prompt, int32 (n,)."""
        return self.lengths.tokens

    def token_ids(self, vocab_size: int) -> np.ndarray:
        """Return the distinct token ids, sorted."""
        return self.pairs.token_ids()

    def transcripts(self, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield nothing: there are no transcripts for CTC."""
        return iter(())

    def audio(self, index: int) -> AudioSegment:
        """Return a segment of no file, for messages."""
        return _NO_AUDIO

    def name(self, index: int) -> str:
        """Return the id of a pair."""
        return self.example(index).id

    def duration(self, index: int) -> float:
        """Return the duration of a pair's audio: 0."""
        return 0.0

    def example(self, index: int) -> TextExample:
        """Return a pair, ready to be packed."""
        return self.pairs.example(index)

    def collate(
        self, examples: Sequence[TextExample], shape: StaticShape | None, *, padded: bool = False
    ) -> Batch:
        """Pack pairs on the CPU; see `TextCorpus.collate`.

        Other strategies than packed are refused.
        """
        return self.pairs.collate(examples, shape or self.shape)


def _check(config: DataConfig) -> None:
    """Check that settings of audio have their defaults."""
    for name, default in (
        ("speed_perturbation", (1.0,)),
        ("audio_augmentation", AudioAugmentationConfig()),
        ("filters", FilterConfig()),
        ("text", "required"),
    ):
        if getattr(config, name) != default:
            raise ValueError(
                f"`data.{name}` must be left out where `data.text_share` is 1, because text pairs "
                f"have no audio, but is {getattr(config, name)}."
            )
