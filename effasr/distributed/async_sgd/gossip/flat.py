"""The weights of a model as one row of numbers in the memory of the host, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Landing(Protocol):
    """Tells when a copy is complete, as a `torch.cuda.Event` does."""

    def query(self) -> bool:
        """Whether it is."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class Landed:
    """A copy that was complete when the call returned."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class FlatWeights:
    """Copies tensors, one after the other, to the host.

    From a GPU the copy overlaps what is computed next: the weights are gathered on the device, at
    its speed, and leave it on a stream of their own. That takes as much of its memory again.

    Args:
        tensors: float32, on one device; read whenever `copy_to` is called.

    Raises:
        ValueError: There are none, or of another dtype, or on several devices.
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
        """Fill ``host`` (float32 (count,); pinned where tensors are on a GPU) as they are now."""
        rows = [tensor.detach().reshape(-1) for tensor in self._tensors]
        if self.device.type != "cuda":
            torch.cat(rows, out=host)
            return Landed()
        current = torch.cuda.current_stream(self.device)
        # The copy before may still read what is overwritten here; an event never recorded is done.
        current.wait_event(self._copied)
        torch.cat(rows, out=self._gathered)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host.copy_(self._gathered, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._copied

    def settle(self) -> None:
        """Wait until the device has done all that it was asked to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
