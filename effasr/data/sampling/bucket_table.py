"""Table of 2D bucketing: buckets by duration and tokens, each with a batch size."""

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
from effasr.untrusted.documents import read_json

_BINS, _SIZES = "bucket_duration_bins", "bucket_batch_size"
_BY_TOKENS = 2
"""Token buckets of each duration range; NeMo's recipes for Canary have two."""


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Limits and batch sizes of buckets, in ascending order.

    An utterance belongs to the first bucket that it fits in: usually one of its own duration range;
    one with more text than these allow goes to a later range.
    """

    # Upper limits of encoder frames and decoder tokens (prompt and text) of each bucket
    bins: tuple[tuple[int, int], ...]
    batch_sizes: tuple[int, ...]  # Utterances of a batch of each bucket

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
    def derive(cls, lengths: UtteranceLengths, shape: StaticShape, buckets: int) -> "BucketTable":
        """Derive the table of a corpus so that full batches stay within both budgets.

        Duration ranges have about equal total durations, and the two buckets of a range about equal
        total tokens. Outliers with far more tokens than others of their duration are not counted:
        they would make every batch of their range small.
        """
        frames, tokens = np.maximum(lengths.frames, 1), np.maximum(lengths.tokens, 1)
        # Imported here so that a configuration needs none of the packages that read data.
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
    def load(cls, path: str | Path, framing: Framing = FASTCONFORMER) -> "BucketTable":
        """Read a table written by `save`, in encoder frames of the corpus."""
        try:
            content = read_json(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a readable JSON file: {error}.") from error
        try:
            if not isinstance(content, Mapping) or not {_BINS, _SIZES} <= content.keys():
                raise ValueError(f"a bucket table must be an object with `{_BINS}` and `{_SIZES}`.")
            pairs, sizes = content[_BINS], content[_SIZES]
            if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
                raise ValueError(f"`{_BINS}` must be a list of pairs [seconds, tokens].")
            if not isinstance(sizes, list) or not all(_is_int(size) for size in sizes):
                raise ValueError(f"`{_SIZES}` must be a list of whole numbers.")
            bins = [(framing.frames(round(float(s) * SAMPLE_RATE)), tokens) for s, tokens in pairs]
            if len(bins) == len(sizes):
                # Durations that differ by less than a frame may come out of order after rounding to
                # frames.
                sizes = [size for _, size in sorted(zip(bins, sizes, strict=True))]
                bins.sort()
            return cls(tuple(bins), tuple(sizes))
        except (ValueError, OverflowError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: str | Path, framing: Framing = FASTCONFORMER) -> None:
        """Write the table as JSON with the keys of NeMo's OOMptimizer.

        ``bucket_duration_bins`` are pairs of seconds and tokens; ``bucket_batch_size`` are numbers
        of utterances.
        """
        seconds = [round(frames * framing.seconds, 2) for frames, _ in self.bins]
        content = {
            _BINS: [[s, tokens] for s, (_, tokens) in zip(seconds, self.bins, strict=True)],
            _SIZES: list(self.batch_sizes),
        }
        write_atomically(Path(path), (json.dumps(content) + "\n").encode())

    def assign(self, lengths: UtteranceLengths) -> np.ndarray:
        """Return the bucket of each utterance, int32 (n,)."""
        result = _first_fitting(self.bins, lengths)
        homeless = np.flatnonzero(result == len(self.bins))
        if homeless.size:
            first = homeless[0]
            raise ValueError(
                f"every utterance must fit in a bucket, but {homeless.size} of {len(lengths)} do "
                f"not: number {first} has {lengths.frames[first]} frames and "
                f"{lengths.tokens[first]} tokens, the last bucket {self.bins[-1][0]} and "
                f"{self.bins[-1][1]}: make a table for this corpus, or drop them with "
                "data.max_duration and data.filters.max_tokens_per_second."
            )
        return result


def _first_fitting(bins: Sequence[tuple[int, int]], lengths: UtteranceLengths) -> np.ndarray:
    """Return the first bucket that each utterance fits in; ``len(bins)`` where none does."""
    result = np.full(len(lengths), len(bins), dtype=np.int32)
    for number, (frame_limit, token_limit) in reversed(list(enumerate(bins))):
        result[(lengths.frames <= frame_limit) & (lengths.tokens <= token_limit)] = number
    return result


def _edges(values: np.ndarray, count: int) -> np.ndarray:
    """Return ascending upper limits of at most ``count`` groups with about equal sums."""
    ordered = np.sort(values)
    totals = np.cumsum(ordered, dtype=np.int64)
    shares = totals[-1] * np.arange(1, count + 1) // count
    return np.unique(ordered[np.searchsorted(totals, shares, side="left")])


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and (isinstance(value[0], float) or _is_int(value[0]))
        and _is_int(value[1])
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
