"""Counters of the programs of a launch; see `effasr_kernels.shared.last_program`.

The last program of a launch leaves zeros, so that launches which follow each other share counters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MINIMUM = 4_096
"""Counters that are kept for a stream, at least: 16 kB."""

_ByStream = dict[tuple[torch.device, int], Tensor]
"""Counters by device and stream."""

_EAGER: _ByStream = {}
_OF_GRAPHS: dict[tuple[torch.device, int], _ByStream] = {}
"""The counters of the graph that is being recorded, by the device and the stream of the graph."""


def program_counters(like: Tensor, groups: int) -> Tensor:
    """The counters of `is_last_program` for one launch on the current stream: zeros, int32."""
    # Launches on one stream follow each other, so they share counters that are kept. A CUDA graph
    # has its own, because it may be replayed beside other launches, and its memory ends with it.
    # They are set to zero by a node of the graph: one for each launch, or one for all inside
    # `graph_counters`.
    device = like.device
    if device.type != "cuda":
        return _zeros(groups, device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    by_stream = _EAGER
    if torch.cuda.is_current_stream_capturing():
        if key not in _OF_GRAPHS:
            return _zeros(groups, device)
        by_stream = _OF_GRAPHS[key]
    counters = by_stream.get(key)
    if counters is None or counters.numel() < groups:
        counters = by_stream[key] = _zeros(max(groups, _MINIMUM), device)
    return counters


@contextmanager
def graph_counters() -> Iterator[None]:
    """Let all launches of a CUDA graph share counters; open it inside of the recording."""
    # This is for launches on the current stream, from any thread, such as the thread of a
    # backward: the graph runs them one after the other. Those on other streams of the graph have
    # separate counters. Each replay begins with zeros, whatever the one before it has left.
    device = torch.device("cuda", torch.cuda.current_device())
    key = device, torch.cuda.current_stream(device).cuda_stream
    _OF_GRAPHS[key] = {}
    try:
        yield
    finally:
        del _OF_GRAPHS[key]


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
