"""Utterances of real durations: noise, with random text tokens of Whisper's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from bench.training.corpus import TOKENS_PER_SECOND, Workload
from bench.workload import read_durations

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.frame_geometry import Framing
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.shuffle import shuffled
from effasr.model.config import ModelConfig
from effasr.model.cost import cost_model
from whisper_bench.checkpoint import EOS, PROMPT, TEXT_TOKENS
from whisper_bench.settings import Settings


@dataclass(frozen=True)
class Corpus:
    """Durations drawn from a list, and what is said in them.

    Attributes:
        seconds: Seconds of each utterance, at most the model's window.
        batch: Utterances of a batch of padded features.
    """

    seconds: tuple[float, ...]
    batch: int

    @classmethod
    def of(cls, settings: Settings) -> Corpus:
        """Return the same utterances in every process."""
        listed = np.minimum(read_durations(Path(settings.lengths)), settings.size.window_s)
        drawn = np.random.default_rng(0).choice(listed, settings.utterances)
        return cls(tuple(drawn.tolist()), settings.batch)

    def lengths(self, framing: Framing) -> UtteranceLengths:
        """Return frames, by this framing, and tokens of each utterance."""
        frames = [framing.frames(round(16_000 * x)) for x in self.seconds]
        tokens = [len(PROMPT) + max(1, round(TOKENS_PER_SECOND * x)) for x in self.seconds]
        return UtteranceLengths(np.array(frames, np.int32), np.array(tokens, np.int32))

    def examples(self, indices: Sequence[int]) -> list[Example]:
        """Return a part of the utterances."""
        workload = Workload(list(self.seconds), self.lengths(Framing()), TEXT_TOKENS)
        return [replace(workload.example(index), prompt=list(PROMPT)) for index in indices]

    def step_means(self, plan: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return utterances and audio seconds of a step, on average over an epoch.

        All steps of a system compute as much, whatever part of it is speech. So the time of some
        steps is that of any, while the audio in them is a small sample.
        """
        utterances = sum(map(len, plan)) / len(plan)
        audio = sum(self.seconds[index] for batch in plan for index in batch) / len(plan)
        return {"utterances": utterances, "audio_s": audio}

    def random_batches(self) -> list[list[int]]:
        """Return an epoch in random order, in batches of equal size; the rest is left out."""
        order = shuffled(len(self.seconds), 0, 0).tolist()
        ends = range(self.batch, len(order) + 1, self.batch)
        return [order[end - self.batch : end] for end in ends]

    def sorted_batches(self) -> list[list[int]]:
        """Return all utterances, the longest first, in batches; the last may have fewer."""
        order = sorted(range(len(self.seconds)), key=lambda index: -self.seconds[index])
        return [order[begin : begin + self.batch] for begin in range(0, len(order), self.batch)]

    def limit(self, batch: Sequence[int]) -> int:
        """Return the number of tokens to decode per utterance of a batch, that of its longest."""
        return max(1, round(TOKENS_PER_SECOND * max(self.seconds[index] for index in batch)))


@dataclass(frozen=True)
class Packed:
    """The static shape of effasr's batches, and which utterances each has."""

    corpus: Corpus
    shape: StaticShape
    plan: list[list[int]]

    def collated(self, number: int) -> Batch:
        """Return the batch of a step."""
        return self.of(self.corpus.examples(self.plan[number % len(self.plan)]))

    def of(self, examples: Sequence[Example], *, static: bool = True) -> Batch:
        """Return a batch of these, of the static shape or of their own."""
        shape, framing = self.shape if static else None, self.shape.framing
        return collate(examples, shape, eos_id=EOS, pad_id=EOS, framing=framing)


def packed(system: str, corpus: Corpus, config: ModelConfig, classes: int) -> Packed:
    """Return the batches of one of effasr's systems.

    Args:
        system: ``effasr_silence`` has the utterances of transformers in each step. ``effasr`` has
            as much audio in a step as transformers has on average; ``effasr_filled`` has as many
            encoder frames in a step as transformers computes. Both are planned by the packed
            planner.
        corpus: The utterances.
        config: Whose features have the system's ``minimum_s``.
        classes: Classes of the model.
    """
    framing = config.features.framing
    lengths = corpus.lengths(framing)
    most = config.encoder.max_frames
    assert most is not None  # of Whisper's encoder
    plan = None
    budget = corpus.batch * most
    if system == "effasr_silence":
        plan = corpus.random_batches()
        tokens = max(int(lengths.tokens[batch].sum()) for batch in plan)
    else:
        if system == "effasr":
            usual = round(corpus.batch * float(lengths.frames.mean()))
            budget = max(usual, int(lengths.frames.max()))
        tokens = suggest_token_budget(lengths, budget)
    shape = StaticShape(
        budget,
        tokens,
        framing.sequences(budget),
        longest_frames=int(lengths.frames.max()),
        longest_tokens=int(lengths.tokens.max()),
        framing=framing,
    )
    if plan is None:
        cost = cost_model(config, classes)
        epoch = plan_epoch(lengths, shape=shape, micro_batches=1, seed=0, epoch=0, cost=cost)
        plan = [epoch.step(step)[0].tolist() for step in range(epoch.num_steps)]
    return Packed(corpus, shape, plan)
