"""Numbers about a global step that the ranks add up, and how the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.data.batch import Batch
from effasr.distributed.process_group import World


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over micro-batches of one rank, or of all ranks.

    Attributes:
        targets: Targets that the cross-entropy counts.
        monotonic_targets: Those of transcriptions, by which CTC, the transducer and the penalty are
            divided.
        audio_seconds: Duration of the utterances.
        frames: Encoder frames of the utterances.
        frame_rows: Encoder rows computed, the tails included.
        tokens: Decoder tokens of the utterances.
        token_rows: Decoder rows computed, the tails included.
        stopping: How many ranks were asked to stop.
        work: Frames of each rank.
    """

    targets: float
    monotonic_targets: float
    audio_seconds: float
    frames: float
    frame_rows: float
    tokens: float
    token_rows: float
    stopping: float
    work: tuple[float, ...]

    @classmethod
    def of(cls, micro_batches: Sequence[Batch], world: World, stopping: bool) -> Counts:
        """Count the micro-batches of this rank."""
        frames = float(sum(batch.frames.total for batch in micro_batches))
        return cls(
            targets=sum(batch.num_targets for batch in micro_batches),
            monotonic_targets=sum(batch.num_monotonic_targets for batch in micro_batches),
            audio_seconds=sum(batch.audio_seconds for batch in micro_batches),
            frames=frames,
            frame_rows=sum(batch.frames.rows for batch in micro_batches),
            tokens=sum(batch.tokens.layout.total for batch in micro_batches),
            token_rows=sum(batch.tokens.layout.rows for batch in micro_batches),
            stopping=stopping,
            work=tuple(frames if rank == world.rank else 0.0 for rank in range(world.size)),
        )

    def tensor(self, device: torch.device) -> Tensor:
        """As float64 (8 + ranks,) on the device: exact for counts, and one tensor to add up."""
        values = [
            self.targets,
            self.monotonic_targets,
            self.audio_seconds,
            self.frames,
            self.frame_rows,
            self.tokens,
            self.token_rows,
            self.stopping,
            *self.work,
        ]
        host = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Counts:
        """The inverse of `tensor`, from its values on the host."""
        targets, monotonic, seconds, frames, frame_rows, tokens, token_rows, stopping = values[:8]
        return cls(
            targets,
            monotonic,
            seconds,
            frames,
            frame_rows,
            tokens,
            token_rows,
            stopping,
            tuple(values[8:]),
        )

    @staticmethod
    def targets_of(totals: Tensor) -> tuple[Tensor, Tensor]:
        """The two counts of targets in a `tensor`, each (), still on the device."""
        return totals[0], totals[1]

    @property
    def rank_imbalance(self) -> float:
        """By how much the rank with most work exceeds the mean, as a part of the mean."""
        mean = sum(self.work) / len(self.work)
        return max(self.work) / mean - 1 if mean else 0.0


class HostCopy:
    """A small tensor on its way to the host, asked for where it was computed.

    Reading it waits for what was queued before the copy, not for what was queued since.

    Args:
        tensor: Any shape, on any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.is_cuda
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """The values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
