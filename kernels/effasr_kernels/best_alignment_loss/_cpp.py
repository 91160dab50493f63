"""`best_alignment_loss` on a CPU: the alignment in C++, its distances and gradients by torch."""

import torch
from torch import Tensor

from effasr_kernels.best_alignment_loss import AlignmentArguments
from effasr_kernels.best_alignment_loss.reference import mean_distances
from effasr_kernels.runtime import native
from effasr_kernels.shared import lattice
from effasr_kernels.shared.ragged import widen


def unsupported_reason(a: AlignmentArguments) -> str | None:
    return native.lacks("best_alignment_cpu")


def run(a: AlignmentArguments) -> Tensor:
    speech, text = (widen(x.detach()).contiguous() for x in (a.speech, a.text))
    offsets = a.layout_speech.cu_seqlens, a.layout_text.cu_seqlens
    chosen = torch.empty(a.layout_speech.total, dtype=torch.int64)
    lattice.best_alignment(speech, text, *offsets, chosen)
    return mean_distances(a, chosen)
