"""Compares batching strategies on the same utterances, for `effasr plan`."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from effasr import config
from effasr.checks import check
from effasr.data.config import DataConfig
from effasr.data.filters.rules import Limits
from effasr.data.index.selection import Selection
from effasr.data.manifest.pairs import is_text_only
from effasr.data.mixture_summary import MixtureSummary
from effasr.data.sampling.cost import CostModel
from effasr.data.sampling.options import StrategyOptions
from effasr.data.sampling.packing import EpochEnd
from effasr.data.sampling.report import PlanReport, measure
from effasr.data.sampling.strategies import planner
from effasr.data.tokenizer import Tokenizer, load_tokenizer
from effasr.model.cost import cost_model
from effasr.model.presets import PRESET_VOCABULARIES
from effasr.planning.listing import PROMPT_TOKENS, Listing, read_listing, select
from effasr.training.config import TrainConfig
from effasr.training.resolve import find_tokenizer, resolve_config

LADDER = ("random", "bucketed", "sync_bucketed", "sync_bucketed_2d", "packed")
"""All strategies, in the order of decreasing padding."""

_BY_SIZE = ("random", "bucketed", "sync_bucketed")
"""Strategies that accept a number of utterances instead of a duration."""

_MODEL = "canary_180m_flash"  # model assumed without a recipe


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Utterances, limits and cost model of a plan."""

    manifests: Sequence[Path]  # and lists of durations
    model: str  # name for the output
    cost: CostModel
    tokenizer: Tokenizer | None  # None to estimate the tokens of texts
    data: DataConfig
    limits: Limits
    seed: int
    sources: Sequence[int] | None = None  # of each manifest, with ``data.mix``
    transducer: bool = False

    @classmethod
    def from_recipe(
        cls,
        recipe: str | None = None,
        *,
        manifests: Sequence[Path] = (),
        tokenizer: Path | None = None,
        frame_budget: int | None = None,
        token_budget: int | None = None,
        max_duration: float | None = None,
    ) -> "PlanRequest":
        """Read a recipe; these arguments override its fields, and its manifests of speech."""
        settings = config.load(TrainConfig, recipe or _MODEL)
        model = resolve_config(settings, None).model
        data = settings.data if recipe else DataConfig()
        # Text-only micro-batches are not planned: epochs are of speech.
        listed = [] if manifests else [(Path(path), source) for path, source in data.manifests]
        listed = [(path, source) for path, source in listed if not _is_text_only(path)]
        check(manifests or listed, "MANIFEST", "name a manifest or a list", "not given")
        # The shares apply only to the recipe's sources.
        is_mixed = not manifests and data.mix is not None
        # A recipe may be used for its model before its tokenizer exists.
        has_tokenizer = recipe is not None and (
            not manifests
            or settings.init_from is not None
            or (data.tokenizer and Path(data.tokenizer).is_dir())
        )
        reader = None
        if tokenizer is not None:
            reader = load_tokenizer(tokenizer)
        elif has_tokenizer:
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
            manifests=manifests or [path for path, _ in listed],
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
            sources=[source for _, source in listed] if is_mixed else None,
            transducer=model.transducer is not None,
        )

    def read(
        self,
        prompt_tokens: int = PROMPT_TOKENS,
        progress: Callable[[int], None] = lambda count: None,
    ) -> tuple[Listing, Selection]:
        """Read lengths, drop unusable utterances; without a tokenizer, assume ``prompt_tokens``."""
        listing = read_listing(
            self.manifests,
            limits=self.limits,
            tokenizer=self.tokenizer,
            prompt_tokens=prompt_tokens,
            language=self.data.assumed_language,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """Options of the plans."""

    strategy: StrategyOptions  # of all strategies but packed
    world_size: int = 8
    micro_batches: int  # of a global step, over all ranks
    seed: int = 0
    epochs: int = 1
    epoch_end: EpochEnd | None = None  # with packed


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """Figures of a strategy's plans."""

    strategy: str
    report: PlanReport
    seconds: float  # time to plan

    def to_json(self) -> dict[str, Any]:
        return {"strategy": self.strategy, **asdict(self.report), "seconds": round(self.seconds, 3)}


def compare(
    selection: Selection,
    strategies: Sequence[str],
    cost: CostModel,
    options: StudyOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[StrategyResult]:
    """Plan utterances by each strategy; all but ``packed`` pad to a micro-batch's longest."""
    results = []
    for done, strategy in enumerate(strategies):
        progress(done, len(strategies))
        started, is_packed = time.perf_counter(), strategy == "packed"
        epochs = planner(
            strategy,
            selection.lengths,
            shape=selection.shape,
            micro_batches=options.micro_batches,
            world_size=options.world_size,
            seed=options.seed,
            options=None if is_packed else _strategy_options(strategy, options.strategy),
            population=selection.populations(options.seed),
            cost=cost,
            epoch_end=options.epoch_end if is_packed else None,
        )
        plans = [epochs.plan(epoch) for epoch in range(options.epochs)]
        seconds = time.perf_counter() - started
        report = measure(
            plans,
            selection.lengths,
            selection.seconds,
            cost=cost,
            world_size=options.world_size,
            shape=epochs.shape,
            buckets=epochs.buckets,
        )
        results.append(StrategyResult(strategy, report, seconds))
    return results


def summarise_mixture(selection: Selection, options: StudyOptions) -> MixtureSummary | None:
    """Return requested and planned shares of the sources; None without shares."""
    draw = selection.populations(options.seed)
    if draw is None or selection.mixture is None:
        return None
    indices = np.concatenate([draw(epoch) for epoch in range(options.epochs)])
    counts = selection.mixture.count(selection.sources, selection.samples, indices)
    return selection.mixture.summary(counts)


def _strategy_options(strategy: str, options: StrategyOptions) -> StrategyOptions:
    by_size = strategy in _BY_SIZE and options.batch_size is not None
    table = options.table if strategy == "sync_bucketed_2d" else None
    return replace(
        options,
        batch_duration=None if by_size or table else options.batch_duration,
        batch_size=options.batch_size if by_size else None,
        table=table,
        padded=True,
    )
