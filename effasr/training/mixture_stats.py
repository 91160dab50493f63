"""How much of every source a run has trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from effasr.data.index.corpus import Corpus
from effasr.data.micro_batch_loader import StepBatch
from effasr.data.mixture_summary import Mixture, MixtureSummary
from effasr.distributed.process_group import World


class DrawnBlend:
    """Counts what is drawn of each source, from the beginning of the run.

    Args:
        corpus: What is drawn from; without a mixture there is nothing to count.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        # Rows: utterances, and samples or tokens. Of all ranks until the last `merge`, and of this
        # one since.
        self._merged = [np.zeros((2, len(mixture.names)), np.int64) for mixture in self._mixtures()]
        self._own = [np.zeros_like(counts) for counts in self._merged]

    def add(self, step: StepBatch) -> None:
        """Count what this rank trains on in a step."""
        corpus = self._corpus
        if corpus.mixture is None:
            return
        self._own[0] += corpus.mixture.count(corpus.sources, corpus.samples, step.indices)
        if (text := corpus.text) is not None:
            read = text.lengths.frames
            self._own[1] += text.mixture.count(text.sources, read, step.text_indices)

    def merge(self, world: World) -> list[MixtureSummary]:
        """Add up what the ranks have counted, all together.

        Returns:
            That of speech, and that of text if there is any; nothing without a mixture.
        """
        for merged, own in zip(self._merged, self._own, strict=True):
            merged += np.sum(world.gather(own), axis=0)
            own[:] = 0
        pairs = zip(self._mixtures(), self._merged, strict=True)
        return [mixture.summary(counts) for mixture, counts in pairs]

    def state_dict(self) -> dict[str, Any]:
        """The counts of all ranks at the last `merge`."""
        return {"drawn": [counts.tolist() for counts in self._merged]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for merged, counts in zip(self._merged, state["drawn"], strict=True):
            merged[:] = counts

    def _mixtures(self) -> list[Mixture]:
        corpus = self._corpus
        if corpus.mixture is None:
            return []
        return [corpus.mixture, *([] if corpus.text is None else [corpus.text.mixture])]
