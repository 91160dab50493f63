from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from effasr.decoding.continuous_batching.engine import Readback, StepGraph
from effasr.training.cuda_graph import MicroBatchGraph
from effasr_kernels.runtime import counters


def test_a_step_is_recorded_once_and_replayed() -> None:
    state, recorded = torch.zeros(3), []

    def step() -> torch.Tensor:
        return state.add_(1) * 10

    def capture(run):
        recorded.append(run)
        output = torch.empty(3)
        return lambda: output.copy_(run()), output

    graph = StepGraph(step, capture)
    assert graph().tolist() == [10.0] * 3
    assert graph().tolist() == [20.0] * 3
    assert recorded == [step]
    assert state.tolist() == [2.0] * 3


def test_results_come_in_order_and_some_steps_later() -> None:
    output = torch.zeros(2, dtype=torch.int64)
    readback = Readback(2, ahead=2, device=torch.device("cpu"))
    seen = []
    for number in range(5):
        readback.put(output.fill_(number), f"step {number}")
        if readback.due:
            seen.append(readback.get())
    assert seen == [([n, n], f"step {n}") for n in range(3)]
    assert len(readback) == 2
    assert [readback.get()[0] for _ in range(2)] == [[3, 3], [4, 4]]
    assert not readback.due


class _Stream:
    cuda_stream = 7

    def wait_stream(self, other: object) -> None:
        del other


class _Graph:
    def replay(self) -> None:
        pass


@pytest.fixture
def recordings(monkeypatch) -> list[dict[str, Any]]:
    """What `torch.cuda.graph` is asked for, where there is no GPU."""
    requested: list[dict[str, Any]] = []

    @contextmanager
    def graph(recorded: object, **options: Any) -> Iterator[None]:
        del recorded
        requested.append(options)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    return requested


def test_other_threads_do_not_break_a_recording(recordings) -> None:
    """In the mode ``global``, a thread that pins memory meanwhile would end it with an error."""
    StepGraph(lambda: torch.zeros(1))
    assert recordings == [{"capture_error_mode": "thread_local"}]


def test_nor_do_they_break_that_of_a_micro_batch(recordings, monkeypatch) -> None:
    """And its launches share counters."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(counters, "_zeros", lambda count, _: torch.zeros(count))
    like: Any = SimpleNamespace(device=torch.device("cuda", 0))

    def run() -> tuple[torch.Tensor]:
        result = counters.program_counters(like, 3)
        assert counters.program_counters(like, 2) is result
        return (result,)

    graph = MicroBatchGraph(lambda batch, counts: (counts,), torch.device("cpu"), [], [])
    graph._capture(run)
    assert recordings == [{"pool": None, "capture_error_mode": "thread_local"}]
