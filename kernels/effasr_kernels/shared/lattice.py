"""The compiled lattices of ``csrc/``: sums over all paths, and the share of each step in them.

They are helpers of operations, not operations: scaling by a gradient is the caller's. Which one
runs is always said, ``backend="cuda-extension"`` or ``"cpu-extension"``, and never replaced. Both
come with `effasr_kernels._C`, which is built on request (``csrc/README.md``); `why_not` tells
whether it is there.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal

import torch
from torch import Tensor

from effasr_kernels.runtime.dispatch import BackendUnavailable

Extension = Literal["cuda-extension", "cpu-extension"]
_DEVICES = {"cuda-extension": "cuda", "cpu-extension": "cpu"}


@functools.cache
def why_not(backend: Extension) -> str | None:
    """The reason for which this backend cannot run on this installation, or None."""
    if backend not in _DEVICES:
        return f"there is none of that name, only {', '.join(_DEVICES)}"
    try:
        importlib.import_module("effasr_kernels._C")
    except ImportError as error:
        return f"effasr_kernels._C cannot be imported: {error}"
    key = _DEVICES[backend].upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key("effasr_c::transducer_lattice", key):
        return "effasr_kernels._C was built without CUDA"
    return None


def node_offsets(cu_frames: Tensor, cu_labels: Tensor) -> Tensor:
    """The first node of each sequence, and the count of all, int64 (N + 1,).

    Args:
        cu_frames: int32 (N + 1,), of which neighbours differ by T_n.
        cu_labels: int32 (N + 1,), by U_n.
    """
    nodes = cu_frames.diff().long() * (cu_labels.diff().long() + 1)
    return torch.cat([nodes.new_zeros(1), nodes.cumsum(0)])


def transducer_occupancies(
    log_blank: Tensor,
    log_label: Tensor,
    cu_frames: Tensor,
    cu_labels: Tensor,
    first_nodes: Tensor,
    *,
    max_frames: int,
    max_labels: int,
    skewed: bool = False,
    in_place: bool = False,
    backend: Extension,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `effasr_kernels.transducer_loss.lattice.occupancies` gives, of packed sequences.

    Node (t, u) of sequence n is element ``first_nodes[n] + t (U_n + 1) + u`` of each plane; where
    ``skewed``, it is ``first_nodes[n] + ((t + u) mod T_n) (U_n + 1) + u``, so that the nodes of an
    anti-diagonal lie side by side, which GPUs read and write faster.

    Args:
        log_blank: Log-probability to go to the next frame, float32 (nodes,).
        log_label: To emit the next label, float32 (nodes,); where u = U_n it is not read.
        cu_frames: int32 (N + 1,), of which neighbours differ by T_n: a layout's, or a slice.
        cu_labels: int32 (N + 1,), by U_n.
        first_nodes: int64 (N,), such as `node_offsets` gives.
        max_frames: At least every T_n. On a GPU the log-likelihood of a longer sequence is NaN.
        max_labels: At least every U_n, likewise.
        skewed: How nodes are laid out.
        in_place: Whether the results replace ``log_blank`` and ``log_label``.
        backend: Which to run.

    Returns:
        The log-likelihoods, float64 (N,), and the probabilities (nodes,) that a path takes the
        blank, and the label, of each node; zero where no path exists. What is no node of a sequence
        is not written.

    Raises:
        ValueError: An argument is not as above.
        BackendUnavailable: See `why_not`.
    """
    _check(backend, "log_blank", log_blank)
    occ_blank, occ_label = log_blank, log_label
    if not in_place:
        occ_blank, occ_label = torch.empty_like(log_blank), torch.empty_like(log_label)
    lengths = cu_frames, cu_labels, first_nodes, max_frames, max_labels
    total = torch.ops.effasr_c.transducer_lattice(
        log_blank, log_label, occ_blank, occ_label, *lengths, skewed
    )
    return total, occ_blank, occ_label


def transducer_log_likelihood(
    log_blank: Tensor,
    log_label: Tensor,
    cu_frames: Tensor,
    cu_labels: Tensor,
    first_nodes: Tensor,
    *,
    max_frames: int,
    max_labels: int,
    skewed: bool = False,
    backend: Extension,
) -> Tensor:
    """The first result of `transducer_occupancies`, for half the work."""
    _check(backend, "log_blank", log_blank)
    lengths = cu_frames, cu_labels, first_nodes, max_frames, max_labels
    return torch.ops.effasr_c.transducer_lattice(log_blank, log_label, None, None, *lengths, skewed)


def ctc_occupancies(
    scores: Tensor,
    log_normalizer: Tensor | None,
    targets: Tensor,
    cu_frames: Tensor,
    cu_targets: Tensor,
    *,
    max_frames: int,
    in_place: bool = False,
    backend: Extension,
) -> tuple[Tensor, Tensor]:
    """The log-likelihoods of transcripts over all their alignments, and the share of each class.

    Tables have a row for each frame: of the blank, in column 0, and of each label of its
    transcript; what lies to the right of those is neither read nor written.

    Args:
        scores: Logits, float32 (T, K + 1), where no transcript is longer than K.
        log_normalizer: Subtracted from each row of them, float32 (T,); 0 by default.
        targets: int32 or int64 (U,).
        cu_frames: int32 (N + 1,).
        cu_targets: int32 (N + 1,).
        max_frames: At least every T_n. On a GPU the log-likelihood of a longer sequence is NaN.
        in_place: Whether occupancies replace ``scores``.
        backend: Which to run.

    Returns:
        The log-likelihoods, float64 (N,), and the occupancies (T, K + 1), those of a label that a
        transcript repeats each by itself; zero where no alignment exists.

    Raises:
        ValueError: An argument is not as above.
        BackendUnavailable: See `why_not`.
    """
    _check(backend, "scores", scores)
    occupancies = scores if in_place else torch.empty_like(scores)
    total = torch.ops.effasr_c.ctc_lattice(
        scores, log_normalizer, occupancies, targets, cu_frames, cu_targets, max_frames
    )
    return total, occupancies


def ctc_log_likelihood(
    scores: Tensor,
    log_normalizer: Tensor | None,
    targets: Tensor,
    cu_frames: Tensor,
    cu_targets: Tensor,
    *,
    max_frames: int,
    backend: Extension,
) -> Tensor:
    """The first result of `ctc_occupancies`, for half the work."""
    _check(backend, "scores", scores)
    return torch.ops.effasr_c.ctc_lattice(
        scores, log_normalizer, None, targets, cu_frames, cu_targets, max_frames
    )


def _check(backend: Any, name: str, tensor: Tensor) -> None:
    reason = why_not(backend)
    if reason is not None:
        raise BackendUnavailable(f"lattice: {backend} cannot run ({reason}).")
    if tensor.device.type != _DEVICES[backend]:
        raise ValueError(
            f"lattice: `{name}` must be on a {_DEVICES[backend]} device for {backend}, "
            f"but is on {tensor.device}."
        )
