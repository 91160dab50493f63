"""Text pairs as the only data of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from effasr.data.index.base_corpus import BaseCorpus
from effasr.data.index.text_corpus import TextCorpus
from effasr.data.mixture_summary import Mixture
from effasr.data.prompt import Prompt
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.tokenizer import Tokenizer

_NO_AUDIO = AudioSegment("", 0.0, 0.0, (0,))


@dataclass(frozen=True, slots=True, eq=False)
class PairCorpus(BaseCorpus):
    """Text pairs that are all that a run trains on; made by `PairCorpus.load`.

    It serves the loader and the trainer as `effasr.data.index.corpus.Corpus` does: an epoch has
    each pair once, or what the shares of a mixture draw.

    Attributes:
        pairs: The pairs.
        lengths: Tokens of the text encoder, as frames, and of the decoder, of each pair.
        shape: The static shape of every batch.
        dropped: Pairs of the manifests that were left out, with the reasons.
        sources: uint16 (n,), the source of each pair.
        amounts: int32 (n,), tokens of the text encoder, by which shares are measured.
        mixture: Requested share of each source; None without shares.
        fingerprint: Digest of lengths, texts, sources and order, which a resumed run compares.
        prompt: The most frequent prompt.
        seconds: 0, as there is no audio.
        text: None; no pairs go beside these.
    """

    pairs: TextCorpus
    lengths: UtteranceLengths
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    sources: np.ndarray
    amounts: np.ndarray
    mixture: Mixture | None
    fingerprint: str
    prompt: Prompt
    seconds: float = field(default=0.0, init=False)
    text: TextCorpus | None = field(default=None, init=False)

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
            ValueError: A manifest is malformed, no pair is left, or a setting is of audio or of
                hours.
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
        amounts, mixture = pairs.lengths.frames, None
        if config.mix is not None:
            mixture = Mixture.of(
                config.mix, pairs.sources, amounts, unit="tokens", draws_tokens=True
            )
        return cls(
            pairs,
            lengths=pairs.lengths,
            shape=pairs.shape,
            dropped=pairs.dropped,
            sources=pairs.sources,
            amounts=amounts,
            mixture=mixture,
            fingerprint=pairs.fingerprint,
            prompt=pairs.prompt,
        )

    def with_experts(self, number: Callable[[Prompt, str | None], int]) -> PairCorpus:
        """Return the same pairs, with the expert of each; see `TextCorpus.with_experts`."""
        return replace(self, pairs=self.pairs.with_experts(number))

    @property
    def samples(self) -> np.ndarray:
        """Samples of each pair, int64 (n,): none."""
        return np.zeros(len(self), dtype=np.int64)

    @property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each text to write, with its prompt, int32 (n,)."""
        return self.lengths.tokens

    def token_ids(self, vocab_size: int) -> np.ndarray:
        """Return the distinct token ids, sorted."""
        return self.pairs.token_ids()

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
