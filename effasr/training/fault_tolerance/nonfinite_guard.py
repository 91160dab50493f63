"""Handles steps whose update was skipped because the loss or gradient was not finite."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from effasr.data.batch import Batch
from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.training.step import StepReport

_PATIENCE = 100  # Consecutive skipped updates after which ``skip`` ends the run as well

_HALVINGS = 30  # Steps in a row that may make a gradient in float16 infinite, as its scale falls


@dataclass(eq=False)
class NonFiniteGuard:
    """Ends the run at, or records, skipped updates. All ranks call it with the same steps."""

    _model: ASRModel
    _autocast: Callable[[], AbstractContextManager]
    _policy: Literal["stop", "skip"]
    _context: DistributedContext
    _note: Callable[[dict[str, Any]], None]
    is_scaled: bool = False  # whether the loss has a factor that may be too large

    def handle(self, reports: Sequence[StepReport], consecutive: int) -> None:
        for report in reports:
            line = self._describe(report)
            if self.is_scaled and line["reason"] == "gradient" and consecutive < _HALVINGS:
                continue
            if self._context.is_main:
                self._note(line)
            if self._policy == "stop":
                raise TrainingFailed(
                    f"step {line['step']}: the {line['reason']} is not finite; "
                    f"utterances: {_shorten(line['utterances'])}. The weights are unchanged. "
                    "Check these utterances, lower optimizer.lr, or set training.on_nan=skip."
                )
        if consecutive >= _PATIENCE:
            raise TrainingFailed(
                f"step {reports[-1].step + 1}: {_PATIENCE} steps in a row had a loss or gradient "
                "that is not finite: lower optimizer.lr, or check skipped.jsonl."
            )

    def _describe(self, report: StepReport) -> dict[str, Any]:
        """Return the utterances whose loss is not finite, or all if only the gradient is not."""
        present = [name for batch, _ in report.micro_batches for name in batch.ids]
        guilty = [
            name
            for batch, losses in report.micro_batches
            for name in self._nonfinite_utterances(batch, losses)
        ]
        everyone = self._context.all_gather((guilty, present))
        guilty = [name for names, _ in everyone for name in names]
        present = [name for _, names in everyone for name in names]
        return {
            "step": report.step + 1,
            "reason": "loss" if guilty else "gradient",
            "utterances": guilty or present,
        }

    @torch.no_grad()
    def _nonfinite_utterances(self, batch: Batch, losses: Tensor) -> list[str]:
        """Return the utterances of a micro-batch that cause non-finite losses.

        Batch norm in training spreads the NaN of one utterance to all, so the losses are computed
        again with the running statistics, which keep utterances apart.
        """
        suspects = _not_finite(batch, losses)
        if not suspects:
            return []
        self._model.eval()
        with self._autocast():
            apart = self._model(batch.to(self._context.device)).per_utterance
        self._model.train()
        return _not_finite(batch, apart) or suspects


@torch.no_grad()
def is_finite(model: nn.Module) -> bool:
    """Return whether all weights and buffers of a model are finite; of shards, this rank's."""
    tensors = (*model.parameters(), *model.buffers())
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    checks = [t.isfinite().all() for t in local if t.is_floating_point()]
    return not checks or bool(torch.stack(checks).all())


def _not_finite(batch: Batch, losses: Tensor) -> list[str]:
    verdicts = losses.isfinite().tolist()
    return [name for name, finite in zip(batch.ids, verdicts, strict=False) if not finite]


def _shorten(names: Sequence[str], most: int = 20) -> str:
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more (skipped.jsonl)"
