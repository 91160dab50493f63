"""Commands run in this process: what they return and write."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from effasr.cli.main import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a failed command writes to standard error."""
        assert self.code in (1, 2), self
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("effasr"), self.err
        assert "Traceback" not in self.err
        return lines[0]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of JSON that a command writes to standard output."""
        assert self.code in (0, 1), self
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def segment(self) -> dict[str, Any]:
        """The one segment of the one recording that `effasr transcribe --json` was given."""
        ((segment,),) = (row["segments"] for row in self.rows)
        return segment


@pytest.fixture
def effasr(capsys):
    def run(*arguments) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse's way of ending
            code = int(end.code or 0)
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return run
