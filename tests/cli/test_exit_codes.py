"""Places that cannot be written, failures of all kinds, and interruption."""

import logging
import os
import signal
from pathlib import Path

import pytest

from effasr.cli import main as cli
from effasr.cli.installation import doctor


def outputs(workplace, out: Path) -> dict[str, tuple]:
    return {
        "prepare": (workplace.folder / "dev.jsonl", out),
        "tokenizer": (workplace.folder / "dev", out, "--vocab-size", "30"),
        "demo-data": (out, "--utterances", "8"),
        "evaluate": (
            "--run", workplace.run, "--manifest", workplace.folder / "dev", "--output", out
        ),
        "export": (workplace.run, out),
        "train": (workplace.recipe, f"output={out}"),
    }  # fmt: skip


COMMANDS = ["prepare", "tokenizer", "demo-data", "evaluate", "export", "train"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("out", ["file", "file/out", "x" * 300, "locked/out"])
def test_an_output_that_cannot_be_written(effasr, workplace, tmp_path, command, out):
    (tmp_path / "file").write_text("precious")
    if out == "locked/out":
        (tmp_path / "locked").mkdir(mode=0o500)
        if os.access(tmp_path / "locked", os.W_OK):
            pytest.skip("the superuser may write anywhere")
    failed = effasr(command, *outputs(workplace, tmp_path / out)[command])
    assert failed.code == 2
    assert "Errno" not in failed.err
    if out == "file":
        assert str(tmp_path / "file") in failed.error
    else:
        assert failed.err.splitlines()[-1].startswith(f"effasr {command}: {tmp_path}/")
    assert (tmp_path / "file").read_text() == "precious"


FREE = "free some space, or choose another folder"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied."),
        (OSError(28, "No space left", "/x"), 1, f"/x: No space left: {FREE}."),
        (OSError(28, "No space left"), 1, f"No space left: {FREE}."),
        (
            OSError(30, "Read-only", "/x"),
            1,
            "/x: Read-only: choose a folder that can be written to.",
        ),
        (RuntimeError("several\n  lines"), 1, "several lines"),
        (RuntimeError(), 1, "RuntimeError"),
        (ImportError("pip install it"), 1, "pip install it"),
        (ValueError("`x` must be y."), 2, "`x` must be y."),
    ],
)
def test_exit_codes(effasr, monkeypatch, error, code, line):
    def fail(options):
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    failed = effasr("doctor")
    assert failed.code == code
    assert failed.error == f"effasr doctor: {line}"
    monkeypatch.setenv("EFFASR_TRACEBACK", "1")
    assert "Traceback" in effasr("doctor").err


def test_a_mistake_in_the_program_keeps_its_traceback(effasr, monkeypatch):
    monkeypatch.setattr(doctor, "run", lambda options: options.nothing)
    with pytest.raises(AttributeError):
        effasr("doctor")


def test_interrupted(effasr, workplace, tmp_path, monkeypatch):
    """As by ctrl-C in the middle of a file."""
    from effasr.data.manifest import prepare

    check, once = prepare.check_content, iter([signal.SIGINT])

    def interrupt(cut, *known) -> None:
        # Other threads check the next utterances; their signal could come after the command's end.
        for number in once:
            signal.raise_signal(number)
        check(cut, *known)

    monkeypatch.setattr(prepare, "check_content", interrupt)
    ended = effasr("prepare", workplace.folder / "dev.jsonl", tmp_path / "out")
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert not (tmp_path / "out" / "cuts.jsonl.gz").exists()


def test_warnings_bear_the_name_of_the_command(monkeypatch, capsys):
    """Where nobody has set up logging before, as pytest has."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)

    def warn(options) -> int:
        logging.getLogger("effasr.somewhere").warning("mind the gap")
        return 0

    monkeypatch.setattr(doctor, "run", warn)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().err == "effasr doctor: mind the gap\n"
