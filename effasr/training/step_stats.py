"""Statistics of a global step that are summed over the ranks, and their copies to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from effasr.data.batch import Batch
from effasr.data.sampling.cost import CostModel
from effasr.distributed.process_group import DistributedContext
from effasr.training.flops import recomputed_work_of, work_of


@dataclass(frozen=True, slots=True)
class StepCosts:
    """FLOPs of an utterance, as `effasr.model.learning_cost` counts them."""

    speech: CostModel
    text: CostModel | None = None
    # What activation checkpointing recomputes, of speech and of text pairs.
    recomputed: tuple[CostModel, CostModel | None] | None = None


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Sums over micro-batches of one rank, or of all ranks; "rows" include padding."""

    targets: float
    # Those of transcriptions, by which CTC, the transducer and the penalty are divided.
    monotonic_targets: float
    audio_seconds: float
    frames: float
    frame_rows: float
    tokens: float
    token_rows: float
    # Number of ranks that were asked to stop.
    stopping: float
    # Intervals in time that are over, as a sum of powers of two, by rank 0's clock.
    due: float
    # Of forward and backward without padding.
    useful_flops: float
    recomputed_flops: float
    # FLOPs of each rank, padding included.
    work: tuple[float, ...]

    @classmethod
    def from_batches(
        cls,
        micro_batches: Sequence[Batch],
        context: DistributedContext,
        stopping: bool,
        costs: StepCosts,
        due: int = 0,
    ) -> "StepCounts":
        useful, work = work_of(micro_batches, costs.speech, costs.text)
        recomputed = costs.recomputed
        return cls(
            targets=sum(batch.num_targets for batch in micro_batches),
            monotonic_targets=sum(batch.num_monotonic_targets for batch in micro_batches),
            audio_seconds=sum(batch.audio_seconds for batch in micro_batches),
            frames=sum(batch.num_frames for batch in micro_batches),
            frame_rows=sum(batch.frames.rows for batch in micro_batches),
            tokens=sum(batch.num_tokens for batch in micro_batches),
            token_rows=sum(batch.tokens.layout.rows for batch in micro_batches),
            stopping=stopping,
            due=due,
            useful_flops=useful,
            recomputed_flops=recomputed_work_of(micro_batches, *recomputed) if recomputed else 0.0,
            work=tuple(work if rank == context.rank else 0.0 for rank in range(context.size)),
        )

    def tensor(self, device: torch.device, labelled: Tensor | None = None) -> Tensor:
        """Return float64 (11 + ranks,) on the device: exact, and one all-reduce.

        ``labelled``, float64 (), are more ``monotonic_targets``, of which only the device knows.
        """
        values = [getattr(self, name) for name in _SCALARS]
        host = torch.tensor(
            [*values, *self.work], dtype=torch.float64, pin_memory=device.type == "cuda"
        )
        counts = host.to(device, non_blocking=True)
        if labelled is not None:
            counts[_SCALARS.index("monotonic_targets")] += labelled
        return counts

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "StepCounts":
        """Return the inverse of `tensor`, from its values on the host."""
        count = len(_SCALARS)
        return cls(*values[:count], work=tuple(values[count:]))

    @staticmethod
    def targets_of(totals: Tensor) -> Tensor:
        """Return `targets` and `monotonic_targets` in a `tensor`, (2,), still on the device."""
        return totals[:2]

    @property
    def rank_imbalance(self) -> float:
        """Excess of the rank with the most work over the mean, as a fraction of the mean."""
        mean = sum(self.work) / len(self.work)
        return max(self.work) / mean - 1 if mean else 0.0


_SCALARS = [field.name for field in fields(StepCounts)][:-1]


class HostCopy:
    """An asynchronous copy of a small tensor; reading waits for the work queued before it only."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.is_cuda
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
