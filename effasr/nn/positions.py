"""Sinusoidal position embeddings: relative, Canary's and Whisper's."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


class PositionTables:
    """Tables of position embeddings, each computed once per device instead of at every step.

    Tables are never freed, because a CUDA graph reads those that it was captured with; so the sizes
    must be few.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def get(self, make: Callable[[], Tensor], like: Tensor, *key: object) -> Tensor:
        """The table of a key, not to be written to; the first call waits for the device."""
        if torch.compiler.is_compiling():
            return make()
        key = (*key, like.device, is_fake(like))
        if (table := self._tables.get(key)) is None:
            # A table made in inference mode could not be saved for a backward.
            with torch.inference_mode(False), torch.no_grad():
                table = make()
            is_cuda = like.device.type == "cuda"
            # What is computed during the capture of a CUDA graph has no values until it runs.
            if not (is_cuda and torch.cuda.is_current_stream_capturing()):
                if is_cuda:
                    torch.cuda.current_stream(like.device).synchronize()
                self._tables[key] = table
        return table


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Embed positions or distances by interleaved sines and cosines, as Transformer-XL.

    Channels 2c and 2c + 1 are the sine and the cosine of ``position * 10000 ** (-2c / width)``.
    """
    # positions: (R,), any number type -> float32 (R, width)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[:, None].float() * (1.0 / 10_000.0**exponents)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def relative_sinusoids(reach: int, width: int, device: torch.device) -> Tensor:
    """Embed the distances from ``1 - reach`` to ``reach - 1``: float32 (2 reach - 1, width)."""
    return sinusoids(torch.arange(1 - reach, reach, device=device), width)


def decoder_sinusoids(positions: Tensor, width: int) -> Tensor:
    """Embed token positions as NeMo's ``FixedPositionalEncoding`` and Canary's decoder.

    All sines, then all cosines, over ``sqrt(width)``. The wavelengths differ slightly from the
    usual ones: Canary spaces them from 1 to ``10000 ** ((width - 2) / width)``.
    """
    # positions: (R,), any number type -> float32 (R, width)
    step = math.log(10_000.0) * (width - 2) / width / (width // 2 - 1)
    return _sines_then_cosines(positions, width, step) / math.sqrt(width)


def whisper_sinusoids(positions: Tensor, width: int) -> Tensor:
    """Frame positions of Whisper's encoder: all sines, then all cosines."""
    return _sines_then_cosines(positions, width, math.log(10_000.0) / (width // 2 - 1))


def _sines_then_cosines(positions: Tensor, width: int, step: float) -> Tensor:
    channels = torch.arange(width // 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None].float() * torch.exp(-step * channels)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
