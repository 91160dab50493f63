import torch
from torch import Tensor
from torch.nn import functional as F

from effasr_kernels.audio_windows import WindowArguments


def run(a: WindowArguments) -> Tensor:
    width, device = a.window.shape[0], a.audio.device
    slots = slice(a.first_slot, a.end_slot)
    # The tail has the id N; it has an offset, and no sample.
    ids, slot_positions = a.layout_slots.sequence_ids()[slots], a.layout_slots.positions()[slots]
    cu_audio = a.cu_audio.long()
    lengths = F.pad(cu_audio.diff(), (0, 1))[ids]
    within = torch.arange(a.rows_per_slot, device=device)[:, None] * a.hop
    within = within + torch.arange(width, device=device) - a.before
    sample = (slot_positions * a.rows_per_slot * a.hop)[:, None, None] + within
    outside = (sample < 0) | (sample >= lengths[:, None, None])
    begins = sample == 0
    # The row after the last is silence; what lies outside of an utterance is read there.
    silence = a.audio.shape[0]
    source = sample.add_(cu_audio[ids][:, None, None]).masked_fill_(outside, silence)
    audio = F.pad(a.audio, (0, 1))
    windows = audio[source]
    if a.preemphasis:
        source = (source - 1).masked_fill_(outside | begins, silence)
        windows = torch.sub(windows, audio[source], alpha=a.preemphasis)
    windows = windows.mul_(a.window).view(a.rows, width)
    return F.pad(windows, (0, a.n_fft - width))
