"""Metrics of training on audio without text, beside those of every run."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from effasr.model.best_rq import BestRQ


class Gauge(Protocol):
    """Counts on the device of a rank, from one line of metrics.jsonl to the next."""

    def line(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl, and count anew; waits for the device."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        ...


class CodeUse:
    """Use of the codes of BEST-RQ, in the frames that a rank has read since the last line.

    Training learns little where a few codes stand for most frames. The entropy of the codes is in
    nats; its exponential, the perplexity, is how many codes as frequent as each other would have
    it.
    """

    def __init__(self, best_rq: BestRQ) -> None:
        self._best_rq = best_rq

    def line(self) -> dict[str, Any]:
        """Return entropy and perplexity of each codebook; see `Gauge`."""
        entropies = entropy(self._best_rq.code_counts).tolist()
        self._best_rq.code_counts.zero_()
        fields: dict[str, Any] = {}
        for number, value in enumerate(entropies):
            fields[f"code_entropy_{number}"] = value
            fields[f"code_perplexity_{number}"] = float(torch.tensor(value).double().exp())
        return fields

    def state_dict(self) -> dict[str, Any]:
        """See `Gauge`."""
        return {"counts": self._best_rq.code_counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Gauge`."""
        self._best_rq.code_counts.copy_(state["counts"])


def entropy(counts: Tensor) -> Tensor:
    """Return the entropy of each row of counts in nats: int64 (K, codes) to float64 (K,)."""
    total = counts.sum(-1, keepdim=True).clamp(min=1)
    shares = counts.double() / total
    return torch.special.entr(shares).sum(-1)
