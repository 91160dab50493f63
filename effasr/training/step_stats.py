"""Numbers about a global step that the ranks add up, and how the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from effasr.data.batch import Batch
from effasr.data.sampling.cost import CostModel
from effasr.distributed.process_group import World
from effasr.training.flops import recomputed_work_of, work_of


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over micro-batches of one rank, or of all ranks.

    Attributes:
        targets: Targets that the cross-entropy counts.
        monotonic_targets: Those of transcriptions, by which CTC, the transducer and the penalty are
            divided.
        audio_seconds: Duration of the utterances.
        frames: Encoder frames of the utterances.
        frame_rows: Encoder rows computed, tails and padding included.
        tokens: Decoder tokens of the utterances.
        token_rows: Decoder rows computed, tails and padding included.
        stopping: How many ranks were asked to stop.
        useful_flops: What forward and backward of the utterances take; see
            `effasr.training.flops`.
        recomputed_flops: What activation checkpointing takes besides, padding included.
        work: FLOPs of each rank, padding included.
    """

    targets: float
    monotonic_targets: float
    audio_seconds: float
    frames: float
    frame_rows: float
    tokens: float
    token_rows: float
    stopping: float
    useful_flops: float
    recomputed_flops: float
    work: tuple[float, ...]

    @classmethod
    def of(
        cls,
        micro_batches: Sequence[Batch],
        world: World,
        stopping: bool,
        cost: CostModel,
        text_cost: CostModel | None = None,
        again: tuple[CostModel, CostModel | None] | None = None,
    ) -> Counts:
        """Count the micro-batches of this rank, each utterance by its cost to the model.

        Args:
            micro_batches: Their lengths are known on the host.
            world: The ranks.
            stopping: Whether this rank was asked to stop.
            cost: Of an utterance.
            text_cost: Of a text pair; None where there are none.
            again: Of both, what the backward computes again; None for nothing.
        """
        useful, work = work_of(micro_batches, cost, text_cost)
        return cls(
            targets=sum(batch.num_targets for batch in micro_batches),
            monotonic_targets=sum(batch.num_monotonic_targets for batch in micro_batches),
            audio_seconds=sum(batch.audio_seconds for batch in micro_batches),
            frames=sum(batch.num_frames for batch in micro_batches),
            frame_rows=sum(batch.frames.rows for batch in micro_batches),
            tokens=sum(batch.num_tokens for batch in micro_batches),
            token_rows=sum(batch.tokens.layout.rows for batch in micro_batches),
            stopping=stopping,
            useful_flops=useful,
            recomputed_flops=0.0 if again is None else recomputed_work_of(micro_batches, *again),
            work=tuple(work if rank == world.rank else 0.0 for rank in range(world.size)),
        )

    def tensor(self, device: torch.device) -> Tensor:
        """As float64 (10 + ranks,) on the device: exact for counts, and one tensor to add up."""
        values = [
            self.targets,
            self.monotonic_targets,
            self.audio_seconds,
            self.frames,
            self.frame_rows,
            self.tokens,
            self.token_rows,
            self.stopping,
            self.useful_flops,
            self.recomputed_flops,
            *self.work,
        ]
        host = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Counts:
        """The inverse of `tensor`, from its values on the host."""
        names = [field.name for field in fields(cls)][:-1]
        sums = dict(zip(names, values, strict=False))
        return cls(**sums, work=tuple(values[len(names) :]))

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
