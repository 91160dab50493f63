"""The compiled lattices of ``csrc/``: sums over all paths, and the share of each step in them.

They are helpers of operations, not operations: scaling by a gradient is the caller's. They run on
CPUs, and come with `effasr_kernels._C`, which is built on request (``csrc/README.md``).
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from effasr_kernels.runtime.dispatch import BackendUnavailable


@functools.cache
def unsupported_reason() -> str | None:
    """The reason for which the extension cannot run on this installation, or None."""
    try:
        importlib.import_module("effasr_kernels._C")
    except ImportError as error:
        return f"effasr_kernels._C cannot be imported: {error}"
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
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `effasr_kernels.transducer_loss.lattice.occupancies` gives, of packed sequences.

    Node (t, u) of sequence n is element ``first_nodes[n] + t (U_n + 1) + u`` of each plane.

    Args:
        log_blank: Log-probability to go to the next frame, float32 (nodes,).
        log_label: To emit the next label, float32 (nodes,); where u = U_n it is not read.
        cu_frames: int32 (N + 1,), of which neighbours differ by T_n: a layout's, or a slice.
        cu_labels: int32 (N + 1,), by U_n.
        first_nodes: int64 (N,), such as `node_offsets` gives.
        in_place: Whether the results replace ``log_blank`` and ``log_label``.

    Returns:
        The log-likelihoods, float64 (N,), and the probabilities (nodes,) that a path takes the
        blank, and the label, of each node; zero where no path exists. What is no node of a sequence
        is not written.

    Raises:
        ValueError: An argument is not as above.
        BackendUnavailable: The extension is not built; see `unsupported_reason`.
    """
    _check("log_blank", log_blank)
    occ_blank, occ_label = log_blank, log_label
    if not in_place:
        occ_blank, occ_label = torch.empty_like(log_blank), torch.empty_like(log_label)
    total = torch.ops.effasr_c.transducer_lattice(
        log_blank, log_label, occ_blank, occ_label, cu_frames, cu_labels, first_nodes
    )
    return total, occ_blank, occ_label


def transducer_log_likelihood(
    log_blank: Tensor,
    log_label: Tensor,
    cu_frames: Tensor,
    cu_labels: Tensor,
    first_nodes: Tensor,
) -> Tensor:
    """The first result of `transducer_occupancies`, for half the work."""
    _check("log_blank", log_blank)
    return torch.ops.effasr_c.transducer_lattice(
        log_blank, log_label, None, None, cu_frames, cu_labels, first_nodes
    )


def ctc_occupancies(
    scores: Tensor,
    log_normalizer: Tensor | None,
    targets: Tensor,
    cu_frames: Tensor,
    cu_targets: Tensor,
    *,
    in_place: bool = False,
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
        in_place: Whether occupancies replace ``scores``.

    Returns:
        The log-likelihoods, float64 (N,), and the occupancies (T, K + 1), those of a label that a
        transcript repeats each by itself; zero where no alignment exists.

    Raises:
        ValueError: An argument is not as above.
        BackendUnavailable: The extension is not built; see `unsupported_reason`.
    """
    _check("scores", scores)
    occupancies = scores if in_place else torch.empty_like(scores)
    total = torch.ops.effasr_c.ctc_lattice(
        scores, log_normalizer, occupancies, targets, cu_frames, cu_targets
    )
    return total, occupancies


def ctc_log_likelihood(
    scores: Tensor,
    log_normalizer: Tensor | None,
    targets: Tensor,
    cu_frames: Tensor,
    cu_targets: Tensor,
) -> Tensor:
    """The first result of `ctc_occupancies`, for half the work."""
    _check("scores", scores)
    return torch.ops.effasr_c.ctc_lattice(
        scores, log_normalizer, None, targets, cu_frames, cu_targets
    )


def _check(name: str, tensor: Tensor) -> None:
    reason = unsupported_reason()
    if reason is not None:
        raise BackendUnavailable(f"lattice: the extension cannot run ({reason}).")
    if not tensor.is_cpu:
        raise ValueError(f"lattice: `{name}` must be on a CPU, but is on {tensor.device}.")
