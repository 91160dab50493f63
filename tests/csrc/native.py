"""The lattices' C interface (csrc/lattice.h), and the sums it is compared with, in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32


def _fields(pointers: str, numbers: str) -> list[tuple[str, Any]]:
    return [*((name, _POINTER) for name in pointers.split())] + [
        (name, _INT) for name in numbers.split()
    ]


class _Transducer(ctypes.Structure):
    _fields_ = _fields(
        "log_blank log_label occ_blank occ_label log_likelihood cu_frames cu_labels first_nodes",
        "sequences",
    )


class _Ctc(ctypes.Structure):
    _fields_ = _fields(
        "scores log_normalizer occupancies shares log_likelihood targets cu_frames cu_targets",
        "sequences columns wide_targets",
    )


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Where each of the lengths begins, and the last ends."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@dataclass(frozen=True)
class Implementation:
    """The compiled lattices, and how many threads run them."""

    library: ctypes.CDLL
    threads: int = 1

    def run(self, lattice: Any, name: str) -> None:
        """Call the C function."""
        run = getattr(self.library, f"{name}_cpu")
        assert run(ctypes.byref(lattice), self.threads) == 0

    def transducer(
        self,
        planes: Sequence[tuple[Tensor, Tensor]],
        *,
        in_place: bool = False,
        only_likelihoods: bool = False,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Log-likelihood and occupancies of each pair of planes (T, U + 1)."""
        frames = [blank.shape[0] for blank, _ in planes]
        labels = [blank.shape[1] - 1 for blank, _ in planes]
        # Sequences lie apart: nothing may be written between them.
        starts = offsets([blank.numel() + 3 for blank, _ in planes], torch.int64)
        inputs = torch.full((2, int(starts[-1])), torch.nan)
        for n, pair in enumerate(planes):
            for plane, x in zip(inputs, pair, strict=True):
                plane[starts[n] :][: x.numel()] = x.flatten()
        outputs = inputs if in_place else torch.full_like(inputs, 7.0)
        untouched = outputs.clone()
        total = torch.zeros(len(planes), dtype=torch.float64)
        tensors = [*inputs, *outputs, total, offsets(frames), offsets(labels), starts]
        lattice = _Transducer(*(x.data_ptr() for x in tensors))
        lattice.sequences = len(planes)
        if only_likelihoods:
            lattice.occ_blank = lattice.occ_label = None
        self.run(lattice, "transducer_lattice")
        results = []
        for n, (blank, _) in enumerate(planes):
            between = slice(int(starts[n]) + blank.numel(), int(starts[n + 1]))
            assert torch.equal(outputs[:, between].isnan(), untouched[:, between].isnan())
            found = [x[starts[n] :][: blank.numel()].view_as(blank) for x in outputs]
            results.append((total[n], *found))
        return results

    def ctc(
        self,
        sequences: Sequence[tuple[Tensor, Tensor, Tensor]],
        *,
        wide_targets: bool = True,
        in_place: bool = False,
        only_likelihoods: bool = False,
        normalized: bool = False,
    ) -> list[tuple[Tensor, Tensor]]:
        """Log-likelihood and occupancies of scores (T, U + 1), their normalizers, and labels."""
        frames = [scores.shape[0] for scores, _, _ in sequences]
        labels = [y.shape[0] for _, _, y in sequences]
        cu_frames, cu_targets = offsets(frames), offsets(labels)
        table = torch.full((sum(frames), max(labels) + 2), torch.nan)
        for n, (scores, normalizer, _) in enumerate(sequences):
            own = scores - normalizer[:, None] if normalized else scores
            table[cu_frames[n] : cu_frames[n + 1], : own.shape[1]] = own
        normalizers = torch.cat([normalizer for _, normalizer, _ in sequences])
        targets = torch.cat([y for _, _, y in sequences])
        targets = targets.long() if wide_targets else targets.int()
        occupancies = table if in_place else torch.full_like(table, 7.0)
        shares = torch.full_like(table, torch.nan)
        total = torch.zeros(len(sequences), dtype=torch.float64)
        tensors = [table, normalizers, occupancies, shares, total, targets, cu_frames, cu_targets]
        lattice = _Ctc(*(x.data_ptr() for x in tensors))
        lattice.sequences, lattice.columns = len(sequences), table.shape[1]
        lattice.wide_targets = wide_targets
        if normalized:
            lattice.log_normalizer = None
        if only_likelihoods:
            lattice.occupancies = lattice.shares = None
        self.run(lattice, "ctc_lattice")
        return [
            (total[n], occupancies[cu_frames[n] : cu_frames[n + 1], : labels[n] + 1])
            for n in range(len(sequences))
        ]


def random_planes(frames: int, labels: int, classes: int = 1024) -> tuple[Tensor, Tensor]:
    """Log-probabilities like those of an untrained model; NaN where they must not be read."""
    z = torch.randn(2, frames, labels + 1) - torch.tensor(1.65 * classes).log()
    z[1, :, -1] = torch.nan
    return z[0].contiguous(), z[1].contiguous()


def random_transcript(frames: int, labels: int, classes: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, normalizers, and labels of which some repeat."""
    scores = 2 * torch.randn(frames, labels + 1)
    return scores, 3 + torch.randn(frames), torch.randint(1, classes, (labels,))


def ctc_reference(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihood of log-probabilities (T, U + 1), and its gradient: the occupancies."""
    e = log_probs.double().requires_grad_()
    count = labels.shape[0]
    # Infinities would make NaN in the gradient.
    nothing = torch.full((count + 1,), -1e30, dtype=torch.float64)
    blank, label = nothing.clone(), nothing[1:]
    blank[0] = 0.0
    differs = torch.ones(count, dtype=torch.bool)
    differs[1:] = labels[1:] != labels[:-1]
    for row in e:
        advanced = torch.logaddexp(torch.cat([nothing[:1], label]), blank)
        label = torch.logaddexp(label, torch.where(differs, advanced[:-1], blank[:-1])) + row[1:]
        blank = advanced + row[0]
    total = torch.logaddexp(blank[-1], label[-1]) if count else blank[-1]
    if total < -1e29:
        return torch.tensor(-torch.inf), torch.zeros_like(log_probs)
    if not log_probs.shape[0]:
        return total, torch.zeros_like(log_probs)
    return total.detach(), torch.autograd.grad(total, e)[0]
