"""Runs whose corpus, tokenizer and directory are in an object store."""

import json
import shutil
import threading

import pytest

from effasr.checkpoint import load_best
from effasr.training.run_dir import remote_run
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.object_store import filesystem, forget, object_store
from tests.training.conftest import at_step
from tests.training.test_exactness import assert_same_end, kill_worker


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_run, "_EVERY_S", 0.2)
    monkeypatch.setattr(remote_run, "_STALE_S", 0.5)
    with object_store(tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def make_remote(make_config, store, tones):
    """A run of which everything is in the store, and is loaded by a process of its own."""
    url = store.upload(tones, "tones")
    data = {"train": f"{url}/train.jsonl", "tokenizer": f"{url}/tokenizer", "workers": 1}
    return lambda **training: make_config(output=f"{store.url}/runs", data=data, training=training)


def on_another_machine(tmp_path):
    shutil.rmtree(tmp_path / "cache")
    forget()


def stop_server(store):
    store.proxy.is_down = True
    threading.Timer(1.5, setattr, (store.proxy, "is_down", False)).start()


def test_a_run_goes_on_bitwise_on_another_machine(
    make_remote, make_config, store, tmp_path, monkeypatch, caplog
):
    """After a worker was killed, a server was away, and a checkpoint was half uploaded."""
    with monkeypatch.context() as patch:
        at_step(patch, 6, kill_worker)
        with pytest.raises(RuntimeError, match="a loading process died"):
            run(make_remote())
    names = store.names("runs/run")
    assert "checkpoints/step_00000004/manifest.json" in names
    assert "lock" not in names
    half = "corpus/runs/run/checkpoints/step_00000099/model.yaml"
    filesystem().pipe_file(half, b"model: {}")
    on_another_machine(tmp_path)
    with monkeypatch.context() as patch:
        at_step(patch, 6, lambda: stop_server(store))
        assert run(make_remote()) == 0
    assert "step_00000099 is not whole (its manifest.json is missing)" in caplog.text
    assert "downloaded s3://corpus/runs/run/checkpoints/step_00000004" in caplog.text
    assert "secret-of-the-test" not in caplog.text
    assert run(make_config(name="straight")) == 0
    staging = tmp_path / "cache" / "runs" / "s3" / "corpus" / "runs" / "run"
    assert_same_end(staging, tmp_path / "straight", 12)
    # The store has the same, and nothing else.
    files = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    assert store.names("runs/run") == sorted(map(str, files))
    steps = [line["step"] for line in read_lines(staging / "metrics.jsonl")]
    assert steps == list(range(1, 13))
    on_another_machine(tmp_path)
    assert load_best(f"{store.url}/runs/run").prompt.source == "en"


def test_a_restart_keeps_the_earlier_run(make_remote, store, tmp_path):
    assert run(make_remote(max_steps=2)) == 0
    on_another_machine(tmp_path)
    assert run(make_remote(max_steps=1, restart=True)) == 0
    assert "checkpoints/step_00000002/manifest.json" in store.names("runs/run.old-1")
    assert "checkpoints/step_00000001/manifest.json" in store.names("runs/run")


def test_a_run_that_another_machine_makes_is_refused(make_remote, store, monkeypatch):
    holder = {"run": "other", "host": "elsewhere", "pid": 7}
    beats = iter(range(100))

    def beat(*_):
        filesystem().pipe_file(
            "corpus/runs/run/lock", json.dumps(holder | {"n": next(beats)}).encode()
        )

    beat()
    monkeypatch.setattr(remote_run.time, "sleep", beat)
    with pytest.raises(ValueError, match="process 7 on elsewhere trains there: end it, or choose"):
        run(make_remote())
    assert store.names("runs/run") == ["lock"]
