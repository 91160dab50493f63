"""Transducer losses of packages, each used where it is installed; a reason is raised where not."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.contender import Contender, leaf
from bench.transducer.batch import Batch, Padded
from bench.transducer.torch_losses import Part, padded

_PRUNED_STATES = 5
_SIMPLE_SCALE, _LM_ONLY_SCALE = 0.5, 0.25


def nvidia_apex() -> Any:
    """Return the module ``apex.contrib.transducer``.

    Raises:
        ImportError: It is not there, or what is called apex is another package.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None:
        raise ImportError("no package apex: NVIDIA's is built from source, with APEX_TRANSDUCER=1")
    # Not imported before it is known to be the right one: the other does much when imported.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "contrib").is_dir() for folder in folders):
        raise ImportError(
            "the installed apex is not NVIDIA's, but the unrelated package of that name on PyPI: "
            "it has no apex.contrib"
        )
    try:
        return importlib.import_module("apex.contrib.transducer")
    except ImportError as reason:
        text = f"NVIDIA's apex was built without APEX_TRANSDUCER=1 ({reason})"
        raise ImportError(text) from reason


def apex(batch: Batch, dtype: torch.dtype) -> Contender:
    """NVIDIA's joint and loss, packed; float16 or float32, and its losses are of that dtype."""
    module = nvidia_apex()
    _need_gpu(batch, "apex")
    whole = Padded(batch, dtype)
    joint = module.TransducerJoint(pack_output=True, relu=True)
    loss = module.TransducerLoss(packed_input=True)
    frames, labels, targets = whole.frame_counts, whole.label_counts, whole.targets.int()
    offsets = batch.nodes.first[1:]

    def call() -> Tensor:
        f, g, weight, bias = whole.leaves.values()
        hidden = joint(
            f, g, frames, labels + 1, batch_offset=offsets, packed_batch=batch.nodes.count
        )
        logits = F.linear(hidden, weight, bias)
        longest = batch.frames.max_seqlen
        return loss(
            *(logits, targets, frames, labels, batch.blank_id),
            batch_offset=offsets,
            max_f_len=longest,
        ).float()

    return Contender(whole.leaves, call, [batch.upstream], whole.packed)


def torchaudio(batch: Batch, dtype: torch.dtype) -> Contender:
    """Return torchaudio's loss of all logits, padded; float16 or float32.

    Raises:
        ValueError: There are more logits than its 32-bit offsets reach.
    """
    from torchaudio.functional import rnnt_loss  # pyright: ignore[reportMissingImports]

    if batch.padded_logits >= 2**31:
        raise ValueError(f"{batch.padded_logits} logits, but its offsets have 32 bits")

    def loss(logits: Tensor, part: Part) -> Tensor:
        lengths = part.frame_counts, part.label_counts
        return rnnt_loss(
            *(logits, part.targets.int(), *lengths), blank=part.blank_id, reduction="none"
        )

    return padded(batch, loss, dtype=dtype)


def transformers(batch: Batch) -> Contender:
    """Hugging Face's RNN-T loss, which casts all logits to float32 for that of torchaudio."""
    from transformers.loss.loss_rnnt import rnnt_loss

    def loss(logits: Tensor, part: Part) -> Tensor:
        lengths = part.frame_counts, part.label_counts
        return rnnt_loss(logits, part.targets, *lengths, part.blank_id, reduction="none")

    return padded(batch, loss)


def transformers_tdt(batch: Batch) -> Contender:
    """Hugging Face's TDT loss: in torch, one diagonal of the lattice after the other."""
    from transformers.loss.loss_tdt import tdt_loss

    classes, durations = batch.blank_id + 1, list(batch.durations)

    def loss(logits: Tensor, part: Part) -> Tensor:
        return tdt_loss(
            *logits.split([classes, len(durations)], -1),
            targets=part.targets,
            logit_lengths=part.frame_counts.long(),
            target_lengths=part.label_counts.long(),
            blank_token_id=part.blank_id,
            durations=durations,
            reduction="none",
        )

    return padded(batch, loss)


def numba(batch: Batch, size: int) -> Contender:
    """NeMo's loop with NeMo's own loss, which is also a package by itself; float32 logits."""
    from warprnnt_numba import RNNTLossNumba  # pyright: ignore[reportMissingImports]

    module = RNNTLossNumba(blank=batch.blank_id, reduction="none")

    def loss(logits: Tensor, part: Part) -> Tensor:
        return module(logits.float(), part.targets.int(), part.frame_counts, part.label_counts)

    return padded(batch, loss, size=size)


def warp_rnnt(batch: Batch) -> Contender:
    """Padded float32 log-probabilities, of which it gathers blank and label."""
    from warp_rnnt import rnnt_loss  # pyright: ignore[reportMissingImports]

    def loss(logits: Tensor, part: Part) -> Tensor:
        log_probs = logits.log_softmax(-1, dtype=torch.float32)
        lengths = part.frame_counts, part.label_counts
        return rnnt_loss(
            *(log_probs, part.targets.int(), *lengths), blank=part.blank_id, gather=True
        )

    return padded(batch, loss)


def warp_rnnt_compact(batch: Batch) -> Contender:
    """Packed float32 log-probabilities."""
    from warp_rnnt import rnnt_loss  # pyright: ignore[reportMissingImports]

    _need_gpu(batch, "warp_rnnt")
    leaves, nodes = {name: leaf(x) for name, x in batch.leaves.items()}, batch.nodes
    sequence, frame, state = nodes.places(0, nodes.count)
    frame += batch.frames.cu_seqlens.long()[sequence]
    state += batch.labels.lengthened(1).cu_seqlens.long()[sequence]
    lengths = [layout.cu_seqlens.diff() for layout in (batch.frames, batch.labels)]
    targets = batch.targets.int()

    def call() -> Tensor:
        f, g, weight, bias = leaves.values()
        hidden = (f.index_select(0, frame) + g.index_select(0, state)).relu_()
        log_probs = F.linear(hidden, weight, bias).log_softmax(-1, dtype=torch.float32)
        return rnnt_loss(log_probs, targets, *lengths, blank=batch.blank_id, compact=True)

    return Contender(leaves, call, [batch.upstream])


def pruned(batch: Batch, name: str) -> Contender:
    """k2 or fast_rnnt as icefall uses it: a simple loss says which states matter for each frame.

    The joint is computed for those alone, so the value is another one, and so is the work.
    """
    module = importlib.import_module(name)
    whole = Padded(batch)
    # Two projections more, by which frames and states are scored apart.
    simple = {f"simple {side}": leaf(batch.weight) for side in ("frames", "states")}
    ends = [batch.labels.cu_seqlens.diff(), batch.frames.cu_seqlens.diff()]
    zero = torch.zeros_like(ends[0])
    shared: dict[str, Any] = {
        "symbols": whole.targets,
        "termination_symbol": batch.blank_id,
        "boundary": torch.stack([zero, zero, *ends], 1).long(),
        "reduction": "none",
    }

    def call() -> Tensor:
        f, g, weight, bias = whole.leaves.values()
        am, lm = (F.linear(x, w).float() for x, w in zip((f, g), simple.values(), strict=True))
        coarse, (px_grad, py_grad) = module.rnnt_loss_smoothed(
            lm=lm,
            am=am,
            lm_only_scale=_LM_ONLY_SCALE,
            am_only_scale=0.0,
            return_grad=True,
            **shared,
        )
        ranges = module.get_rnnt_prune_ranges(
            px_grad=px_grad, py_grad=py_grad, boundary=shared["boundary"], s_range=_PRUNED_STATES
        )
        kept = module.do_rnnt_pruning(am=f, lm=g, ranges=ranges)
        logits = F.linear((kept[0] + kept[1]).relu(), weight, bias).float()
        fine = module.rnnt_loss_pruned(logits=logits, ranges=ranges, **shared)
        return _SIMPLE_SCALE * coarse + fine

    leaves = whole.leaves | simple
    return Contender(leaves, call, [batch.upstream], whole.packed, exact=False)


def _need_gpu(batch: Batch, name: str) -> None:
    if not batch.encoded.is_cuda:
        raise RuntimeError(f"{name} needs a GPU")
