import errno
import io
import sys

import pytest

from effasr.data import worker_processes
from effasr.data.locks import writing_alone
from effasr.data.manifest import prepare as module
from effasr.data.manifest.prepare import prepare
from effasr.data.worker_processes import SharedMemoryError

FULL = errno.ENOSPC, "No space left on device"


def test_a_second_writer_is_refused_and_leftovers_are_removed(tmp_path, nemo):
    out = tmp_path / "out"
    out.mkdir()
    leftover, foreign = out / "cuts.jsonl.gz.01234567.1.partial", out / "mine.partial"
    with writing_alone(out):
        leftover.touch()
        foreign.touch()
        with pytest.raises(ValueError, match=f"^{out}: another process writes into this folder"):
            prepare(nemo(1), out)
        assert leftover.exists()
    prepare(nemo(1), out)
    assert not leftover.exists()
    assert foreign.exists()


def test_a_full_disk_is_named(tmp_path, nemo, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(*FULL)

    monkeypatch.setattr(module, "TemporaryFile", lambda dir: Full())
    with pytest.raises(OSError, match="No space left") as raised:
        prepare(nemo(1), tmp_path / "out")
    assert raised.value.filename == str(tmp_path / "out")
    # The same command goes on from there.
    assert [file.name for file in (tmp_path / "out").iterdir()] == [".measured.jsonl"]


class Incomplete:
    """As torch's iterator of workers, which cannot be deleted before all of it is made."""

    def __init__(self):
        raise OSError(*FULL)

    def __del__(self):
        raise AttributeError


class Loader:
    def __iter__(self):
        return Incomplete()


def test_full_shared_memory_is_named_when_workers_start(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with pytest.raises(SharedMemoryError, match=r"No space left.*enlarge /dev/shm"):
        worker_processes.start(Loader())
    assert not printed
