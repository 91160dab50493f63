"""What a terminal shows of a long command."""

import sys
import time
from pathlib import Path

import pytest

from effasr.cli import options, progress
from tests.cli.conftest import Terminal


def shows(stream, text):
    """Wait until it has been written."""
    deadline = time.monotonic() + 30
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    return text in stream.getvalue()


def terminal_of(monkeypatch):
    """Standard error on which work is shown at once; a fixture's would be captured."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    return stream


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ((0, 10, 9.0), "0/10 files"),
        ((5, 10, 1.0), "5/10 files"),
        ((5, 10, 10.0), "5/10 files, 0.5/s, 10 s left"),
        ((5, 10, 10.0, 60.0), "5/10 files, 0.5/s, RTFx 6.0, 10 s left"),
        ((4000, None, 10.0), "4,000 files, 400/s"),
        ((1000, 100_000, 10.0), "1,000/100,000 files, 100/s, 16:30 min left"),
        ((10, 90_010, 10.0), "10/90,010 files, 1.0/s, 25:00 h left"),
    ],
)
def test_rate_and_time_left(counts, text):
    done, total, seconds, *audio = counts
    assert progress.describe(done, total, "files", seconds, *audio) == text


def test_work_is_shown_after_a_while_with_the_parts_that_are_counted(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with progress.working("planning", "strategies") as show:
        show(2, 5)
        assert shows(terminal, "strategies")
    assert terminal.getvalue().startswith("\rplanning, 0 s, 2/5 strategies, ")
    with progress.working("reading"):
        assert shows(terminal, "\rreading, 0 s")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_message_is_folded_and_a_command_stays_whole(monkeypatch, capsys):
    monkeypatch.setattr(options, "display_width", lambda: 30)
    command, words = "  effasr train small name=mine data.train=data", "word " * 12
    options.print_folded(f"frame budget   {words}\n{command}\n{words}\n")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("frame budget   word")
    assert lines[1].startswith(" " * 15 + "word")
    assert command in lines
    assert max(len(line) for line in lines if line != command) <= 30
    monkeypatch.setattr(options, "display_width", lambda: None)
    options.print_folded(words)
    assert capsys.readouterr().out == f"{words}\n"


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts no bytes")
def test_megabytes_of_files_are_counted(monkeypatch, tmp_path):
    terminal = terminal_of(monkeypatch)
    folder = tmp_path / "model"
    monkeypatch.setattr(progress, "_TICK_S", 0.01)
    with progress.writing(folder, 4_000_000):
        assert shows(terminal, f"\rwriting {folder}, 0 s\x1b")
        folder.mkdir()
        for number in range(3):
            (folder / str(number)).write_bytes(bytes(1_000_000))
        assert shows(terminal, ", 3/4 MB, ")
    with progress.reading(folder):
        (folder / "0").read_bytes()
        assert shows(terminal, ", 1/3 MB, ")
        (folder / "1").read_bytes()
        assert shows(terminal, ", 2/3 MB, ")
    monkeypatch.setattr(progress, "_IO", tmp_path / "none")
    with progress.reading(folder):
        assert shows(terminal, f"\rreading {folder}, 0 s\x1b")


def test_errors_pass_through(monkeypatch):
    terminal_of(monkeypatch)
    with pytest.raises(ValueError, match="wrong"), progress.working("reading"):
        raise ValueError("wrong")
