"""What a person at a terminal sees."""

import importlib.metadata
import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from effasr import config
from effasr.cli import options, progress
from tests.architecture.test_cli_surface import SURFACE
from tests.cli.conftest import Terminal


def test_help_without_arguments(effasr):
    done = effasr()
    assert done.code == 0
    assert done.out == effasr("--help").out
    for command in SURFACE:
        assert re.search(rf"\n  {command}\s", done.out)


def test_help_of_train_lists_the_recipes(effasr):
    text = effasr("train", "--help-all").out
    for recipe in config.recipes():
        assert f"\n  {recipe} " in text
    assert "A Canary-type model of 1.26 M parameters that two CPU cores" in text


def test_version(effasr):
    assert effasr("--version").out == f"effasr {importlib.metadata.version('effasr')}\n"


def test_help_comes_at_once():
    """Neither it nor the report of an error imports PyTorch or numpy, which take seconds."""
    code = (
        "import sys; from effasr.cli.main import _fail, main; main([]); "
        "_fail('', ValueError('wrong'), 2); "
        "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_error_in_a_recipe_does_not_wait_for_the_trainer(effasr, monkeypatch):
    # An import of it would be another error.
    monkeypatch.setitem(sys.modules, "effasr.training.trainer", None)
    done = effasr("train", "small", "model.encoder.layrs=3")
    assert done.code == 2
    assert "did you mean `layers`?" in done.error


def test_the_longest_duration_to_prepare_is_an_option(workplace, tmp_path, effasr):
    source, out = workplace.folder / "train.jsonl", tmp_path / "out"
    assert "too_long" not in effasr("prepare", source, out).out
    done = effasr("prepare", source, out, "--max-duration", "0.8")
    assert done.code == 0
    assert re.search(r"^  too_long +[1-9]", done.out, re.M)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_for_a_terminal_alone(workplace, tmp_path, monkeypatch, effasr, terminal):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    dev, nemo = workplace.folder / "dev", tmp_path / "model.nemo"
    run = ("evaluate", "--run", workplace.run, "--manifest", dev)
    for command, visible in (
        (("prepare", f"{dev}.jsonl", tmp_path / "out"), ["1 utterances"]),
        (("tokenizer", dev, tmp_path / "t", "--vocab-size", "30"), ["1 texts", "training the tok"]),
        (("plan", "--manifest", dev, "--world-size", "1"), ["1 utterances read", "planning 4 utt"]),
        ((*run, "--output", tmp_path / "e"), ["1 utterances read", "1/4 utterances", "loading"]),
        (("export", workplace.run, nemo), ["reading", "writing"]),
        (("import", nemo, tmp_path / "model"), ["reading", "writing"]),
    ):
        stream.seek(0)
        stream.truncate()
        assert effasr(*command).code == 0
        written = stream.getvalue()
        if not terminal:
            assert written == ""
            continue
        for text in visible:
            assert f"\r{text}" in written
        assert "\n" not in written
        # The line is wiped, so that what follows begins in the first column.
        assert written.endswith("\r\x1b[K")


def test_messages_are_folded_to_the_terminal(workplace, monkeypatch, effasr):
    plan = ("plan", "--manifest", workplace.folder / "train", "--world-size", "1")
    # A pipe has one line a message.
    assert max(map(len, effasr(*plan).out.splitlines())) > 80
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "80")
    assert effasr(*plan).code == 0
    assert max(map(len, stream.getvalue().splitlines())) <= 80


def test_progress_is_wiped_before_an_error(workplace, manifest, monkeypatch, effasr):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    path = manifest({"audio_filepath": "gone.wav"})
    assert effasr("prepare", path, path.with_suffix(".out")).code == 2
    assert "\r\x1b[Keffasr prepare: " in stream.getvalue()


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
