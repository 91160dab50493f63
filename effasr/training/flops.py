"""Model FLOPs utilisation (MFU) and hardware FLOPs utilisation (HFU) of a step."""

from collections.abc import Sequence

import numpy as np
import torch

from effasr.data.batch import Batch
from effasr.data.sampling.cost import CostModel

FORWARD_AND_BACKWARD = 3
"""The backward has two matrix products for each of the forward."""

_PEAKS: tuple[tuple[str, float | None], ...] = (
    # A part of a GPU, and one whose peak is not that of its namesake.
    ("MIG", None),
    ("H200 NVL", None),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L4", 121e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
    ("T4", 65e12),
)
"""Dense bfloat16 FLOP/s of NVIDIA's data sheets (float16 before Ampere); first match counts.

https://www.nvidia.com/en-us/data-center/
"""


def peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a GPU without sparsity; None for a CPU or an unknown GPU."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Return the same by the name of a GPU, such as ``NVIDIA H200``."""
    words = name.replace("-", " ").split()
    for model, flops in _PEAKS:
        if all(word in words for word in model.split()):
            return flops
    return None


def work_of(
    batches: Sequence[Batch], cost: CostModel, text_cost: CostModel | None = None
) -> tuple[float, float]:
    """Return the FLOPs of a training step on these micro-batches: useful ones, and computed ones.

    Useful FLOPs are those of the utterances at their own lengths. Computed ones include padding:
    rows without an utterance, which attend to nothing, or the silence by which utterances are
    extended. ``text_cost`` is that of a text pair, for text-only micro-batches.
    """
    speech_cost, useful, computed = cost, 0.0, 0.0
    for batch in batches:
        cost = speech_cost
        if batch.source is not None:
            if text_cost is None:
                raise ValueError("`text_cost` must be given for text-only batches, but is None.")
            cost = text_cost
        frames, tokens = _lengths(batch.frames.lengths), _lengths(batch.tokens.layout.lengths)
        computed += _sum(cost, frames, tokens)
        computed += cost.frame * (batch.frames.rows - int(frames.sum()))
        computed += cost.token * (batch.tokens.layout.rows - int(tokens.sum()))
        useful += _sum(cost, _lengths(batch.frame_lengths), _lengths(batch.token_lengths))
    return FORWARD_AND_BACKWARD * useful, FORWARD_AND_BACKWARD * computed


def recomputed_work_of(
    batches: Sequence[Batch], cost: CostModel, text_cost: CostModel | None = None
) -> float:
    """Return the FLOPs that the backward recomputes, padding included."""
    return work_of(batches, cost, text_cost)[1] / FORWARD_AND_BACKWARD


def _lengths(lengths: Sequence[int]) -> np.ndarray:
    return np.asarray(lengths, dtype=np.int64)


def _sum(cost: CostModel, frames: np.ndarray, tokens: np.ndarray) -> float:
    return float(cost.of(frames, tokens).sum(dtype=np.float64))
