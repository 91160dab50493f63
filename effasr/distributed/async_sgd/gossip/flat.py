"""Copies of a model's weights as one flat tensor in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Landing(Protocol):
    """Completion of a copy, with the interface of a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the copy is complete."""
        ...

    def synchronize(self) -> None:
        """Wait until the copy is complete."""
        ...


class Landed:
    """A copy that was complete when the call returned."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class FlatWeights:
    """Copies the concatenation of tensors to the host.

    From a GPU the copy overlaps with later computation: the weights are concatenated on the device
    and copied on a separate stream. This needs device memory for one more copy of them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not any(tensor.numel() for tensor in tensors):
            raise ValueError("`tensors` must not be empty: there is nothing to average.")
        for index, tensor in enumerate(tensors):
            if tensor.dtype != torch.float32:
                raise ValueError(
                    f"`tensors` must be float32, but number {index} is {tensor.dtype}: what a "
                    "learner gets from others is small, and would be rounded away. Keep weights in "
                    "float32 and compute in autocast."
                )
            if tensor.device != tensors[0].device:
                raise ValueError(
                    f"`tensors` must be on one device, but number {index} is on {tensor.device} "
                    f"and the first on {tensors[0].device}."
                )
        self._tensors = list(tensors)
        self.device = tensors[0].device
        self.count = sum(tensor.numel() for tensor in tensors)
        if self.device.type == "cuda":
            self._gathered = torch.empty(self.count, device=self.device)
            self._stream = torch.cuda.Stream(self.device)
            self._copied = torch.cuda.Event()

    @torch.no_grad()
    def copy_to(self, host: Tensor) -> Landing:
        """Copy the weights to ``host``: float32 (count,), pinned if the tensors are on a GPU."""
        rows = [tensor.detach().reshape(-1) for tensor in self._tensors]
        if self.device.type != "cuda":
            torch.cat(rows, out=host)
            return Landed()
        current = torch.cuda.current_stream(self.device)
        # The previous copy may still read the buffer that is overwritten here; an unrecorded event
        # counts as done.
        current.wait_event(self._copied)
        torch.cat(rows, out=self._gathered)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host.copy_(self._gathered, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._copied

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
