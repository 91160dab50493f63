"""Definition of `audio_windows`: arguments, backends, output shape and examples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import FRAMES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.forward_only import ForwardOnlyOp


@dataclass(frozen=True, slots=True)
class WindowArguments:
    """Validated arguments of a call; see `effasr_kernels.audio_windows.audio_windows`.

    Attributes:
        cu_audio: Offsets of the samples, int32 (N + 1,): no length of the audio is needed.
        first_slot: First slot whose windows are computed.
        end_slot: End of these slots.
    """

    audio: Tensor
    window: Tensor
    cu_audio: Tensor
    layout_slots: PackedLayout
    rows_per_slot: int
    hop: int
    n_fft: int
    preemphasis: float
    first_slot: int
    end_slot: int

    @property
    def rows(self) -> int:
        """Number of windows."""
        return (self.end_slot - self.first_slot) * self.rows_per_slot

    @property
    def before(self) -> int:
        """Samples of a window before the one on which it is centred."""
        return self.n_fft // 2 - (self.n_fft - self.window.shape[0]) // 2


def _example(inputs: ExampleInputs) -> Keywords:
    hop, slots = 10, inputs.frames()
    samples = [8 * hop * frames for frames in FRAMES]
    audio = PackedLayout.from_lengths(samples, inputs.device, rows=sum(samples) + 7)
    return {
        "audio": inputs.floating(audio.rows),
        "window": inputs.floating(24),
        "layout_audio": audio,
        "layout_slots": slots,
        "rows_per_slot": 8,
        "hop": hop,
        "n_fft": 32,
        "preemphasis": 0.97,
    }


OPERATION = ForwardOnlyOp(
    "audio_windows",
    WindowArguments,
    {
        Backend.TRITON: "effasr_kernels.audio_windows._triton",
        Backend.REFERENCE: "effasr_kernels.audio_windows.reference",
    },
    outputs=lambda a: a.audio.new_empty(a.rows, a.n_fft),
    flops=lambda _: 0,
    examples=[Example("audio_windows", _example, 0)],
)
