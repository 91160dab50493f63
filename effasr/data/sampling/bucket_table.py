"""Table of 2D bucketing: buckets by duration and tokens, each with a batch size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from effasr.data.atomic_files import write_atomically
from effasr.data.batch import StaticShape
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr.data.sampling.plan import UtteranceLengths

_BINS, _SIZES = "bucket_duration_bins", "bucket_batch_size"
_BY_TOKENS = 2
"""Buckets that each range of durations is divided into; NeMo's recipes for Canary have two."""


@dataclass(frozen=True, slots=True)
class BucketTable:
    """What each bucket may hold, in ascending order.

    An utterance belongs to the first bucket that has room for it. Most often that is one of its
    own range of durations; one with more text than these allow finds room further on.

    Attributes:
        bins: The most encoder frames and decoder tokens (prompt and text) of an utterance.
        batch_sizes: Utterances of a batch.
    """

    bins: tuple[tuple[int, int], ...]
    batch_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bins or len(self.bins) != len(self.batch_sizes):
            raise ValueError(
                "`batch_sizes` must have one entry for each of `bins`, at least one, but they "
                f"have {len(self.batch_sizes)} and {len(self.bins)}."
            )
        for first, second in pairwise(self.bins):
            if first > second:
                raise ValueError(
                    f"`bins` must ascend, by frames and then by tokens, but {second} follows "
                    f"{first}."
                )
        for name, values in (
            ("bins", [value for pair in self.bins for value in pair]),
            ("batch_sizes", self.batch_sizes),
        ):
            if min(values) < 1:
                raise ValueError(f"`{name}` must be at least 1, but one is {min(values)}.")

    @classmethod
    def derive(cls, lengths: UtteranceLengths, shape: StaticShape, buckets: int) -> BucketTable:
        """The table of a corpus, whose full batches stay within both budgets.

        Ranges of durations have about the same total duration each, and the two buckets of a
        range about the same total of tokens. Utterances with far more tokens than others as long
        do not count in this: for a few of them every batch of a range would have to be small.

        Args:
            lengths: The corpus.
            shape: Of whose budgets a batch's padded frames and tokens exceed none.
            buckets: Ranges of durations; fewer where many utterances are equally long.
        """
        frames, tokens = np.maximum(lengths.frames, 1), np.maximum(lengths.tokens, 1)
        # Here, so that a configuration needs none of the packages that read data.
        from effasr.data.filters.rules import rate_outliers

        usual = ~rate_outliers(tokens / frames, frames.astype(np.float64))
        edges = _edges(frames, buckets)
        ranges = np.searchsorted(edges, frames, side="left")
        bins = [
            (int(edge), int(limit))
            for number, edge in enumerate(edges)
            if (inside := usual & (ranges == number)).any()
            for limit in _edges(tokens[inside], _BY_TOKENS)
        ]
        largest = int(frames.max()), int(tokens.max())
        if (_first_fitting(bins, lengths) == len(bins)).any():
            bins.append(largest)
        sizes = (
            max(1, min(shape.frame_budget // frame_limit, shape.token_budget // token_limit))
            for frame_limit, token_limit in bins
        )
        return cls(tuple(bins), tuple(sizes))

    @classmethod
    def load(cls, path: str | Path, framing: Framing = FASTCONFORMER) -> BucketTable:
        """Read a table in the form of `save`, in encoder frames of the corpus.

        Raises:
            ValueError: The file is missing or malformed.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a readable JSON file: {error}.") from error
        try:
            pairs, sizes = _parsed(content)
            bins = [(framing.frames(round(s * SAMPLE_RATE)), tokens) for s, tokens in pairs]
            if len(bins) == len(sizes):
                # Durations that differ by less than a frame may be out of order in frames.
                sizes = [size for _, size in sorted(zip(bins, sizes, strict=True))]
                bins.sort()
            return cls(tuple(bins), tuple(sizes))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path, framing: Framing = FASTCONFORMER) -> None:
        """Write the table as JSON, in the terms of NeMo's OOMptimizer.

        ``bucket_duration_bins`` are pairs of seconds and tokens, ``bucket_batch_size`` numbers of
        utterances.
        """
        seconds = [round(frames * framing.seconds, 2) for frames, _ in self.bins]
        content = {
            _BINS: [[s, tokens] for s, (_, tokens) in zip(seconds, self.bins, strict=True)],
            _SIZES: list(self.batch_sizes),
        }
        write_atomically(Path(path), (json.dumps(content) + "\n").encode())

    def assign(self, lengths: UtteranceLengths) -> np.ndarray:
        """The bucket of each utterance: int32 (n,).

        Raises:
            ValueError: An utterance fits in no bucket.
        """
        found = _first_fitting(self.bins, lengths)
        homeless = np.flatnonzero(found == len(self.bins))
        if homeless.size:
            first = homeless[0]
            raise ValueError(
                f"every utterance must fit in a bucket, but {homeless.size} of {len(lengths)} do "
                f"not: number {first} has {lengths.frames[first]} frames and "
                f"{lengths.tokens[first]} tokens, the last bucket {self.bins[-1][0]} and "
                f"{self.bins[-1][1]}: make a table for this corpus, or drop them with "
                "data.max_duration and data.filters.max_tokens_per_second."
            )
        return found


def _first_fitting(bins: Sequence[tuple[int, int]], lengths: UtteranceLengths) -> np.ndarray:
    """The first bucket with room for each utterance; as many as there are where none has."""
    found = np.full(len(lengths), len(bins), dtype=np.int32)
    for number, (frame_limit, token_limit) in reversed(list(enumerate(bins))):
        found[(lengths.frames <= frame_limit) & (lengths.tokens <= token_limit)] = number
    return found


def _edges(values: np.ndarray, count: int) -> np.ndarray:
    """The ascending upper limits of ``count`` groups of about the same sum, or of fewer."""
    ordered = np.sort(values)
    totals = np.cumsum(ordered, dtype=np.int64)
    shares = totals[-1] * np.arange(1, count + 1) // count
    return np.unique(ordered[np.searchsorted(totals, shares, side="left")])


def _parsed(content: Any) -> tuple[list[tuple[float, int]], list[int]]:
    if not isinstance(content, Mapping) or not {_BINS, _SIZES} <= content.keys():
        raise ValueError(f"a bucket table must be an object with `{_BINS}` and `{_SIZES}`.")
    bins, sizes = content[_BINS], content[_SIZES]
    if not isinstance(bins, list) or not all(_is_pair(pair) for pair in bins):
        raise ValueError(f"`{_BINS}` must be a list of pairs [seconds, tokens].")
    if not isinstance(sizes, list) or not all(_is_int(size) for size in sizes):
        raise ValueError(f"`{_SIZES}` must be a list of whole numbers.")
    return [(float(seconds), tokens) for seconds, tokens in bins], sizes


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and (isinstance(value[0], float) or _is_int(value[0]))
        and _is_int(value[1])
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
