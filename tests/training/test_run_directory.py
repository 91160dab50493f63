import json
import os

import pytest

from effasr.training.run_dir.run_directory import RunDirectory, read_lines
from effasr.untrusted.documents import with_checksum_line


def steps(path) -> list[int]:
    return [line["step"] for line in read_lines(path)]


def test_resuming_removes_what_the_lost_stretch_wrote(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.open("a: 1\n", 0, tensorboard=False)
    for step in (1, 2, 3, 4):
        run.metrics({"step": step, "loss": 0.5})
    run.validation({"step": 4, "wer": 0.1})
    run.skipped({"step": 3, "utterances": ["a"]})
    # A process killed while it writes leaves half a line.
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')

    again = RunDirectory(tmp_path / "run")
    again.open("a: 2\n", 2, tensorboard=False)
    assert steps(run.path / "metrics.jsonl") == [1, 2]
    assert steps(run.path / "validation.jsonl") == steps(run.path / "skipped.jsonl") == []
    again.metrics({"step": 3})
    assert steps(run.path / "metrics.jsonl") == [1, 2, 3]
    assert (run.path / "config.yaml").read_text() == with_checksum_line("a: 2\n")


def test_a_name_with_another_line_separator_does_not_end_a_line(tmp_path):
    run = RunDirectory(tmp_path)
    run.open("", 0, tensorboard=False)
    for step in (1, 2):
        run.skipped({"step": step, "utterances": ["a\u2028b", "c\x85d"]})
    run.open("", 2, tensorboard=False)
    assert steps(tmp_path / "skipped.jsonl") == [1, 2]


def test_file_names_that_are_not_utf8_are_written_as_escapes(tmp_path):
    name = os.fsdecode(b"caf\xe9.wav")
    run = RunDirectory(tmp_path)
    run.open("", 0, tensorboard=False)
    run.dropped([{"id": "a", "audio": name}])
    run.unreadable([{"step": 1, "audio": name}])
    assert [line["audio"] for line in read_lines(tmp_path / "dropped.jsonl")] == [name]
    again = RunDirectory(tmp_path)
    again.load_state_dict(run.state_dict())
    again.open("", 1, tensorboard=False)
    assert [line["audio"] for line in read_lines(tmp_path / "unreadable.jsonl")] == [name]


def test_every_line_is_json_of_its_own_and_nan_is_null(tmp_path):
    run = RunDirectory(tmp_path)
    run.open("", 0, tensorboard=False)
    run.dropped([{"id": "ä", "reason": "too long"}, {"id": "b", "reason": "silent"}])
    lines = (tmp_path / "dropped.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["ä", "b"]
    run.metrics({"step": 1, "loss": float("nan"), "groups": [{"wer": float("inf")}]})
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "groups": [{"wer": None}]}
    ]


def test_an_older_run_is_set_aside_under_a_free_name(tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert run.set_aside() is None
    for number in (1, 2):
        run.open("", 0, tensorboard=False)
        assert run.set_aside() == tmp_path / f"run.old-{number}"
    assert not run.path.exists()


def test_a_restart_by_torchrun_keeps_the_run_that_restarted(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path / "run")

    def starts(job: str, restarts: int) -> bool:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        aside = run.restart()
        run.open("", 0, tensorboard=False)
        return aside is not None

    assert not starts("first", 0)
    assert not starts("first", 1)
    assert starts("second", 0)
    assert not starts("second", 1)
    assert not starts("second", 2)
    # Its processes ended before one of them had set aside what the second left.
    assert starts("third", 1)
    # Not counted: another node came or went.
    assert not starts("third", 0)
    with monkeypatch.context() as patch:
        # Another torchrun, of the same name, whose first processes ended at once.
        patch.setattr("os.getppid", lambda: 1)
        assert starts("third", 1)
        # Rank 0 has moved.
        patch.setattr("socket.gethostname", lambda: "another")
        assert not starts("third", 2)
        assert starts("third", 0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert run.restart() is not None
    assert not run.path.exists()


def test_curves_are_written_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 3), (2, 4)):
        run = RunDirectory(tmp_path)
        run.open("", first, tensorboard=True)
        for step in range(first + 1, last + 1):
            run.metrics({"step": step, "epoch": 0, "loss": float(10 * first + step), "mfu": None})
        run.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    curve = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert curve == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]
