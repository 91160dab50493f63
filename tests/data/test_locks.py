import multiprocessing
import os
import signal
import threading
import time

import pytest

from effasr.data.locks import BuilderSilent, building

CONTEXT = multiprocessing.get_context("fork")


def _hold(lock, held, silent):
    with building(lock, print) as (say, is_locked):
        assert is_locked
        held.set()
        for count in range(1000):
            if not silent:
                say(f"{count} lines")
            time.sleep(0.05)


@pytest.mark.parametrize("silent", [False, True])
def test_others_wait_for_one_that_goes_on(tmp_path, silent):
    lock, held, notes = tmp_path / "lock", CONTEXT.Event(), []
    builder = CONTEXT.Process(target=_hold, args=(lock, held, silent))
    builder.start()
    held.wait(10)
    if silent:
        with (
            pytest.raises(BuilderSilent, match=rf"process {builder.pid}\).*data\.cache=null"),
            building(lock, notes.append, patience_s=0.5),
        ):
            pass
    # The kernel drops the lock of one that is killed.
    threading.Timer(0.7, os.kill, (builder.pid, signal.SIGKILL)).start()
    with building(lock, notes.append):
        assert not builder.is_alive()
    assert any(f"process {builder.pid}" in note for note in notes)
    assert silent or len(set(notes)) > 2


def test_a_fork_does_not_hold_the_lock(tmp_path):
    lock, end = tmp_path / "lock", CONTEXT.Event()
    with building(lock, print):
        child = CONTEXT.Process(target=end.wait, args=(10,))
        child.start()
    with building(lock, print, patience_s=0.0):
        assert child.is_alive()
    end.set()
    child.join()


def test_where_there_are_no_locks_nobody_waits(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = tmp_path / "lock"
    with building(lock, print) as item, building(lock, print, patience_s=0.0) as other:
        assert not item[1]
        assert not other[1]
