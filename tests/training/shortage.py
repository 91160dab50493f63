"""Memory that runs out on demand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from effasr.data.batch import Batch
from effasr.model.asr import ASRModel

CPU_ERROR = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def torch_error() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@contextmanager
def shortage(model: ASRModel, *calls: int, where: str, error=torch_error) -> Iterator[list[Batch]]:
    """Let the forward or the backward of some calls of the model fail, counted from 0.

    The forward fails after the statistics of batch norms have changed; the backward fails after
    the decoder's gradients, and a part of the encoder's, have been added.
    """
    seen: list[Batch] = []
    forward = model.forward

    def watched(batch: Batch, **options: Any):
        seen.append(batch)
        if len(seen) - 1 not in calls:
            return forward(batch, **options)
        if where == "forward":
            forward(batch, **options)
            raise error()
        break_off = fail_in_backward(model, error)
        try:
            return forward(batch, **options)
        finally:
            break_off.remove()

    model.forward = watched
    try:
        yield seen
    finally:
        del model.forward


def fail_in_backward(model: ASRModel, error):
    """Fail where the gradient comes to the encoder's first layer."""

    def arrived(gradient: torch.Tensor):
        raise error()

    def note(module: torch.nn.Module, inputs: Any, output: torch.Tensor):
        output.register_hook(arrived)

    return model.encoder.layers[0].register_forward_hook(note)
