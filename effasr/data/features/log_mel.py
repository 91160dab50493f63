"""Log-mel features of packed audio, per utterance, as Hugging Face computes them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from effasr.data.features.config import FeatureConfig
from effasr.data.features.segments import segment_max
from effasr_kernels import PackedLayout, PackedSequence, audio_windows, normalize_features
from effasr_kernels.shared.cpu.linear import has_onednn, onednn_product, onednn_weight
from effasr_kernels.shared.slots import row_positions, rows_of

_LOG_GUARD = 2.0**-24
_NORM_EPS = 1e-5
# Mel rows whose spectra exist at a time: what a CPU's cache holds; elsewhere those of a micro-batch
# of 16,384 frames, as a chunk costs 13 launches. They take 0.9 GB before the model takes any.
_CHUNK_ROWS = {"cpu": 512}
_CHUNK_ROWS_ELSEWHERE = 131_072

# Filterbanks in oneDNN's order, kept outside of the modules: they cannot be copied or pickled.
_ONEDNN_WEIGHTS = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class MelFrames:
    """Mel rows in slots: of the s n rows of an utterance of n frames, the first are real."""

    values: Tensor  # float32 (s T, mel_bins); zero in the rows that are not real
    layout: PackedLayout  # Layout of the encoder frames, T rows
    lengths: Tensor  # int64 (N,), number of real mel rows of each utterance
    subsampling: int = 8  # s, mel rows of a slot
    # int64 (N,), those of the real rows that are no silence put behind the utterance; by default
    # all
    spoken: Tensor | None = None

    @property
    def slot_positions(self) -> Tensor:
        """The place of each slot in its utterance: int64 (T,)."""
        return self.layout.positions()

    @property
    def row_positions(self) -> Tensor:
        """The place of each mel row in its utterance: int64 (s T,)."""
        return row_positions(self.layout, self.subsampling)

    @property
    def mask(self) -> Tensor:
        """Which mel rows are real: bool (s T,)."""
        return self.row_positions < rows_of(self.lengths, self.layout, self.subsampling)

    def with_values(self, values: Tensor) -> "MelFrames":
        """Other values of the same frames."""
        return replace(self, values=values)


class LogMel(nn.Module):
    """Log-mel features of packed audio, without padding utterances to a common length.

    Pre-emphasis, a Hann window (symmetric) every ``hop`` samples with zeros beyond the ends of the
    utterance, power spectrum, Slaney mel bands, ``log(x + 2**-24)``, then per utterance and band
    zero mean and unit variance over the real rows. Equal to transformers'
    ``ParakeetFeatureExtractor`` for each utterance alone, as long as float32 matrix products are
    not rounded to TF32. Everything is float32, also under autocast, and nothing waits for the
    device.

    Those of kind whisper are transformers' ``WhisperFeatureExtractor``'s of each utterance with the
    silence of ``minimum_s`` behind it: a periodic window, reflection before the beginning,
    ``log10(max(x, 1e-10))``, at least the maximum of the utterance less 8, ``(x + 4) / 4``.
    """

    window: Tensor
    filterbank: Tensor

    def __init__(self, config: FeatureConfig):
        super().__init__()
        self.config = config
        # Not persistent: a checkpoint holds what is learnt, and the configuration gives these.
        self.register_buffer("window", torch.empty(config.window), persistent=False)
        bins = config.n_fft // 2 + 1
        self.register_buffer("filterbank", torch.empty(bins, config.mel_bins), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the window and the mel bands; those of a meta module come to the host."""
        device = torch.device("cpu") if self.window.is_meta else self.window.device
        periodic = self.config.kind == "whisper"
        window = torch.hann_window(
            self.config.window, periodic=periodic, dtype=torch.float32, device=device
        )
        bands = mel_filterbank(self.config).astype(np.float32)
        self.window, self.filterbank = window, torch.tensor(bands, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LogMel":
        super()._apply(fn, recurse)
        if self.window.dtype != torch.float32:
            # Weights may be cast to another dtype; the features are float32 always.
            self.reset_parameters()
        return self

    @torch.no_grad()
    def forward(self, audio: PackedSequence, frames: PackedLayout) -> MelFrames:
        """Compute the mel rows of every utterance, at ``config.sample_rate``.

        ``frames`` has `FeatureConfig.encoder_frames` of each utterance.
        """
        check_frames(self.config, audio.layout, frames)
        with torch.autocast(audio.values.device.type, enabled=False):
            values, lengths = self._mel(audio, frames), self._lengths(audio.layout, frames)
            # Whisper's are logarithms already.
            guard = 0.0 if self.config.kind == "whisper" else _LOG_GUARD
            spoken = self._spoken(audio.layout, lengths)
            mel = MelFrames(values, frames, lengths, self.config.rows_per_frame, spoken)
            if self.config.normalize:
                return mel.with_values(normalized(mel, guard))
            if guard:
                values.add_(guard).log_()
            return mel.with_values(values.masked_fill_(~mel.mask[:, None], 0.0))

    def _spoken(self, audio: PackedLayout, lengths: Tensor) -> Tensor | None:
        if self.config.kind != "whisper":
            return None
        rows = torch.div(audio.cu_seqlens.long().diff(), self.config.hop, rounding_mode="floor")
        return torch.minimum(rows, lengths)

    def _lengths(self, audio: PackedLayout, frames: PackedLayout) -> Tensor:
        """Real mel rows of each utterance: int64 (N,)."""
        if self.config.kind == "whisper":
            return frames.cu_seqlens.long().diff() * self.config.rows_per_frame
        return torch.div(audio.cu_seqlens.long().diff(), self.config.hop, rounding_mode="floor")

    def _mel(self, audio: PackedSequence, frames: PackedLayout) -> Tensor:
        if frames.rows == 0:
            # The library of Fourier transforms refuses a batch of none.
            return audio.values.new_zeros(0, self.config.mel_bins)
        size, slot = self._chunk_rows(frames), self.config.rows_per_frame
        if self.config.kind == "whisper":
            return self._whisper(audio, frames, size)
        if _runs_on_host(audio.layout, frames):
            return self._mel_on_host(audio, frames)
        chunks = [
            self._windowed_bands(audio, frames, (begin, min(begin + size // slot, frames.rows)))
            for begin in range(0, frames.rows, size // slot)
        ]
        return torch.cat(chunks) if len(chunks) > 1 else chunks[0]

    def _chunk_rows(self, frames: PackedLayout) -> int:
        return _CHUNK_ROWS.get(frames.device.type, _CHUNK_ROWS_ELSEWHERE)

    def _whisper(self, audio: PackedSequence, frames: PackedLayout, size: int) -> Tensor:
        config = self.config
        slot = config.rows_per_frame
        windows = ReflectedWindows(
            audio,
            frames,
            rows=slot,
            hop=config.hop,
            width=config.n_fft,
            # An utterance that fills the minimum ends as transformers' does; a shorter one in
            # silence, with or without it.
            reflect_end=config.minimum_s > 0,
        )
        count = len(windows)
        bands = [
            log_bands(self._bands(windows.chunk(begin, min(begin + size, count)).mul_(self.window)))
            for begin in range(0, count, size)
        ]
        return compressed(torch.cat(bands), frames, slot)

    def _windowed_bands(
        self, audio: PackedSequence, frames: PackedLayout, slots: tuple[int, int]
    ) -> Tensor:
        config = self.config
        windows = audio_windows(
            audio.values,
            self.window,
            audio.layout,
            frames,
            rows_per_slot=config.rows_per_frame,
            hop=config.hop,
            n_fft=config.n_fft,
            preemphasis=config.preemphasis,
            slots=slots,
        )
        return self._bands(windows)

    def _bands(self, windows: Tensor) -> Tensor:
        # A shift inside the transform changes phases only: the window need not be centred in it.
        return self._to_mel(_power(torch.fft.rfft(windows)))

    def _to_mel(self, power: Tensor) -> Tensor:
        """Project power spectra to the mel bands: (rows, bins) to (rows, mel_bins)."""
        if torch.compiler.is_compiling() or power.device.type != "cpu" or not has_onednn():
            return power @ self.filterbank
        if (weight := _ONEDNN_WEIGHTS.get(self.filterbank)) is None:
            weight = _ONEDNN_WEIGHTS[self.filterbank] = onednn_weight(
                self.filterbank.T.contiguous()
            )
        return onednn_product(power, weight)

    def _mel_on_host(self, audio: PackedSequence, frames: PackedLayout) -> Tensor:
        """Return the same rows if the host knows the lengths: without index or empty sequence.

        Utterances are copied to a buffer in which a spare slot of zeros follows each, so that the
        rows of an utterance are a strided view of it.
        """
        config = self.config
        rows = config.rows_per_frame * frames.rows
        windows, runs = self._spread_on_host(audio, frames)
        bands = audio.values.new_empty(rows, config.mel_bins)
        # The transform pads windows by itself, but with a copy.
        padded = audio.values.new_zeros(min(rows, self._chunk_rows(frames)), config.n_fft)
        run = 0
        for begin in range(0, rows, len(padded)):
            chunk = padded[: rows - begin]
            done = 0
            while done < len(chunk) and run < len(runs):
                first, end = runs[run]
                count = min(end - first, len(chunk) - done)
                into = chunk[done : done + count, : config.window]
                torch.mul(windows[first : first + count], self.window, out=into)
                runs[run] = (first + count, end)
                done, run = done + count, run + (first + count == end)
            chunk[done:].zero_()
            bands[begin : begin + len(chunk)] = self._to_mel(_power(torch.fft.rfft(chunk)))
        return bands

    def _spread_on_host(
        self, audio: PackedSequence, frames: PackedLayout
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return all windows as a view, and the first and last of each utterance that has any."""
        config, slot = self.config, self.config.rows_per_frame
        pairs = zip(
            audio.layout.lengths, frames.lengths, audio.layout.cu_seqlens_host, strict=False
        )
        present = [(samples, slots, begin) for samples, slots, begin in pairs if slots]
        remaining = config.n_fft // 2 - (config.n_fft - config.window) // 2
        hops = slot * (frames.total + len(present))
        buffer = audio.values.new_zeros(remaining + hops * config.hop + config.window)
        runs, position = [], 0
        for samples, slots, begin in present:
            piece = audio.values[begin : begin + samples]
            target = buffer[remaining + position * config.hop :][:samples]
            target.copy_(piece)
            if config.preemphasis:
                target[1:].sub_(piece[:-1], alpha=config.preemphasis)
            runs.append((position, position + slots * slot))
            position += (slots + 1) * slot
        return buffer.unfold(0, config.window, config.hop), runs


def check_frames(config: FeatureConfig, audio: PackedLayout, frames: PackedLayout) -> None:
    if not (audio.known_on_host and frames.known_on_host):
        return  # What is compiled or recorded must not depend on lengths.
    expected = tuple(map(config.framing.frames, audio.lengths))
    if frames.lengths != expected:
        raise ValueError(
            f"`frames` must have lengths {_shortened(expected)}, as the audio gives, but has "
            f"{_shortened(frames.lengths)}: build it with FeatureConfig.encoder_frames."
        )


def _power(spectrum: Tensor) -> Tensor:
    imaginary = spectrum.imag
    return spectrum.real.square().addcmul_(imaginary, imaginary)


def _runs_on_host(audio: PackedLayout, frames: PackedLayout) -> bool:
    """Return whether a CPU computes the features, and knows the lengths of the utterances."""
    return frames.device.type == "cpu" and frames.known_on_host and audio.known_on_host


def normalized(mel: MelFrames, log_guard: float = 0.0) -> Tensor:
    """Give each band zero mean and unit variance over the real rows of each utterance."""
    return normalize_features(
        *(mel.values, mel.lengths, mel.layout),
        rows_per_slot=mel.subsampling,
        eps=_NORM_EPS,
        log_guard=log_guard,
    )


def mel_filterbank(config: FeatureConfig) -> np.ndarray:
    """Triangular bands of unit area on Slaney's mel scale: float64 (n_fft // 2 + 1, mel_bins).

    References:
        M. Slaney, Auditory Toolbox, 1998; the same bands as ``librosa.filters.mel``.
    """
    top = config.sample_rate / 2
    edges = _mel_to_hertz(np.linspace(0.0, _hertz_to_mel(top), config.mel_bins + 2))
    bins = np.linspace(0.0, top, config.n_fft // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))


# Slaney's scale: 3 mel per 200 Hz up to 1 kHz, above it 27 mel per factor of 6.4.
_LINEAR_HERTZ = 200.0 / 3.0
_KNEE_HERTZ = 1_000.0
_KNEE_MEL = _KNEE_HERTZ / _LINEAR_HERTZ
_LOG_STEP = float(np.log(6.4)) / 27.0


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _KNEE_HERTZ:
        return hertz / _LINEAR_HERTZ
    return _KNEE_MEL + float(np.log(hertz / _KNEE_HERTZ)) / _LOG_STEP


def _mel_to_hertz(mel: np.ndarray) -> np.ndarray:
    above = _KNEE_HERTZ * np.exp(_LOG_STEP * (mel - _KNEE_MEL))
    return np.where(mel < _KNEE_MEL, mel * _LINEAR_HERTZ, above)


def _shortened(lengths: tuple[int, ...], most: int = 8) -> str:
    shown = ", ".join(map(str, lengths[:most]))
    return f"({shown}{', ...' if len(lengths) > most else ''})"


# Reflected windows and dynamic range of Whisper's features.
#
# References:
#     Radford et al., 2022, https://arxiv.org/abs/2212.04356; transformers'
#     ``WhisperFeatureExtractor``.

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
        """Prepare; nothing as large as the windows is computed."""
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
        position = (first[:, None] + step).abs_()
        if self._reflect_end:
            # In the tail, which may be far beyond an end of 0, that is before the beginning.
            position = torch.minimum(position, 2 * (self._ends[slots] - 1)[:, None] - position)
        outside = (position < 0) | (position >= self._lengths[slots][:, None])
        source = position.add_(self._starts[slots][:, None]).masked_fill_(outside, self._silence)
        return self._values.index_select(0, source.flatten()).view(end - begin, self._width)


def log_bands(power: Tensor) -> Tensor:
    """Return the logarithm of mel bands, in place: base 10, at least -10."""
    return power.clamp_(min=_GUARD).log10_()


def compressed(values: Tensor, frames: PackedLayout, rows: int) -> Tensor:
    """Raise values far below the maximum of an utterance, and scale all to about -1 to 1."""
    floor = segment_max(values.view(frames.rows, -1).amax(1), frames) - _RANGE
    floor = torch.nn.functional.pad(floor, (0, 1))[frames.sequence_ids()]
    floor = floor.repeat_interleave(rows, 0)[:, None]
    return torch.maximum(values, floor).add_(4.0).div_(4.0)
