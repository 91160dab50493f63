"""Selects the utterances of a listing that can be trained on, and their static shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.rules import (
    DURATION_RULES,
    EMPTY_TEXT,
    EMPTY_TRANSLATION,
    FRAME_RULES,
    TOKEN_RULES,
    Dropped,
    Lengths,
    Limits,
    Reason,
    Rule,
    apply_rules,
)
from effasr.data.index.base_corpus import nothing_left
from effasr.data.index.selection import Selection, Selector, UtteranceColumns
from effasr.planning.listing import Listing


def select(
    listing: Listing,
    limits: Limits,
    config: DataConfig,
    *,
    transducer: bool = False,
    sources: Sequence[int] | None = None,
) -> Selection:
    """Drop what `effasr.data.index.corpus.Corpus.load` drops, as far as lengths show it.

    ``limits`` are those of the model and of ``config``, ``sources`` the source of each list.
    """
    # Reading has looked at characters, and `Selector` looks at the token budget.
    frame_budget = config.known_frame_budget
    limits = replace(
        limits, frame_budget=frame_budget, token_budget=None, max_characters_per_second=None
    )
    rows = _LengthFilter(listing, limits)
    rows.apply(DURATION_RULES)
    is_empty = listing.texts < 1
    if limits.text == "required":
        rows.drop(np.flatnonzero(is_empty), Reason.EMPTY_TEXT, lambda index: EMPTY_TEXT)
    elif limits.text == "optional":
        lacking = np.flatnonzero(is_empty & ~listing.monotonic)
        rows.drop(lacking, Reason.EMPTY_TEXT, lambda index: EMPTY_TRANSLATION)
    # Not more than the longest: what is longer has been dropped, and might have too many samples.
    samples = np.floor(np.minimum(listing.seconds, limits.max_duration) * SAMPLE_RATE + 0.5)
    frames = limits.framing.frames(samples.astype(np.int64))
    rows.lengths = replace(rows.lengths, frames=frames)
    rows.apply((*FRAME_RULES, *TOKEN_RULES))
    kept = rows.kept
    source_of_list = np.array([0] * len(listing.paths) if sources is None else sources, np.int64)
    columns = UtteranceColumns(
        listing.seconds[kept],
        frames[kept].astype(np.int32),
        (listing.texts + listing.prompts)[kept].astype(np.int32),
        listing.prompts[kept].astype(np.int32),
        source_of_list[listing.positions[kept, 0]],
        lambda: listing.languages[kept],
        lambda index: (listing.name(kept[index]), ""),
    )
    selector = Selector(columns, config, limits.framing, [(0, drop) for drop in rows.dropped])
    if not selector.is_kept.any():
        raise nothing_left(listing.paths, "no utterance can be planned", selector.dropped)
    selection = selector.select(transducer=transducer)
    if selection.mixture is not None:
        selection.mixture.check(source_of_list)
    return selection


class _LengthFilter:
    """Applies rules to the columns of a listing."""

    def __init__(self, listing: Listing, limits: Limits) -> None:
        self._listing, self._limits = listing, limits
        # Without tokens themselves, equal neighbours, which need a blank between, are not known.
        self.lengths = Lengths(
            listing.seconds,
            text=listing.texts,
            prompt=listing.prompts,
            ctc_frames=listing.texts,
            monotonic=listing.monotonic,
        )
        self.kept = np.arange(len(listing))
        self.dropped = list(listing.dropped)

    def apply(self, rules: Sequence[Rule]) -> None:
        for rule in rules:
            # Only of what is kept: rates of utterances that are too short might overflow.
            for _, is_broken in apply_rules([rule], self.lengths[self.kept], self._limits):
                explain = partial(self._explain, rule)
                self.drop(self.kept[is_broken], rule.reason, explain)

    def drop(self, rows: np.ndarray, reason: Reason, details: Callable[[int], str]) -> None:
        """Drop these utterances, as far as they are kept."""
        for index in np.intersect1d(self.kept, rows).tolist():
            name, seconds = self._listing.name(index), float(self._listing.seconds[index])
            self.dropped.append(Dropped(name, reason, details(index), "", seconds))
        self.kept = np.setdiff1d(self.kept, rows)

    def _explain(self, rule: Rule, index: int) -> str:
        return rule.explain(self.lengths[index], self._limits)
