"""Several processes that read the same manifests: one keeps them, and others wait."""

import errno
import multiprocessing
import os
import signal
import threading
import time

import pytest

from effasr.data.atomic_files import atomic_file
from effasr.data.index import corpus_cache
from effasr.data.locks import BuilderSilent, building
from effasr.data.tokenizer import SentencePieceTokenizer
from tests.data.test_corpus_cache import load, was_read


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def _load_all(manifest, folder, start, results):
    tokenizer = SentencePieceTokenizer.load(manifest.parent / "tokenizer")
    start.wait()
    notes = []
    corpus = load(manifest, tokenizer, folder, notes)
    results.put((was_read(notes), corpus.fingerprint))


def test_of_several_processes_one_reads(nemo, tokenizer, folder):
    manifest = nemo(12)
    tokenizer.save(manifest.parent / "tokenizer")
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(4), context.Queue()
    arguments = (manifest, folder, start, results)
    processes = [context.Process(target=_load_all, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    result = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(read for read, _ in result) == [False, False, False, True]
    assert {fingerprint for _, fingerprint in result} == {
        load(manifest, tokenizer, None, []).fingerprint
    }


def test_a_killed_builder_leaves_nothing_behind(nemo, tokenizer, folder):
    manifest = nemo(5)

    def write_half(path, *others):
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def build():
        corpus_cache.write_columns = write_half
        load(manifest, tokenizer, folder, [])

    process = multiprocessing.get_context("fork").Process(target=build)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(folder.glob("*.partial"))) == 1
    notes = []
    load(manifest, tokenizer, folder, notes)
    assert was_read(notes)
    assert not list(folder.glob("*.partial"))


def test_without_locks_no_file_of_another_is_removed(nemo, tokenizer, folder, monkeypatch):
    """It may be one that another process, on this host or on another one, is writing."""
    manifest = nemo(5)
    load(manifest, tokenizer, folder, [])
    (made,) = folder.glob("*.corpus")
    other = made.with_name(f"{made.name}.deadbeef.1.partial")
    made.rename(other)

    def refuse(*arguments):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        load(manifest, tokenizer, folder, [])
    assert other.exists()
    made.unlink()
    load(manifest, tokenizer, folder, [])
    assert not other.exists()


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
