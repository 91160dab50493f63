"""The CPU lattices of ``csrc/``: log-likelihoods over all paths, and occupancies of the steps.

These functions are parts of operations: callers scale the occupancies by the upstream gradient.
They call the library that `effasr_kernels.runtime.native` loads.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.runtime import native
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.runtime.native import check, pointer

_INT32_MAX = torch.iinfo(torch.int32).max


def _fields(pointers: str, numbers: str) -> list[tuple[str, Any]]:
    return [
        *((name, native.POINTER) for name in pointers.split()),
        *((name, native.INT32) for name in numbers.split()),
    ]


class _Transducer(ctypes.Structure):
    """TransducerLattice of csrc/lattice.h."""

    _fields_ = _fields(
        "log_blank log_label occ_blank occ_label log_likelihood cu_frames cu_labels first_nodes",
        "sequences",
    )


class _Ctc(ctypes.Structure):
    """CtcLattice of csrc/lattice.h."""

    _fields_ = _fields(
        "scores log_normalizer occupancies shares log_likelihood targets cu_frames cu_targets",
        "sequences columns wide_targets",
    )


class _Alignment(ctypes.Structure):
    """BestAlignment of csrc/lattice.h."""

    _fields_ = _fields("speech text chosen cu_frames cu_tokens", "sequences width")


def node_offsets(cu_frames: Tensor, cu_labels: Tensor) -> Tensor:
    """The first lattice node of each sequence, and the number of all nodes, int64 (N + 1,)."""
    nodes = cu_frames.diff().long() * (cu_labels.diff().long() + 1)
    return torch.cat([nodes.new_zeros(1), nodes.cumsum(0)])


def transducer(
    log_blank: Tensor,  # log-probability of the blank at each node, float32 (nodes,)
    log_label: Tensor,  # float32 (nodes,), log-probability of the next label; unread at u = U_n
    cu_frames: Tensor,  # int32 (N + 1,), with differences T_n; the first may differ from 0
    cu_labels: Tensor,  # offsets of the labels, int32 (N + 1,), with differences U_n
    first_nodes: Tensor,  # int64 (N,), for example from `node_offsets`
    occupancies: tuple[Tensor, Tensor] | None = None,  # (nodes,) each, written; maybe the inputs
) -> Tensor:
    """The log-likelihoods of packed sequences; without occupancies with half the work."""
    # Node (t, u) of sequence n is element ``first_nodes[n] + t (U_n + 1) + u`` of each tensor.
    # Returns float64 (N,). The occupancies are the probabilities that a path takes the blank and
    # the label at each node, as of `effasr_kernels.transducer_loss.lattice.occupancies`; zero if no
    # path exists. Elements that are not a node of a sequence are not written.
    op = "transducer_lattice"
    if log_blank.dim() != 1:
        raise wrong(op, "log_blank", "have shape (nodes,)", tuple(log_blank.shape))
    check(op, "log_blank", log_blank, torch.float32)
    check(op, "log_label", log_label, torch.float32, log_blank.shape)
    sequences = _check_offsets(op, "cu_frames", cu_frames)
    check(op, "cu_labels", cu_labels, torch.int32, cu_frames.shape)
    check(op, "first_nodes", first_nodes, torch.int64, (sequences,))
    frames, labels = _lengths(op, "cu_frames", cu_frames), _lengths(op, "cu_labels", cu_labels)
    counts = [t * (u + 1) for t, u in zip(frames, labels, strict=True)]
    _check_ranges(op, "first_nodes", first_nodes.tolist(), counts, log_blank.numel())
    total = log_blank.new_empty(sequences, dtype=torch.float64)
    tensors = log_blank, log_label, *(occupancies or (None, None)), total
    lattice = _Transducer(*map(pointer, (*tensors, cu_frames, cu_labels, first_nodes)), sequences)
    native.run(op, "transducer_lattice_cpu", lattice)
    return total


def ctc(
    scores: Tensor,  # logits, float32 (T, K + 1), where no transcript is longer than K
    log_normalizer: Tensor | None,  # float32 (T,), subtracted from each row of ``scores``
    targets: Tensor,  # labels, int32 or int64 (U,)
    cu_frames: Tensor,  # offsets of the frames, int32 (N + 1,)
    cu_targets: Tensor,  # offsets of the labels, int32 (N + 1,)
    occupancies: Tensor | None = None,  # (T, K + 1), written; maybe `scores`
) -> Tensor:
    """The log-likelihoods of transcripts over all alignments; alone with half the work."""
    # Tables have a row for each frame: the blank in column 0, then each label of the transcript.
    # Columns to the right of these are neither read nor written. Returns float64 (N,). The
    # occupancies have a column for each repetition of a label; zero if no alignment exists.
    op = "ctc_lattice"
    if scores.dim() != 2 or not 0 < scores.shape[1] < _INT32_MAX:
        rule = "have shape (T, K + 1), with K + 1 below 2**31 - 1"
        raise wrong(op, "scores", rule, tuple(scores.shape))
    check(op, "scores", scores, torch.float32)
    if log_normalizer is not None:
        check(op, "log_normalizer", log_normalizer, torch.float32, scores.shape[:1])
    is_wide = targets.dtype != torch.int32
    check(op, "targets", targets, torch.int64 if is_wide else torch.int32)
    sequences = _check_offsets(op, "cu_frames", cu_frames)
    check(op, "cu_targets", cu_targets, torch.int32, cu_frames.shape)
    frames, labels = _lengths(op, "cu_frames", cu_frames), _lengths(op, "cu_targets", cu_targets)
    _check_ranges(op, "cu_frames", cu_frames.tolist(), frames, scores.shape[0])
    _check_ranges(op, "cu_targets", cu_targets.tolist(), labels, targets.numel())
    if labels and max(labels) >= scores.shape[1]:
        rule = f"have more columns than the {max(labels)} labels of the longest transcript"
        raise wrong(op, "scores", rule, tuple(scores.shape))
    total = scores.new_empty(sequences, dtype=torch.float64)
    shares = None if occupancies is None else torch.empty_like(scores)
    tensors = scores, log_normalizer, occupancies, shares, total, targets, cu_frames, cu_targets
    lattice = _Ctc(*map(pointer, tensors), sequences, scores.shape[1], is_wide)
    native.run(op, "ctc_lattice_cpu", lattice)
    return total


def best_alignment(
    speech: Tensor,  # float32 (T, C)
    text: Tensor,  # float32 (U, C)
    cu_frames: Tensor,  # offsets of the frames, int32 (N + 1,)
    cu_tokens: Tensor,  # offsets of the tokens, int32 (N + 1,)
    chosen: Tensor,  # int64, written: the row of ``text`` of each frame; -1 without tokens
) -> None:
    op = "best_alignment"
    check(op, "speech", speech, torch.float32)
    check(op, "text", text, torch.float32, (len(text), speech.shape[1]))
    sequences = _check_offsets(op, "cu_frames", cu_frames)
    check(op, "cu_tokens", cu_tokens, torch.int32, cu_frames.shape)
    frames, tokens = _lengths(op, "cu_frames", cu_frames), _lengths(op, "cu_tokens", cu_tokens)
    _check_ranges(op, "cu_frames", cu_frames.tolist(), frames, min(len(speech), len(chosen)))
    _check_ranges(op, "cu_tokens", cu_tokens.tolist(), tokens, len(text))
    check(op, "chosen", chosen, torch.int64)
    tensors = speech, text, chosen, cu_frames, cu_tokens
    lattice = _Alignment(*map(pointer, tensors), sequences, speech.shape[1])
    native.run(op, "best_alignment_cpu", lattice)


def _check_offsets(op: str, name: str, offsets: Tensor) -> int:
    """Check the dtype and shape of offsets, and return the number of sequences."""
    if offsets.dim() != 1 or not offsets.numel():
        raise wrong(op, name, "have shape (N + 1,)", tuple(offsets.shape))
    check(op, name, offsets, torch.int32)
    return offsets.numel() - 1


def _lengths(op: str, name: str, offsets: Tensor) -> list[int]:
    lengths = offsets.diff().tolist()
    if lengths and min(lengths) < 0:
        raise wrong(op, name, "not fall", offsets.tolist())
    return lengths


def _check_ranges(op: str, name: str, begins: list[int], lengths: list[int], rows: int) -> None:
    for begin, length in zip(begins, lengths, strict=False):
        if begin < 0 or begin + length > rows:
            rule = f"have ranges within the {rows} elements"
            raise wrong(op, name, rule, f"one with the range {begin} to {begin + length}")
