"""What reads files is fed with the worst that can be found, all of it in one command."""

import io
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from effasr.cli.main import main
from effasr.transcription.json_files import one_line
from tests.transcription.hostile_files import BAD, GOOD, Case, make

pytestmark = pytest.mark.timeout(120)
ROOM = 2 * 2**30
"""Bytes of addresses that a command may ask for; what some headers claim is far more."""


@dataclass(frozen=True)
class Outcome:
    """What a command wrote."""

    code: int
    out: list[str]
    err: list[str]


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, Case]:
    return make(tmp_path_factory.mktemp("files"))


@contextmanager
def bounded() -> Iterator[None]:
    """No memory beyond `ROOM`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def effasr(monkeypatch, tmp_path) -> Callable[..., Outcome]:
    """Run a command where there is no ffmpeg."""

    def command(*arguments: object, given: bytes = b"") -> Outcome:
        (tmp_path / "bin").mkdir(exist_ok=True)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        texts = {
            name: io.TextIOWrapper(io.BytesIO(content), "utf-8", errors, newline="\n")
            for name, content, errors in (
                ("stdin", given, "strict"),
                ("stdout", b"", "strict"),
                ("stderr", b"", "backslashreplace"),
            )
        }
        with monkeypatch.context() as patch, bounded():
            for name, text in texts.items():
                patch.setattr(sys, name, text)
            code = main([str(argument) for argument in arguments])
        written = []
        for name in ("stdout", "stderr"):
            texts[name].flush()
            written.append(texts[name].buffer.getvalue().decode().split("\n")[:-1])
        return Outcome(code, *written)

    return command


def test_transcribe_reports_each_and_goes_on(effasr, saved, cases) -> None:
    paths = [case.path for case in cases.values()]
    told = effasr("transcribe", "--run", saved, "--vad", "loudness", "--", *paths)
    assert told.code == 1
    parts = [line.split("\t")[0] for line in told.out if "[partial: " in line]
    texts = [line.split("\t")[0] for line in told.out if "[partial: " not in line]
    *errors, summary = told.err
    assert len(texts) + len(errors) == len(cases)
    assert len(parts) > 3
    assert all(any(_is_about(line, path) for line in errors) for path in parts)
    assert summary.endswith(f", {len(errors)} failed")
    for name, case in cases.items():
        visible = one_line(case.path)
        assert texts.count(visible) + sum(_is_about(line, visible) for line in errors) == 1, name
        if case.fate == GOOD:
            assert visible not in parts, name
            assert visible in texts, (name, [line for line in errors if visible in line])
        if case.fate == BAD:
            assert visible not in texts, name
    for line in errors:
        assert len(line) < 500
        # Neither of Python's own errors should come to light: they say nothing to a user.
        assert "Error:" not in line, line


def _is_about(line: str, path: str) -> bool:
    return line.startswith((f"effasr transcribe: {path}: ", f"effasr transcribe: {path} "))


def test_results_in_json_and_in_files(effasr, saved, cases, tmp_path) -> None:
    paths = [case.path for case in cases.values() if "names" in case.path]
    told = effasr("transcribe", "--run", saved, "--json", "--", *paths)
    rows = [json.loads(line) for line in told.out]
    assert [row["id"] for row in rows] == paths
    assert [row["id"] for row in rows if "error" in row] == [p for p in paths if "raw" in p]
    out = tmp_path / "out"
    told = effasr("transcribe", "--run", saved, "--output", out, "--", *paths)
    assert told.out == []
    names = {path.stem for path in out.iterdir()}
    assert names == {Path(path).stem for path in paths if not path.endswith(("x.raw", "xxx.wav"))}
    assert len([line for line in told.err if "too long a name" in line]) == 1
    assert (tmp_path / "out" / "a\nb.txt").is_file()


def test_names_from_standard_input(effasr, saved, cases) -> None:
    paths = [cases[name].path for name in ("name: no UTF-8", "missing", "name: dash", "a loop")]
    provided = "\n".join(paths).encode("utf-8", "surrogateescape")
    told = effasr("transcribe", "--run", saved, "--json", "-", given=provided)
    assert [json.loads(line)["id"] for line in told.out] == paths
    feeds = cases["name: line feed"].path.encode() + b"\0"
    told = effasr("transcribe", "--run", saved, "-", given=feeds)
    assert (told.code, len(told.out)) == (0, 1)


def test_a_file_that_is_named_twice_is_one(effasr, saved, cases) -> None:
    path = Path(cases["silence"].path)
    twice = [path, path, path.parent / "." / "folder.wav" / ".." / path.name]
    told = effasr("transcribe", "--run", saved, *twice)
    assert (told.code, len(told.out)) == (0, 1)
