"""How much of a batch is padding: random batches, bucketed batches, and packed static shapes.

    python profiling/padding_study.py LENGTHS.tsv ... [--budgets 2000 8000 24000]

A list is a table with a header, separated by tabs, of ``duration_seconds`` and, if known,
``n_tokens_bpe5000``; without tokens, 3.6 a second are assumed. Padded batches are as large as the
packed ones: as many utterances as fill the budget on average. Prints one row for each list,
budget and way of batching: the share of frame rows, and of token rows, that is padding.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths

FRAMES_PER_SECOND = 12.5
TOKENS_PER_SECOND = 3.6
PROMPT = 5


def read_lengths(path: Path, longest: float) -> UtteranceLengths:
    """Encoder frames and decoder tokens of a list, up to ``longest`` seconds."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    seconds = np.array([float(row["duration_seconds"]) for row in rows])
    known = [row.get("n_tokens_bpe5000") or "" for row in rows]
    tokens = np.array(
        [int(k) if k else round(TOKENS_PER_SECOND * s) for k, s in zip(known, seconds, strict=True)]
    )
    kept = (seconds >= 0.3) & (seconds <= longest)
    frames = np.ceil(seconds[kept] * FRAMES_PER_SECOND).astype(np.int32)
    return UtteranceLengths(frames, (tokens[kept] + PROMPT).astype(np.int32))


def padded(lengths: UtteranceLengths, batches: list[np.ndarray]) -> tuple[float, float]:
    """The share of padding where each batch is as wide as its longest utterance."""

    def share(values: np.ndarray) -> float:
        rows = sum(len(batch) * int(values[batch].max()) for batch in batches)
        return 1 - int(values.sum()) / rows

    return share(lengths.frames), share(lengths.tokens)


def random_batches(lengths: UtteranceLengths, size: int, seed: int) -> list[np.ndarray]:
    """Utterances in any order, ``size`` to a batch."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    return np.array_split(order, max(1, len(order) // size))


def bucketed_batches(
    lengths: UtteranceLengths, size: int, seed: int, buckets: int = 20
) -> list[np.ndarray]:
    """Buckets of about the same total duration; batches of random utterances of one bucket."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    order = order[np.argsort(lengths.frames[order], kind="stable")]
    total = np.cumsum(lengths.frames[order], dtype=np.int64)
    edges = np.searchsorted(total, np.linspace(0, total[-1], buckets + 1)[1:-1])
    batches = []
    for bucket in np.split(order, edges):
        if len(bucket):
            mixed = np.random.default_rng(seed).permutation(bucket)
            # As many frames as the others: a bucket of short utterances has larger batches.
            fit = max(1, round(size * lengths.frames.mean() / lengths.frames[bucket].mean()))
            batches += np.array_split(mixed, max(1, len(mixed) // fit))
    return batches


def study(lengths: UtteranceLengths, budget: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """The padding of frames and of tokens, by way of batching."""
    size = max(1, round(budget / lengths.frames.mean()))
    shape = StaticShape(budget, suggest_token_budget(lengths, budget), -(-budget // 8))
    plan = plan_epoch(lengths, shape=shape, micro_batches=1, seed=seed, epoch=0)
    return {
        "random, padded": padded(lengths, random_batches(lengths, size, seed)),
        "20 buckets, padded": padded(lengths, bucketed_batches(lengths, size, seed)),
        "packed, static shape": (plan.padding_frames, plan.padding_tokens),
    }


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lists", nargs="+", type=Path)
    parser.add_argument("--budgets", nargs="+", type=int, default=[2_000, 8_000, 24_000])
    parser.add_argument("--longest", type=float, default=40.0, help="seconds")
    options = parser.parse_args()
    write = sys.stdout.write
    write("| lengths | frame budget | batches | padding of frames | of tokens |\n")
    write("|---|---|---|---|---|\n")
    for path in options.lists:
        lengths = read_lengths(path, options.longest)
        for budget in options.budgets:
            for way, (frames, tokens) in study(lengths, budget).items():
                write(f"| {path.stem} | {budget} | {way} | {frames:.2%} | {tokens:.2%} |\n")


if __name__ == "__main__":
    main()
