"""Scenario: a run goes on from step 2, and writes the files of its directory."""

from contextlib import closing
from pathlib import Path

from effasr.evaluation.comparison import read_run
from effasr.evaluation.result import Evaluation, ScoredUtterance, save
from effasr.evaluation.wer import ErrorCounts
from effasr.training.run_dir.run_directory import RunDirectory, read_lines
from effasr.untrusted.documents import with_checksum_line


def _evaluation(text: str) -> Evaluation:
    errors = ErrorCounts(words=1, substitutions=1, utterances=1)
    return Evaluation("basic", (ScoredUtterance("a", "en", text, "b", 1.0, errors),), seconds=1.0)


def _write(folder: Path, begin: int, end: int):
    with closing(RunDirectory(folder)) as run:
        run.lock(f"start {begin}")
        run.open(f"begin: {begin}\n", begin)
        run.dropped([{"id": f"from {begin}"}])
        for step in range(begin + 1, end + 1):
            run.metrics({"step": step, "begin": begin})
            run.skipped({"step": step, "utterances": ["a"]})
        run.validation({"step": end, "set": "dev", "wer": 0.5})
        save(_evaluation(f"from {begin}"), folder / "evaluation" / "test")
        run.blend(end, [{"source": f"from {begin}"}])


def prepare(folder: Path):
    """Make four steps, of which two have no checkpoint."""
    _write(folder, 0, 4)


def act(folder: Path):
    _write(folder, 2, 6)


def check(folder: Path, fault: str, error: str):
    """Check that each file is that of before or of after, and that the run can go on."""
    gone = folder.with_name("state.gone")
    folder = gone if gone.exists() else folder
    _check_files(folder, [0, 2])
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines[:2]] == [1, 2]
    assert {line["begin"] for line in lines[:2]} == {0}
    if not error and not gone.exists():
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    _write(folder, 2, 6)
    _check_files(folder, [2])
    lines = read_lines(folder / "metrics.jsonl")
    assert [(line["step"], line["begin"]) for line in lines] == [
        (1, 0), (2, 0), (3, 2), (4, 2), (5, 2), (6, 2),
    ]  # fmt: skip
    assert not (folder / "lock").exists()


def _check_files(folder: Path, begins: list[int]):
    configs = [with_checksum_line(f"begin: {begin}\n") for begin in begins]
    assert (folder / "config.yaml").read_text() in configs
    (dropped,) = read_lines(folder / "dropped.jsonl")
    assert dropped["id"] in [f"from {begin}" for begin in begins]
    problem = _read(folder / "evaluation" / "test")
    if problem:
        # Killed between its two files, of which one names the other's checksum.
        assert begins == [0, 2]
        assert "hypotheses.jsonl does not" in problem
        assert problem.endswith("make it again with `effasr evaluate`.")


def _read(evaluation: Path) -> str:
    try:
        (scored,) = read_run(evaluation)
    except ValueError as error:
        return str(error)
    return "" if list(scored.counts) == ["a"] else "it is another one"
