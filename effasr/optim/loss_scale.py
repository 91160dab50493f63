"""A factor of the loss in float16, whose small gradients would be zero without it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_GROWTH, _BACKOFF = 2.0, 0.5


class LossScale:
    """The dynamic scale of `torch.amp.GradScaler`, which here nobody waits for.

    After a gradient that is not finite, whose update is skipped, the factor is halved; it is
    doubled after ``interval`` updates in a row.
    """

    def __init__(
        self, device: torch.device, initial: float = 2.0**16, interval: int = 2000
    ) -> None:
        # Written in place, so that a CUDA graph reads it at the same address.
        self.scale = torch.full((), initial, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._interval = interval

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the factor, in place."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, self.scale)  # pyright: ignore[reportPrivateImportUsage]

    def update(self, finite: Tensor) -> None:
        torch._amp_update_scale_(  # pyright: ignore[reportPrivateImportUsage]
            self.scale, self._good, (~finite).float(), _GROWTH, _BACKOFF, self._interval
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state; waits for the device."""
        return {"scale": float(self.scale), "good": int(self._good)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self._good.fill_(state["good"])

    def line(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl; waits for the device."""
        return {"loss_scale": float(self.scale)}
