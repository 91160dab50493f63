"""Collects what `effasr plan` needs from a recipe and its options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from effasr import config
from effasr.data.config import DataConfig
from effasr.data.filters.rules import Limits
from effasr.data.manifest.pairs import is_text_only
from effasr.data.sampling.cost import CostModel
from effasr.data.tokenizer import Tokenizer, load_tokenizer
from effasr.model.cost import cost_model
from effasr.model.presets import PRESET_VOCABULARIES
from effasr.planning.listing import PROMPT_TOKENS, Listing, read_listing
from effasr.planning.selection import Selection, select
from effasr.training.config import TrainConfig
from effasr.training.resolve import find_tokenizer, resolve_config

_MODEL = "canary_180m_flash"
"""Model assumed without a recipe."""


@dataclass(frozen=True, slots=True)
class Request:
    """Utterances, limits and cost model of a plan.

    Attributes:
        manifests: Manifests and lists of durations.
        model: Name of the model for the output.
        cost: Cost model.
        tokenizer: Tokenizer of texts; None to estimate their tokens.
        data: Budgets, durations and filters.
        limits: Limits on utterances.
        seed: Seed of the plans.
        sources: Source of each manifest with ``data.mix``; otherwise None.
        transducer: Whether the model has a transducer.
    """

    manifests: Sequence[Path]
    model: str
    cost: CostModel
    tokenizer: Tokenizer | None
    data: DataConfig
    limits: Limits
    seed: int
    sources: Sequence[int] | None = None
    transducer: bool = False

    @classmethod
    def of(
        cls,
        recipe: str | None = None,
        *,
        manifests: Sequence[Path] = (),
        tokenizer: Path | None = None,
        frame_budget: int | None = None,
        token_budget: int | None = None,
        max_duration: float | None = None,
    ) -> Request:
        """Read a recipe; the other arguments override its fields.

        Args:
            recipe: Path or name; by default canary_180m_flash with the defaults of `DataConfig`.
            manifests: Manifests; by default the recipe's, except those of text alone.
            tokenizer: Folder of the tokenizer; by default the recipe's, if it exists.
            frame_budget: Encoder frames of a micro-batch.
            token_budget: Decoder tokens of a micro-batch.
            max_duration: Longest utterance in seconds.

        Raises:
            ValueError: The recipe is invalid, or there is no manifest.
        """
        settings = config.load(TrainConfig, recipe or _MODEL)
        model = resolve_config(settings, None).model
        data = settings.data if recipe else DataConfig()
        # Text-only micro-batches are not planned: epochs are of speech.
        if data.text_alone and not manifests:
            raise ValueError(
                "`--recipe` must have speech, because batches of text alone are not planned, but "
                "its data.text_share is 1: take another, or give `--manifest`."
            )
        own = [] if manifests else [(Path(path), source) for path, source in data.manifests]
        own = [(path, source) for path, source in own if not _is_text_only(path)]
        found = manifests or [path for path, _ in own]
        if not found:
            raise ValueError("`--manifest` must name a manifest or a list, but is not given.")
        # The shares apply only to the recipe's own sources.
        is_mixed = not manifests and data.mix is not None
        # A recipe may be used for its model before its tokenizer exists.
        is_own = recipe is not None and (
            not manifests or settings.init_from is not None or _is_folder(data.tokenizer)
        )
        reader = None
        if tokenizer is not None:
            reader = load_tokenizer(tokenizer)
        elif is_own:
            reader = find_tokenizer(settings, None)
        data = replace(
            data,
            frame_budget=frame_budget or data.frame_budget,
            token_budget=token_budget or data.token_budget,
            max_duration=max_duration or data.max_duration,
            mix=data.mix if is_mixed else None,
            min_duration=min(data.min_duration, max_duration or math.inf),
        )
        decoder = model.decoder
        return cls(
            manifests=found,
            model=settings.name,
            cost=cost_model(
                model, PRESET_VOCABULARIES[_MODEL] if reader is None else reader.vocab_size
            ),
            tokenizer=reader,
            data=data,
            limits=data.limits(
                ctc=model.ctc,
                max_frames=model.encoder.max_frames,
                max_positions=None if decoder is None else decoder.max_positions,
                framing=model.features.framing,
            ),
            seed=settings.seed,
            sources=[source for _, source in own] if is_mixed else None,
            transducer=model.transducer is not None,
        )

    def read(
        self,
        prompt_tokens: int = PROMPT_TOKENS,
        progress: Callable[[int], None] = lambda count: None,
    ) -> tuple[Listing, Selection]:
        """Read the lengths and drop utterances that cannot be trained on.

        Args:
            prompt_tokens: Tokens of a prompt if there is no tokenizer.
            progress: Called with the number of utterances read so far.

        Raises:
            ValueError: A line is malformed, or no utterance is left.
        """
        listing = read_listing(
            self.manifests,
            limits=self.limits,
            tokenizer=self.tokenizer,
            prompt_tokens=prompt_tokens,
            language=self.data.language,
            progress=progress,
        )
        selection = select(
            listing, self.limits, self.data, transducer=self.transducer, sources=self.sources
        )
        return listing, selection


def _is_text_only(path: Path) -> bool:
    try:
        return is_text_only(path)
    except ValueError:
        # Not a manifest: a list of durations, or a file that its reader will reject.
        return False


def _is_folder(path: str) -> bool:
    return bool(path) and Path(path).is_dir()
