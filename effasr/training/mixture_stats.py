"""Counts how much of every source a run has trained on."""

from __future__ import annotations

from typing import Any

import numpy as np

from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.index.corpus import Corpus
from effasr.data.index.pair_corpus import PairCorpus
from effasr.data.micro_batch_loader import StepBatch
from effasr.data.mixture_summary import Mixture, MixtureSummary
from effasr.distributed.process_group import DistributedContext


class MixtureStats:
    """Counts utterances and samples or tokens of each source since the start of the run."""

    def __init__(self, corpus: Corpus | ConversationCorpus | PairCorpus) -> None:
        self._corpus = corpus
        # Rows: utterances, and samples or tokens. `_merged` holds those of all ranks until the last
        # `merge`, `_own` those of this rank since.
        self._merged = [np.zeros((2, len(mixture.names)), np.int64) for mixture in self._mixtures()]
        self._own = [np.zeros_like(counts) for counts in self._merged]

    def add(self, step: StepBatch) -> None:
        """Count this rank's data of a step."""
        corpus = self._corpus
        if corpus.mixture is None:
            return
        self._own[0] += corpus.mixture.count(corpus.sources, corpus.amounts, step.indices)
        if (text := corpus.text) is not None:
            read = text.lengths.frames
            self._own[1] += text.mixture.count(text.sources, read, step.text_indices)

    def merge(self, context: DistributedContext) -> list[MixtureSummary]:
        """Sum the counts of all ranks, which call this.

        Returns:
            Summaries of speech and, if there is any, of text; nothing without a mixture.
        """
        for merged, own in zip(self._merged, self._own, strict=True):
            merged += np.sum(context.all_gather(own), axis=0)
            own[:] = 0
        pairs = zip(self._mixtures(), self._merged, strict=True)
        return [mixture.summary(counts) for mixture, counts in pairs]

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
