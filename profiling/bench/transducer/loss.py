"""Benchmarks of the transducer's joint, projection and loss against other implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import torch
from torch.utils.flop_counter import flop_registry

import effasr_kernels as kernels
from bench.contender import Case, Contender
from bench.transducer import packages
from bench.transducer import torch_losses as torchs
from bench.transducer.batch import Batch, draw
from bench.workload import Workload
from effasr_kernels.transducer_loss import OPERATION, TransducerArguments

_JUDGED = [60, 41, 7], [12, 5, 3]
"""Frames and labels of the utterances on which results of large batches are compared."""
_SUBSAMPLED = {"8x": 12.5, "4x": 25.0}
"""Frames a second."""
_SECONDS, _LABELS = 40.0, 200
_REFERENCE_FRAMES = 1_000
DURATIONS = (0, 1, 2, 3, 4)
"""Durations of Parakeet TDT."""
DEFAULTS = {
    **{"activation": "relu", "fastemit": 0.0, "durations": None, "sigma": 0.0},
    "overwritten": (),
}
"""Default arguments of the operation, for calls that bypass its public function."""


def cases(workload: Workload) -> list[Case]:
    """Return cases with utterances as long as the others'; the joint has the model's width."""
    frames, labels = workload.lengths
    joint, classes = workload.width, workload.widths.pieces
    shape = f"{workload.describe()} J={joint} V={classes}"
    found = []
    for kind, durations in (("", ()), ("tdt", DURATIONS)):
        make = partial(draw, workload, joint=joint, classes=classes, durations=durations)
        small = None if sum(frames) <= _REFERENCE_FRAMES else partial(make, *_JUDGED)
        peers = TDT_PEERS if durations else PEERS
        found.append(_case(kind, shape, partial(make, frames, labels), small, peers))
    return found


def large(workload: Workload) -> Iterator[Case]:
    """Yield the batch of the published mark, 1,024 utterances of 40 s; tiny on a CPU."""
    gpu = workload.device.type == "cuda"
    size, joint, labels = (1024, 640, _LABELS) if gpu else (4, 8, 5)
    for classes in (1024, 4096) if gpu else (16, 32):
        for name, rate in _SUBSAMPLED.items():
            frames = round(_SECONDS * rate) if gpu else round(rate)
            shape = f"B={size} T={frames} U={labels} J={joint} V={classes}"
            make = partial(draw, workload, joint=joint, classes=classes)
            lengths = [frames] * size, [labels] * size
            small = partial(make, *_JUDGED)
            yield _case(f"large {name}", shape, partial(make, *lengths), small, PEERS)


def _case(
    kind: str,
    shape: str,
    make: Callable[[], Batch],
    small: Callable[[], Batch] | None,
    peers: Mapping[str, Callable[[Batch], Contender]],
) -> Case:
    """Return a case whose batch is drawn when somebody computes it."""
    batch = cache(make)

    def ours(backend: str) -> Contender:
        leaves = batch().leaves
        encoded, predicted, weight, bias = leaves.values()
        return Contender(
            leaves,
            lambda: kernels.transducer_loss(
                *(encoded, predicted, batch().targets, batch().frames, batch().labels),
                *(weight, bias),
                blank_id=batch().blank_id,
                durations=batch().durations or None,
                backend=backend,
            ),
            [batch().upstream],
        )

    return Case(
        op="transducer_loss",
        kind=kind,
        shape=shape,
        ours=ours,
        peers={name: partial(_make, peer, batch) for name, peer in peers.items()},
        small=None if small is None else _case(kind, "small", small, None, peers),
        flops=lambda: count(batch()),
        heavy=kind.startswith("large"),
    )


def _make(peer: Callable[[Batch], Contender], batch: Callable[[], Batch]) -> Contender:
    return peer(batch())


def count(batch: Batch) -> int:
    """Return the registered FLOPs of the forward; nothing is computed."""
    layouts = batch.frames, batch.labels
    arguments = TransducerArguments(
        *(batch.encoded, batch.predicted, batch.targets, *layouts, batch.weight, batch.bias),
        blank_id=batch.blank_id,
        **(DEFAULTS | {"durations": batch.durations or None}),
    )
    flat = OPERATION.flatten(arguments)
    return flop_registry[torch.ops.effasr.transducer_loss](*flat)


def _tile_rows(batch: Batch) -> int:
    return 200_000 if batch.encoded.is_cuda else 50


def _sub_batch(batch: Batch) -> int:
    return 16 if batch.encoded.is_cuda else 2


PEERS: dict[str, Callable[[Batch], Contender]] = {
    "FlashRNNT's way, in torch": lambda batch: torchs.chunked(batch, _tile_rows(batch)),
    "NeMo's way, torch": lambda batch: torchs.padded(batch, torchs.merged, size=_sub_batch(batch)),
    "NeMo's way, warprnnt_numba": lambda batch: packages.numba(batch, _sub_batch(batch)),
    "apex packed float16": lambda batch: packages.apex(batch, torch.float16),
    "apex packed float32": lambda batch: packages.apex(batch, torch.float32),
    "warp_rnnt compact": packages.warp_rnnt_compact,
    "warp_rnnt gather": packages.warp_rnnt,
    "torchaudio float16": lambda batch: packages.torchaudio(batch, torch.float16),
    "torchaudio float32": lambda batch: packages.torchaudio(batch, torch.float32),
    "transformers float32": packages.transformers,
    "torch dense": lambda batch: torchs.padded(batch, torchs.plain),
    "k2 pruned (approximate)": lambda batch: packages.pruned(batch, "k2"),
    "fast_rnnt pruned (approximate)": lambda batch: packages.pruned(batch, "fast_rnnt"),
}
"""Peers in order: those that fit into memory before those that may not."""
TDT_PEERS: dict[str, Callable[[Batch], Contender]] = {
    "transformers dense": packages.transformers_tdt,
}
"""Peers for a transducer with durations."""
OWN = {"FlashRNNT's way, in torch", "NeMo's way, torch", "torch dense"}
"""Implementations that need no package."""
