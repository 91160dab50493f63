"""Reflected windows and dynamic range of Whisper's features.

References:
    Radford et al., 2022, https://arxiv.org/abs/2212.04356; transformers'
    ``WhisperFeatureExtractor``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effasr.data.features.segments import segment_max
from effasr_kernels import PackedLayout, PackedSequence

_GUARD = 1e-10
_RANGE = 8.0
"""Powers of ten below its loudest place that an utterance has; what is less is raised to that."""


class ReflectedWindows:
    """Windows centred on every hop of utterances, each followed by silence up to whole slots.

    Before the beginning the signal is reflected, as `torch.stft` does it.
    """

    def __init__(
        self,
        audio: PackedSequence,
        frames: PackedLayout,
        *,
        rows: int,
        hop: int,
        width: int,
        reflect_end: bool,
    ) -> None:
        """Prepare; nothing as large as the windows is computed.

        Args:
            audio: float32 (samples,).
            frames: T slots, those of each utterance.
            rows: Windows of a slot.
            hop: Samples between two windows.
            width: Samples of a window; half of it is less than a slot.
            reflect_end: Whether the signal is reflected behind the last slot, too; otherwise there
                is more silence.
        """
        ids, pad = frames.sequence_ids(), torch.nn.functional.pad
        starts = audio.layout.cu_seqlens
        # The last sample is silence, and what lies in it is read there. The tail has the id N.
        self._values, self._silence = pad(audio.values, (0, 1)), audio.layout.rows
        self._rows, self._hop, self._width = rows, hop, width
        self._reflect_end = reflect_end
        self._starts = starts[ids]
        self._lengths = pad(starts.diff(), (0, 1))[ids]
        self._ends = pad(frames.cu_seqlens.diff(), (0, 1))[ids] * (rows * hop)
        self._places = (torch.arange(frames.rows, device=ids.device) - frames.cu_seqlens[ids]).int()

    def __len__(self) -> int:
        return len(self._places) * self._rows

    def chunk(self, begin: int, end: int) -> Tensor:
        """Return the windows of some rows of slots: float32 (end - begin, width)."""
        rows = torch.arange(begin, end, device=self._places.device)
        slots, within = rows // self._rows, rows % self._rows
        first = (self._places[slots] * self._rows + within.int()) * self._hop - self._width // 2
        step = torch.arange(self._width, device=rows.device, dtype=torch.int32)
        place = (first[:, None] + step).abs_()
        if self._reflect_end:
            # In the tail, which may be far beyond an end of 0, that is before the beginning.
            place = torch.minimum(place, 2 * (self._ends[slots] - 1)[:, None] - place)
        outside = (place < 0) | (place >= self._lengths[slots][:, None])
        source = place.add_(self._starts[slots][:, None]).masked_fill_(outside, self._silence)
        return self._values.index_select(0, source.flatten()).view(end - begin, self._width)


def log_bands(power: Tensor) -> Tensor:
    """Return the logarithm of mel bands, in place: base 10, at least -10."""
    return power.clamp_(min=_GUARD).log10_()


def compressed(values: Tensor, frames: PackedLayout, rows: int) -> Tensor:
    """Raise values far below the maximum of an utterance, and scale all to about -1 to 1.

    Args:
        values: Logarithms, float32 (rows T, mel_bins).
        frames: T slots, those of each utterance.
        rows: Mel rows of a slot.
    """
    loudest = values.view(frames.rows, -1).amax(1)
    floor = segment_max(loudest, frames) - _RANGE
    floor = torch.nn.functional.pad(floor, (0, 1))[frames.sequence_ids()]
    floor = floor.repeat_interleave(rows, 0)[:, None]
    return torch.maximum(values, floor).add_(4.0).div_(4.0)
