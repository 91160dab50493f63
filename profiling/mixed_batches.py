"""Plans an epoch of speech and text by batching strategy and by iteration, as JSON.

    python profiling/mixed_batches.py LISTS --text LISTS [--frame-budget N] [--ranks N]

The speech of lists of durations and tokens is taken once, and as many texts as are a quarter of the
micro-batches of ``packed``; a text is its own source. With sequential iteration all ranks have
speech in a step, or all have text; with joint iteration some ranks have text in each step. After
EMMeTT (https://arxiv.org/abs/2409.13523), whose batches are 2D buckets. Work and waiting are those
of canary_180m_flash with a text encoder, by FLOPs; core seconds are of forward and backward of some
micro-batches of the recipe `demo` with one, times their number.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from effasr import config as configuration
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, TextExample, collate, collate_text
from effasr.data.index.text_corpus import balanced_token_budget, text_shape
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.cost import CostModel
from effasr.data.sampling.options import StrategyOptions
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.report import PlanReport, measure
from effasr.data.sampling.strategies import planner
from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model, text_cost_model
from effasr.model.presets import PRESET_VOCABULARIES
from effasr.planning.listing import PROMPT_TOKENS
from effasr.planning.study import PlanRequest
from effasr.training.config import TrainConfig
from effasr.training.resolve import resolve_config

MODEL, SMALL = "canary_180m_flash", "demo"
ENCODER = "model.text_encoder={layers: 2, heads: 4, feed_forward: 256}"
STRATEGIES = "bucketed", "sync_bucketed_2d", "packed"
ENDS: dict[str, Any] = {"eos_id": 3, "pad_id": 2}
TEXT = 0.25  # of the micro-batches of packed
MEASURED = 4  # micro-batches of each kind and strategy


@dataclass(frozen=True)
class Kind:
    """Speech or texts, whose frames are the tokens of their source."""

    lengths: UtteranceLengths
    shape: StaticShape
    cost: CostModel
    batch: Callable[[np.ndarray, bool], Batch]

    def plan(self, strategy: str, ranks: int) -> tuple[EpochPlan, PlanReport]:
        options = None if strategy == "packed" else StrategyOptions(padded=True)
        settings: dict[str, Any] = {"world_size": ranks, "cost": self.cost, "options": options}
        planned = planner(strategy, self.lengths, shape=self.shape, micro_batches=ranks, **settings)
        plan, amounts = planned.plan(0), np.ones(len(self.lengths))
        return plan, measure(
            [plan], self.lengths, amounts, cost=self.cost, world_size=ranks, shape=planned.shape
        )

    def count(self, report: PlanReport) -> float:
        """Micro-batches of an epoch."""
        return len(self.lengths) / report.batch_utterances

    def core_seconds(self, model: ASRModel, strategy: str, plan: EpochPlan) -> float:
        """Seconds of processor time of a micro-batch: forward and backward."""
        batches = [x for step in range(plan.num_steps) for x in plan.step(step) if len(x)]
        seconds = []
        for indices in [batches[0], *batches[:: -(-len(batches) // MEASURED)]]:
            batch = self.batch(indices, strategy == "packed")
            began = time.process_time()
            model(batch).cross_entropy.backward()
            seconds.append(time.process_time() - began)
        return float(np.mean(seconds[1:]))  # the first makes tables


def kinds(options: argparse.Namespace, config: TrainConfig) -> tuple[Kind, Kind]:
    vocabulary, framing = PRESET_VOCABULARIES[MODEL], config.model.features.framing
    text_cost = text_cost_model(config.model, vocabulary)
    assert text_cost is not None
    costs = cost_model(config.model, vocabulary), text_cost
    request = PlanRequest.from_recipe(manifests=options.lists, frame_budget=options.frame_budget)
    spoken = request.read()[1]
    written = replace(request, manifests=options.text).read()[1].lengths.tokens
    pairs = UtteranceLengths(written - PROMPT_TOKENS + 1, written)
    budget = balanced_token_budget(spoken.lengths, pairs, options.frame_budget, costs)
    # As many texts as fill `TEXT` of the micro-batches, as `data.text_share` draws them.
    batches = spoken.lengths.frames.sum() / options.frame_budget * TEXT / (1 - TEXT)
    pairs = pairs.take(np.resize(np.arange(len(pairs)), round(batches * budget / written.mean())))
    sources = np.zeros(len(pairs), np.uint16)
    mixture = Mixture.of(MixConfig(sources={"text": "-"}), sources, pairs.frames, unit="tokens")
    shape = text_shape(pairs, sources, mixture, None, budget)
    prompt = [4] * PROMPT_TOKENS

    def speech(indices: np.ndarray, is_packed: bool) -> Batch:
        examples = [
            Example(
                id="",
                audio=np.full(framing.samples * (spoken.lengths.frames[n] - 1), 0.01, np.float32),
                prompt=prompt,
                text=[5] * (spoken.lengths.tokens[n] - PROMPT_TOKENS),
            )
            for n in indices
        ]
        if is_packed:
            return collate(examples, spoken.shape, **ENDS)
        return collate(examples, framing=framing, padded=True, **ENDS)

    def texts(indices: np.ndarray, is_packed: bool) -> Batch:
        read, longest = pairs.frames[indices], int(pairs.tokens[indices].max())
        rows, tokens = (read, pairs.tokens[indices])
        if not is_packed:
            rows, tokens = (np.full(len(indices), x) for x in (int(read.max()), longest))
        examples = [
            TextExample("", [5] * a, prompt, [5] * (b - PROMPT_TOKENS))
            for a, b in zip(rows.tolist(), tokens.tolist(), strict=True)
        ]
        sizes = int(rows.sum()), int(tokens.sum()), len(examples), int(rows.max()), longest
        exact = StaticShape(*sizes)
        return collate_text(examples, shape if is_packed else exact, **ENDS)

    first = Kind(spoken.lengths, spoken.shape, costs[0], speech)
    return first, Kind(pairs, shape, costs[1], texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lists", nargs="+", type=Path)
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--frame-budget", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    config, small = (
        resolve_config(configuration.load(TrainConfig, name, [ENCODER]), None)
        for name in (MODEL, SMALL)
    )
    model = ASRModel(small.model, PRESET_VOCABULARIES[MODEL]).train()
    both, ranks, rows = kinds(options, config), options.ranks, {}
    for strategy in STRATEGIES:
        planned = [kind.plan(strategy, ranks) for kind in both]
        counts = [kind.count(report) for kind, (_, report) in zip(both, planned, strict=True)]
        work = [count * x.step_flops / ranks for count, (_, x) in zip(counts, planned, strict=True)]
        parts = zip(both, planned, counts, strict=True)
        core_s = sum(x.core_seconds(model, strategy, plan) * n for x, (plan, _), n in parts)
        padding = sum(f * x.padding_flops for f, (_, x) in zip(work, planned, strict=True))
        texts = min(max(1, round(ranks * counts[1] / sum(counts))), ranks - 1)
        divided = [
            k.plan(strategy, n)[1] for k, n in zip(both, (ranks - texts, texts), strict=True)
        ]
        slowest = [
            x.step_flops * (1 + x.rank_imbalance_mean) / n
            for x, n in zip(divided, (ranks - texts, texts), strict=True)
        ]
        alone = [x.step_flops * (1 + x.rank_imbalance_mean) / ranks for _, x in planned]
        steps = [math.ceil(count / ranks) for count in counts]
        joint = math.ceil(max(counts[0] / (ranks - texts), counts[1] / texts))
        for iteration, number, flops in (
            ("sequential", sum(steps), sum(n * x for n, x in zip(steps, alone, strict=True))),
            ("joint", joint, joint * max(slowest)),
        ):
            rows[f"{strategy}, {iteration}"] = {
                "steps": number,
                "text_ranks": texts if iteration == "joint" else "",
                "padding_flops": padding / sum(work),
                "waiting": 1 - sum(work) / ranks / flops,
                "rank_flops": flops,
                "core_s": core_s,
            }
    best = rows["packed, joint"]["rank_flops"]
    sys.stdout.write(
        json.dumps({k: x | {"relative_time": x["rank_flops"] / best} for k, x in rows.items()})
    )


if __name__ == "__main__":
    main()
