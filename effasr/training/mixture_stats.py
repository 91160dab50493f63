"""Counts how much of every source a run has trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from effasr.data.index.corpus import Corpus
from effasr.data.loader import StepBatch
from effasr.data.mixture_summary import Blend, Mixture, drawn
from effasr.distributed.process_group import DistributedContext


class MixtureStats:
    """Counts utterances and samples or tokens of each source since the start of the run."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        # Rows: utterances, and samples or tokens. Of all ranks until the last `merge`, and of this
        # one since.
        self._merged = [np.zeros((2, len(mixture.names)), np.int64) for mixture in self._mixtures()]
        self._own = [np.zeros_like(counts) for counts in self._merged]

    def add(self, step: StepBatch) -> None:
        """Count this rank's data of a step."""
        corpus = self._corpus
        if corpus.mixture is None:
            return
        found = [drawn(corpus.mixture, corpus.sources, corpus.samples, step.indices)]
        if (text := corpus.text) is not None:
            found.append(drawn(text.mixture, text.sources, text.lengths.frames, step.text_indices))
        for own, counts in zip(self._own, found, strict=True):
            own += np.stack(counts)

    def merge(self, context: DistributedContext) -> list[Blend]:
        """Sum the counts of all ranks, which call this.

        Returns:
            The blend of speech, and that of text if there is any; nothing without a mixture.
        """
        for merged, own in zip(self._merged, self._own, strict=True):
            merged += np.sum(context.all_gather(own), axis=0)
            own[:] = 0
        pairs = zip(self._mixtures(), self._merged, strict=True)
        return [Blend.of(mixture, *counts) for mixture, counts in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of all ranks at the last `merge`."""
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
