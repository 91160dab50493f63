"""The table of angles that calls of `attention` share, on whichever stream they are."""

import pytest
import torch

pytest.importorskip("triton")

from effasr_kernels import Rotary
from effasr_kernels.attention.triton import rotary


class _Stream:
    """A stream that notes down when the host waits for it."""

    def __init__(self, events: list[str]):
        self._events = events

    def synchronize(self) -> None:
        self._events.append("waited")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to tables of a GPU that need not be there, whose values are on the CPU."""
    found: list[str] = []

    class Tables(dict):
        def __setitem__(self, key: object, value: object) -> None:
            found.append("shared")
            super().__setitem__(key, value)

    make = rotary._make_table

    def on_cpu(size: int, base: float, width: int, device: torch.device) -> object:
        found.append("made")
        return make(size, base, width, torch.device("cpu"))

    monkeypatch.setattr(rotary, "_make_table", on_cpu)
    monkeypatch.setattr(rotary, "_TABLES", Tables())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream(found))
    return found


@pytest.mark.parametrize("capturing", [False, True])
def test_a_table_is_complete_before_other_streams_find_it(
    events: list[str], capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    gpu = torch.device("cuda", 0)
    first, second = (rotary.angle_table(Rotary(), 64, rows, gpu) for rows in (100, 120))
    if capturing:
        # A graph contains the making of its own tables, and may not wait for the device.
        assert events == ["made", "made"]
        assert first is not second
    else:
        assert events == ["made", "waited", "shared"]
        assert first is second
    assert first[0].shape == (128, 32)


def test_without_a_gpu_nothing_waits(events: list[str]) -> None:
    rotary.angle_table(Rotary(), 64, 100, torch.device("cpu"))
    assert events == ["made", "shared"]
