"""Batches for trials, made from the lengths of a corpus."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate, with_experts
from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
from effasr.data.sampling.packing import plan_epoch, suggest_node_budget, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.model.asr import ModelConfig

Lengths = list[tuple[int, int]]
"""Encoder frames and decoder tokens of the utterances of a micro-batch."""

Kind = Literal["longest", "shortest"]

_STEPS = 12
"""Planned steps from which the batches of a trial and the padding are taken."""

_LARGEST_SAMPLE = 20_000

_LARGEST_POPULATION = 200_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches of a trial.

    Attributes:
        shape: Shape of every batch.
        timed: Usual batches, whose steps are timed.
        extreme: The batch that takes the most memory.
    """

    shape: StaticShape
    timed: list[Lengths]
    extreme: Lengths


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """The lengths of a corpus.

    Attributes:
        lengths: Lengths of all utterances that can be planned, or of a sample.
        total_frames: Frames of all of them.
        token_budget: Configured token budget; None to derive it from the frame budget.
        max_sequences: Configured number of utterances; None to derive it likewise.
        framing: Framing of the model's features.
        transducer: Whether the model has a transducer, whose lattices have a budget.
    """

    lengths: UtteranceLengths
    total_frames: int
    token_budget: int | None = None
    max_sequences: int | None = None
    framing: Framing = FASTCONFORMER
    transducer: bool = False

    @classmethod
    def of(
        cls,
        lengths: UtteranceLengths,
        token_budget: int | None = None,
        max_sequences: int | None = None,
        framing: Framing = FASTCONFORMER,
        *,
        transducer: bool = False,
    ) -> Population:
        """Return the population of a corpus; of a very large one a sample with its extremes."""
        total = int(lengths.frames.sum(dtype=np.int64))
        if len(lengths) > _LARGEST_POPULATION:
            stride = -(-len(lengths) // _LARGEST_POPULATION)
            extremes = [int(lengths.frames.argmax()), int(lengths.tokens.argmax())]
            chosen = np.unique([*range(0, len(lengths), stride), *extremes])
            lengths = UtteranceLengths(lengths.frames[chosen], lengths.tokens[chosen])
        return cls(lengths, total, token_budget, max_sequences, framing, transducer)

    @property
    def longest(self) -> int:
        """Frames of the longest utterance, the smallest possible budget."""
        return max(1, int(self.lengths.frames.max()))

    def shape(self, frame_budget: int, *, tokens: float = 1.0) -> StaticShape:
        """Return the shape for a frame budget; ``tokens`` multiplies the token budget."""
        budget = self.token_budget or suggest_token_budget(self.lengths, frame_budget)
        budget = math.ceil(budget * tokens)
        kept = self._fitting(frame_budget, budget)
        nodes = suggest_node_budget(kept, frame_budget, kept) if self.transducer else None
        return StaticShape(
            frame_budget,
            budget,
            self.max_sequences or self.framing.sequences(frame_budget),
            max(1, int(kept.frames.max(initial=1))),
            max(1, int(kept.tokens.max(initial=1))),
            self.framing,
            nodes,
        )

    def workload(
        self, frame_budget: int, *, batches: int, kind: Kind = "longest", tokens: float = 1.0
    ) -> Workload:
        """Return the batches of a trial.

        Args:
            frame_budget: Encoder frames of a micro-batch.
            batches: Number of timed batches.
            kind: Utterances of the extreme batch: the longest together, which no plan can exceed;
                or the shortest, and then those of the timed ones as well.
            tokens: Multiplies the token budget.
        """
        shape = self.shape(frame_budget, tokens=tokens)
        kept = self._fitting(shape.frame_budget, shape.token_budget)
        extreme = together(kept, shape, kind)
        usual = self.planned(shape) if kind == "longest" else [extreme]
        return Workload(shape, [usual[n % len(usual)] for n in range(batches)], extreme)

    def planned(self, shape: StaticShape) -> list[Lengths]:
        """Return micro-batches as the packed planner makes them from a sample of the corpus."""
        kept = self._fitting(shape.frame_budget, shape.token_budget)
        mean = max(float(kept.frames.mean()), 1.0)
        count = min(math.ceil(_STEPS * shape.frame_budget / mean), _LARGEST_SAMPLE)
        # With repetitions, so that a small corpus fills a large budget.
        chosen = np.random.default_rng(0).integers(len(kept), size=max(count, 1))
        sample = UtteranceLengths(kept.frames[chosen], kept.tokens[chosen])
        plan = plan_epoch(sample, shape=shape, micro_batches=1, seed=0, epoch=0)
        return [
            _pairs(sample, plan.indices[begin:end])
            for begin, end in pairwise(plan.offsets.tolist())
        ]

    def _fitting(self, frames: int, tokens: int) -> UtteranceLengths:
        """Return the utterances that training keeps with these budgets."""
        kept = (self.lengths.frames <= frames) & (self.lengths.tokens <= tokens)
        if kept.all():
            return self.lengths
        return UtteranceLengths(self.lengths.frames[kept], self.lengths.tokens[kept])


def together(lengths: UtteranceLengths, shape: StaticShape, kind: Kind) -> Lengths:
    """Return as many utterances of one end of the corpus as fit, repeated if too few."""
    sizes = lengths.frames.astype(np.int64) + lengths.tokens
    order = np.argsort(sizes, kind="stable")
    if kind == "longest":
        order = order[::-1]
    chosen: Lengths = []
    frames, tokens = shape.frame_budget, shape.token_budget
    nodes = shape.node_budget or math.inf
    place = misses = 0
    while len(chosen) < shape.max_sequences and misses < len(order):
        index = order[place % len(order)]
        place += 1
        f, u = int(lengths.frames[index]), int(lengths.tokens[index])
        if f > frames or u > tokens or f * u > nodes or f + u == 0:
            misses += 1
            continue
        # Repeats the same utterance, the longest: no plan holds anything longer.
        place, misses = (place - 1 if kind == "longest" else place), 0
        chosen.append((f, u))
        frames, tokens, nodes = frames - f, tokens - u, nodes - f * u
    return chosen


def cells(lengths: Lengths, model: ModelConfig) -> int:
    """Return the number of scores of all attentions and lattices."""
    encoder, decoder = model.encoder, model.decoder
    frames = np.array([f for f, _ in lengths], dtype=np.int64)
    tokens = np.array([u for _, u in lengths], dtype=np.int64)
    total = encoder.layers * encoder.heads * int((frames**2).sum())
    if decoder is not None:
        scores = int((tokens**2 + tokens * frames).sum())
        total += decoder.layers * decoder.heads * scores
    lattice = int((frames * tokens).sum())
    return total + lattice * (2 * model.ctc + (model.transducer is not None))


def batch_of(lengths: Lengths, shape: StaticShape, vocab_size: int, seed: int) -> Batch:
    """Return a batch of these lengths: noise, and tokens without immediate repetitions."""
    generator = np.random.default_rng(seed)
    examples = []
    for number, (frames, tokens) in enumerate(lengths):
        audio = generator.standard_normal(shape.framing.samples_of(frames), dtype=np.float32)
        audio *= 0.1
        if not tokens:
            examples.append(Example(f"trial-{number}", audio, [], None))
            continue
        # No token repeats its predecessor: CTC needs no blank between them and has a path.
        text = (np.arange(max(tokens - 1, 0)) + number) % vocab_size
        examples.append(Example(f"trial-{number}", audio, [0], text.tolist()))
    # An expert costs what any other does, so that all may have the first.
    return with_experts(collate(examples, shape, eos_id=0, pad_id=0))


def _pairs(lengths: UtteranceLengths, indices: np.ndarray) -> Lengths:
    frames, tokens = lengths.frames[indices].tolist(), lengths.tokens[indices].tolist()
    return list(zip(frames, tokens, strict=True))
