"""Windows of packed audio, for a Fourier transform of each."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import FRAMES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import ForwardOnlyOp
from effasr_kernels.shared.slots import SIZES


@dataclass(frozen=True, slots=True)
class WindowArguments:
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
    outputs=lambda a: a.audio.new_empty(a.rows, a.n_fft),
    flops=lambda _: 0,
    examples=[Example("audio_windows", _example, 0)],
)

_NAME = OPERATION.name


def audio_windows(
    audio: Tensor,
    window: Tensor,
    layout_audio: PackedLayout,
    layout_slots: PackedLayout,
    *,
    rows_per_slot: int,
    hop: int,
    n_fft: int,
    preemphasis: float = 0.0,
    slots: tuple[int, int] | None = None,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Emphasize high frequencies of each utterance, and cut it into windows.

    Row r of an utterance of S samples a is centred on sample r h, where h is ``hop``:

    .. math::
        y_{rj} = w_j \, (a_i - p \, a_{i - 1}), \qquad
        i = r h + j - \lfloor F / 2 \rfloor + \lfloor (F - W) / 2 \rfloor

    for j below W, the samples of the window, and zero from there to F, the points of the transform.
    Samples before the first and after the last of the utterance are zeros, in the place of
    a :math:`-` p a as well. The host does not wait for the device, and there is no gradient.

    Args:
        audio: (samples,), floating point, a.
        window: (W,), the dtype of ``audio``, w.
        layout_audio: Layout of ``audio``.
        layout_slots: Layout of the slots, T rows, as many sequences; a slot has s windows.
        rows_per_slot: s: 1, 2, 4 or 8.
        hop: h, samples between two windows.
        n_fft: F, at least W.
        preemphasis: p, in [0, 1].
        slots: The first slot and the end of those whose windows are computed; all by default.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        (s T, F), the dtype of ``audio``, or s rows of each slot in ``slots``; zero in the tail.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    checks.check_shape(_NAME, "audio", audio, "(samples,)", None)
    checks.check_rows(_NAME, "audio", audio, "layout_audio", layout_audio)
    checks.check_shape(_NAME, "window", window, "(W,)", None)
    checks.check_floating(_NAME, audio=audio, window=window)
    checks.check_same_sequences(_NAME, "layout_slots", layout_slots, "layout_audio", layout_audio)
    if layout_slots.device != audio.device:
        raise checks.wrong(
            _NAME, "layout_slots", f"be on {audio.device}, as `audio` is", layout_slots.device
        )
    if rows_per_slot not in SIZES:
        raise checks.wrong(_NAME, "rows_per_slot", f"be one of {SIZES}", rows_per_slot)
    if hop < 1:
        raise checks.wrong(_NAME, "hop", "be at least 1", hop)
    if n_fft < max(1, window.shape[0]):
        raise checks.wrong(
            _NAME, "n_fft", f"be at least 1 and the window's {window.shape[0]}", n_fft
        )
    if not 0 <= preemphasis <= 1:
        raise checks.wrong(_NAME, "preemphasis", "be in [0, 1]", preemphasis)
    first, end = (0, layout_slots.rows) if slots is None else slots
    if not 0 <= first <= end <= layout_slots.rows:
        raise checks.wrong(_NAME, "slots", f"be a range within {layout_slots.rows}", slots)
    arguments = WindowArguments(
        *(audio, window, layout_audio.cu_seqlens, layout_slots, rows_per_slot, hop, n_fft),
        *(float(preemphasis), first, end),
    )
    return OPERATION(arguments, backend)
