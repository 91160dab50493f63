"""Example calls of operations, for tests, ``effasr doctor`` and measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout

HEADS, WIDTH, CHANNELS, CLASSES, BANDS = 2, 64, 32, 48, 16
"""Attention heads, width of a head, channels, classes of the vocabulary, and mel bands."""
FRAMES, TOKENS = (24, 0, 16), (5, 0, 3)
"""Lengths of the utterances and of their transcripts."""


Keywords = Mapping[str, Any]
"""Arguments of a public function by name."""


class ExampleInputs:
    """Makes the tensors of an example. Floating tensors are random: their values do not matter."""

    def __init__(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        """Set the device of all tensors and the dtype of floating ones."""
        self.device, self.dtype = torch.device(device), dtype

    def floating(self, *shape: int, differentiable: bool = True) -> Tensor:
        """A random tensor; subclasses may use whether every backend has its gradient."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def integers(self, *values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=dtype)

    def frames(self) -> PackedLayout:
        """The layout of three utterances, one of them empty, and a tail."""
        return PackedLayout.from_lengths(FRAMES, self.device, rows=sum(FRAMES) + 2)

    def tokens(self) -> PackedLayout:
        return PackedLayout.from_lengths(TOKENS, self.device, rows=sum(TOKENS) + 1)

    def targets(self) -> Tensor:
        """The tokens of the transcripts, int64, none of them class 0; -100 in the tail."""
        return self.integers(1, 2, 3, 4, 5, 1, 2, 2, -100, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Example:
    label: str  # the operation's name, followed by the option that the call shows, if any
    arguments: Callable[[ExampleInputs], Keywords]  # the keyword arguments of the public function
    flops: int  # floating-point operations of the forward without the tail, counted by hand
