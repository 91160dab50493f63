"""Time, memory, padding and imbalance of planning an epoch.

    python profiling/data/bench_planning.py [--utterances 1e7] [--frame-budgets 8000 24000]

Lengths are drawn at random: 0.3 to 40 s, log-normal with a median of 5.5 s, about 3.6 tokens a
second. Each plan is made in a process of its own, by one thread; memory is the most that this
process ever had, with Python, torch and the lengths.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.cost import CANARY_180M_FLASH
from effasr.data.sampling.packing import imbalance, plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths

FRAMES_PER_SECOND = 12.5
TOKENS_PER_SECOND = 3.6
PROMPT = 8


@dataclass(frozen=True, slots=True)
class Result:
    """Cost and quality of a plan.

    Attributes:
        seconds: Wall time of planning.
        cpu_seconds: Processor time of planning.
        peak_bytes: Most memory of the process.
        steps: Steps of the epoch.
        padding_frames: Share of frame rows.
        padding_tokens: Share of token rows.
        imbalance: Relative excess of the slowest rank's predicted work over the mean: mean, 99th
            percentile and maximum over steps.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    steps: int
    padding_frames: float
    padding_tokens: float
    imbalance: tuple[float, float, float]


def draw_lengths(count: int, seed: int = 0) -> UtteranceLengths:
    """Random lengths, log-normal as those of speech corpora."""
    random = np.random.default_rng(seed)
    seconds = np.clip(np.exp(random.normal(np.log(5.5), 0.75, count)), 0.3, 40)
    tokens = TOKENS_PER_SECOND * seconds * np.exp(random.normal(0, 0.25, count))
    return UtteranceLengths(
        np.ceil(seconds * FRAMES_PER_SECOND).astype(np.int32),
        (PROMPT + np.maximum(1, np.round(tokens))).astype(np.int32),
    )


def measure(count: int, frame_budget: int, world_size: int, epoch: int = 1) -> Result:
    """Plan an epoch in this process; not the first, for one utterance is carried into it."""
    lengths = draw_lengths(count)
    token_budget = suggest_token_budget(lengths, frame_budget)
    shape = StaticShape(frame_budget, token_budget, max(8, frame_budget // 8))
    begin, begin_cpu = time.perf_counter(), time.process_time()
    plan = plan_epoch(lengths, shape=shape, micro_batches=world_size, seed=0, epoch=epoch)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    # Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cost = CANARY_180M_FLASH.of(lengths.frames, lengths.tokens)[plan.indices]
    ends = np.append(0, np.cumsum(cost))
    excess = imbalance(np.diff(ends[plan.offsets]), world_size, world_size)
    return Result(
        seconds,
        cpu_seconds,
        peak,
        plan.num_steps,
        plan.padding_frames,
        plan.padding_tokens,
        (float(excess.mean()), float(np.quantile(excess, 0.99)), float(excess.max())),
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--utterances", nargs="+", type=float, default=[1e6])
    parser.add_argument("--frame-budgets", nargs="+", type=int, default=[8_000, 24_000])
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[8])
    options = parser.parse_args(arguments)
    write = sys.stdout.write
    write("| utterances | frame budget | ranks | steps | wall s | CPU s | peak GB | padding of ")
    write("frames | of tokens | imbalance mean | p99 | max |\n|---|" + "---|" * 11 + "\n")
    # A forked process would begin with this one's memory.
    context = multiprocessing.get_context("spawn")
    for count in map(int, options.utterances):
        for budget in options.frame_budgets:
            for world_size in options.world_sizes:
                with context.Pool(1) as pool:
                    result = pool.apply(measure, (count, budget, world_size))
                shares = (result.padding_frames, result.padding_tokens, *result.imbalance)
                write(f"| {count:,} | {budget:,} | {world_size} | {result.steps:,} ")
                write(f"| {result.seconds:.1f} | {result.cpu_seconds:.1f} ")
                write(f"| {result.peak_bytes / 1e9:.2f} | ")
                write(" | ".join(f"{share:.3%}" for share in shares) + " |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
