"""Benchmarks of the features around their Fourier transform, in float32 as in training."""

from __future__ import annotations

import torch
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender
from bench.workload import Workload
from effasr_kernels import PackedLayout

_SLOT, _HOP, _WINDOW, _N_FFT = 8, 160, 400, 512


def cases(workload: Workload) -> list[Case]:
    """Return cases of windows, normalization of each utterance, and SpecAugment."""
    return [windows(workload), normalization(workload), masks(workload)]


def windows(workload: Workload) -> Case:
    """Return pre-emphasis and windows of 25 ms."""
    slots = workload.frame_layout
    samples = [_SLOT * _HOP * length for length in slots.lengths]
    rows = _SLOT * _HOP * (slots.rows + 1)
    layout = PackedLayout.from_lengths(samples, slots.device, rows=rows)
    audio = workload.rows_of(layout).detach().float()
    window = torch.hann_window(_WINDOW, device=slots.device)
    moved = audio.element_size() * (audio.numel() + _SLOT * slots.rows * _N_FFT)

    def ours(backend: str) -> Contender:
        options = {"hop": _HOP, "n_fft": _N_FFT, "preemphasis": 0.97, "backend": backend}
        given = audio, window, layout, slots
        call = lambda: kernels.audio_windows(*given, rows_per_slot=_SLOT, **options)
        return Contender({"audio": audio}, call, [], moved=moved)

    shape = f"{workload.describe()} W={_WINDOW} F={_N_FFT}"
    return Case("audio_windows", "", shape, ours)


def normalization(workload: Workload) -> Case:
    """Return the normalization of each band over each utterance."""
    x, lengths, layout = _mel_rows(workload)

    def ours(backend: str) -> Contender:
        options = {"rows_per_slot": _SLOT, "backend": backend}
        call = lambda: kernels.normalize_features(x, lengths, layout, **options)
        return Contender({"x": x}, call, [], moved=2 * x.numel() * x.element_size())

    return Case("normalize_features", "", f"{workload.describe()} C={x.shape[1]}", ours)


def masks(workload: Workload) -> Case:
    """Return the masks of Canary's recipes: 2 bands and 10 stretches of each utterance."""
    x, lengths, layout = _mel_rows(workload)
    generator = torch.Generator(x.device).manual_seed(4)
    freq, time = (
        torch.rand(2, layout.num_sequences, count, device=x.device, generator=generator)
        for count in (2, 10)
    )

    def ours(backend: str) -> Contender:
        call = lambda: kernels.mask_features(
            *(x, lengths, layout),
            rows_per_slot=_SLOT,
            freq_shares=freq,
            freq_width=27,
            time_shares=time,
            time_width=0.05,
            backend=backend,
        )
        return Contender({"x": x}, call, [], moved=2 * x.numel() * x.element_size())

    return Case("mask_features", "", f"{workload.describe()} C={x.shape[1]}", ours)


def _mel_rows(workload: Workload) -> tuple[Tensor, Tensor, PackedLayout]:
    layout = workload.frame_layout
    x = workload.rows_of(layout.scaled(_SLOT), workload.widths.mels).detach().float()
    return x, layout.cu_seqlens.diff().long() * _SLOT, layout
