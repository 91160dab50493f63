"""The use of experts, for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from effasr.nn.experts.feed_forward import ExpertFeedForward


class ExpertUse:
    """Rows of each expert and the losses of routers, of a rank, since the last line.

    Shares are those of all networks of a stack: an expert without rows learns nothing, and one with
    all of them is a dense network.
    """

    def __init__(self, model: nn.Module) -> None:
        """Read the statistics of the networks with experts in a model."""
        self._networks: dict[str, list[ExpertFeedForward]] = {}
        for name, module in model.named_modules():
            if isinstance(module, ExpertFeedForward):
                self._networks.setdefault(name.split(".layers.")[0], []).append(module)

    def line(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl, and count anew; waits for the device.

        ``encoder_expert_shares`` has the share of rows of each expert, in the order of the
        configuration, or null before the first row; ``encoder_expert_balance`` is the mean balance
        loss of its routers, 1 at best. Likewise for the other stacks.
        """
        fields: dict[str, Any] = {}
        for stack, networks in self._networks.items():
            rows = [sum(x) for x in zip(*(net.rows.tolist() for net in networks), strict=True)]
            shares = [x / sum(rows) for x in rows] if sum(rows) else None
            fields[f"{stack}_expert_shares"] = shares
            if networks[0].router is not None:
                total, count = torch.stack([net.balance for net in networks]).sum(0).tolist()
                fields[f"{stack}_expert_balance"] = total / count if count else None
            for network in networks:
                network.reset_parameters()
        return fields

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics of each network."""
        return {"statistics": [value.clone() for value in self._buffers()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for own, value in zip(self._buffers(), state["statistics"], strict=True):
            own.copy_(value)

    def _buffers(self) -> Iterator[Tensor]:
        for networks in self._networks.values():
            for network in networks:
                yield from (network.rows, network.balance)
