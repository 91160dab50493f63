"""Forward and backward of a micro-batch as one CUDA graph: recorded once, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from effasr.data.batch import Batch
from effasr_kernels.runtime.counters import graph_counters

_WARM_UPS = 3
"""Runs before the recording, in which libraries choose algorithms and allocate workspaces."""

UNSPLITTABLE_REASON = (
    "a micro-batch in a CUDA graph cannot be split: lower data.frame_budget, or set "
    "training.cuda_graph=false"
)
"""Why a recorded micro-batch cannot be computed in pieces."""

Outputs = tuple[Tensor, ...]
Run = Callable[[Batch, Tensor], Outputs]


class MicroBatchGraph:
    """Calls a function on batches of one static shape by replaying a recording of the first call.

    The function computes a forward and a backward: gradients accumulate in the ``grad`` of the
    parameters, which must stay at its address (``zero_grad(set_to_none=False)``). The function may
    neither synchronise with the host nor depend on a length that the host knows. Random numbers
    follow the seed of the device's generator at each replay.

    Args:
        run: Function to record: a batch on the device and the counts in, tensors out.
        device: A GPU.
        parameters: Parameters to whose gradients the function adds.
        buffers: Other tensors that the function changes, such as running means.
        capture: Records a function without running it; returns its replay and its outputs.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        parameters: Iterable[Tensor],
        buffers: Iterable[Tensor],
        capture: Callable[[Callable[[], Outputs]], tuple[Callable[[], Any], Outputs]] | None = None,
    ) -> None:
        self._run = run
        self._device = device
        self._parameters = list(parameters)
        self._buffers = list(buffers)
        self._capture = _capture if capture is None else capture
        self._replay: Callable[[], Any] | None = None

    def __call__(self, batch: Batch, counts: Tensor) -> Outputs:
        """Run the function on a batch, which may be on the host.

        Raises:
            ValueError: The batch has another shape than the first.
        """
        if self._replay is None:
            self._record(batch, counts)
        self._load(batch, counts)
        assert self._replay is not None
        self._replay()
        # The next replay overwrites the outputs of the recording.
        return tuple(output.clone() for output in self._outputs)

    def _record(self, batch: Batch, counts: Tensor) -> None:
        self._batch, self._counts = batch.to(self._device).rewritable(), counts.clone()
        kept = [buffer.clone() for buffer in self._buffers]
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._warm_up()
            for buffer, value in zip(self._buffers, kept, strict=True):
                buffer.copy_(value)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            self._replay, self._outputs = self._capture(self._on_static_inputs)

    def _on_static_inputs(self) -> Outputs:
        return self._run(self._batch, self._counts)

    def _warm_up(self) -> None:
        if self._device.type != "cuda":
            self._on_static_inputs()
            return
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                self._on_static_inputs()
        here.wait_stream(aside)

    def _load(self, batch: Batch, counts: Tensor) -> None:
        for own, new in zip(self._batch.tensors(), batch.tensors(), strict=True):
            if own.shape != new.shape:
                raise ValueError(
                    f"`batch` must have the static shape of the first, {tuple(own.shape)}, but has "
                    f"{tuple(new.shape)}: set training.cuda_graph=false."
                )
            own.copy_(new, non_blocking=True)
        self._counts.copy_(counts)


def _capture(run: Callable[[], Outputs]) -> tuple[Callable[[], Any], Outputs]:
    graph = torch.cuda.CUDAGraph()
    # Other threads meanwhile pin memory, copy checkpoints and watch NCCL, which would invalidate a
    # recording that covers all threads.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), graph_counters():
        outputs = run()
    return graph.replay, outputs
