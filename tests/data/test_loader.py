import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from effasr.data.audio.waveform import AudioError
from effasr.data.batch import Batch
from effasr.data.loader import MicroBatchRef
from effasr.data.worker_processes import next_item
from tests.support.corpora import make_loader
from tests.support.corpora import take_steps as take


@pytest.fixture
def make(nemo, tokenizer):
    """Makes a loader of 40 tones."""
    return partial(make_loader, nemo(40), tokenizer)


def tensors(batch):
    layouts = (batch.audio.layout, batch.frames, batch.tokens.layout, batch.text.layout)
    values = (batch.audio.values, batch.tokens.values, batch.targets, batch.text.values)
    return [*values, batch.monotonic, *(layout.cu_seqlens for layout in layouts)]


def assert_equal(a, b):
    assert (a.epoch, a.step, a.num_steps) == (b.epoch, b.step, b.num_steps)
    for item, other in zip(a.batches, b.batches, strict=True):
        assert item.ids == other.ids
        for left, right in zip(tensors(item), tensors(other), strict=True):
            assert torch.equal(left, right)


def test_audio_of_files_of_16_bits_is_narrow_for_a_gpu(make, monkeypatch):
    (expected,) = take(make(workers=0), 1)
    # Only a GPU's driver can pin memory.
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batch)
    loader = make()
    loader._pin_memory = True
    step = loader.load(MicroBatchRef(expected.epoch, expected.step, 0))
    for batch, other in zip(step.batches, expected.batches, strict=True):
        assert (batch.audio.values.dtype, other.audio.values.dtype) == (torch.int16, torch.float32)
        assert torch.equal(batch.to("cpu").audio.values, other.audio.values)


def test_parts_of_steps_can_be_asked_for_in_any_order(make):
    """As learners do that take what comes next."""
    whole = take(make(), 3)
    loader = make(world_size=2, workers=1)
    assert whole[0].epoch != whole[2].epoch
    turns = [
        MicroBatchRef(whole[n].epoch, whole[n].step, rank, number=2 * n + rank)
        for n in (2, 0, 1)
        for rank in (1, 0)
    ]
    with closing(loader.take([*turns, *turns])) as steps:
        parts = [next(steps) for _ in turns]
    assert [part.number for part in parts] == [5, 4, 1, 0, 3, 2]
    for turn, part in zip(turns, parts, strict=True):
        assert part.places == range(turn.rank, 4, 2)
        expected = [whole[turn.number // 2].batches[position] for position in part.places]
        at_once = loader.load(turn)
        for batches in (part.batches, at_once.batches):
            assert [batch.ids for batch in batches] == [batch.ids for batch in expected]
        assert (at_once.number, at_once.step) == (turn.number, turn.step)


def test_ranks_that_cannot_share_evenly_get_empty_micro_batches(make, caplog):
    alone = take(make(), 2)
    ranks = [take(make(rank=rank, world_size=3), 2) for rank in range(3)]
    for number, expected in enumerate(alone):
        parts = [steps[number].batches for steps in ranks]
        assert {len(batches) for batches in parts} == {2}
        together = [batch for shares in zip(*parts, strict=True) for batch in shares]
        assert [batch.ids for batch in together[:4]] == [batch.ids for batch in expected.batches]
        for batch in together[4:]:
            assert (batch.ids, batch.num_targets, batch.frames.total) == ((), 0, 0)
            shapes = [tensor.shape for tensor in tensors(batch)]
            assert shapes == [tensor.shape for tensor in tensors(together[0])]
    (warning,) = {record.getMessage() for record in caplog.records}
    assert "in each step 2 of 6 places stay empty, 33 % of the time" in warning
    assert warning.endswith("a run of 3 or 6 micro-batches would lose nothing.")
    assert len(caplog.records) == 1
    ((batch,), *_) = (step.batches for step in take(make(rank=4, world_size=5), 2))
    assert batch.ids == ()
    make(world_size=5)
    assert caplog.records[-1].getMessage().endswith("a run of 5 micro-batches would lose nothing.")


def test_no_utterance_is_lost_or_repeated_when_the_ranks_change_in_an_epoch(make):
    plan = make(frame_budget=20).plan(0)
    assert plan.num_steps >= 3
    seen = []
    position = (0, 0)
    for size, count in ((2, 1), (3, 1), (1, plan.num_steps - 2)):
        loaders = [make(frame_budget=20, rank=rank, world_size=size) for rank in range(size)]
        ranks = [take(loader, count, *position) for loader in loaders]
        seen += [name for steps in ranks for s in steps for b in s.batches for name in b.ids]
        position = ranks[0][-1].next_position
    assert position == (1, 0)
    assert sorted(seen) == sorted(f"u{index}" for index in plan.indices)


reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
BASELINES = ["random", "bucketed", "sync_bucketed", "sync_bucketed_2d"]


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "random"}, {"strategy": "random", "padded": True}]
)
def test_a_micro_batch_whose_audio_is_all_gone_is_empty(make, tmp_path, options):
    loader = make(on_bad_audio="skip", **options)
    gone = loader.plan(0).step(0)[1]
    for index in gone:
        (tmp_path / f"corpus/audio/u{index}.wav").unlink()
    step = take(loader, 1)[0]
    batch = step.batches[1]
    assert (batch.ids, batch.num_frames, batch.num_targets) == ((), 0, 0)
    assert len(step.skipped) == len(gone) > 0


def test_fingerprints_tell_plans_apart(make):
    names = [{}, *({"strategy": name, "buckets": 3} for name in BASELINES)]
    result = [make(**options).fingerprint(epoch) for options in names for epoch in (0, 1)]
    assert len(set(result)) == len(result)
    assert make().fingerprint(1) == result[1]
    assert make(micro_batches=2, world_size=2).fingerprint(0) != result[0]
    assert make(world_size=2).fingerprint(0) == result[0]


def test_ranks_and_steps_that_are_not_there_are_refused(make):
    with pytest.raises(ValueError, match=r"`rank` must be in 0 \.\. 1, but is 2"):
        make(rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"`step` must be in 0 \.\. \d+, .*, but is 99"):
        make().steps(0, 99)


@pytest.mark.parametrize("workers", [0, 1])
def test_audio_that_breaks_is_named(make, tmp_path, workers):
    loader = make(workers=workers)
    name = f"u{loader.plan(0).indices[-1]}"
    (tmp_path / f"corpus/audio/{name}.wav").write_bytes(b"broken")
    with pytest.raises(AudioError) as caught:
        take(loader, loader.plan(0).num_steps)
    message = str(caught.value)
    assert "\n" not in message
    assert f"utterance '{name}': " in message
    assert f"{name}.wav: not a readable audio file" in message
    assert "data.on_bad_audio=skip" in message


@reads_proc
def test_closing_ends_the_workers(make):
    before = set(children(os.getpid()))
    steps = make(workers=2).steps()
    next(steps)
    workers = sorted(set(children(os.getpid())) - before)
    assert len(workers) >= 2
    steps.close()
    assert not running(workers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_for_a_gpu_are_pinned(make, workers):
    (batch, *_) = take(make(workers=workers), 1)[0].batches
    assert all(tensor.is_pinned() for tensor in tensors(batch))
    assert batch.audio.values.dtype == torch.int16
    for moved, original in zip(tensors(batch.to("cuda")), tensors(batch.to("cpu")), strict=True):
        assert torch.equal(moved.cpu(), original)


SCRIPT = """
import os, signal, sys, time
from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.data.tokenizer import load_tokenizer
manifest, tokenizer = sys.argv[1:]
config = DataConfig(train=manifest, frame_budget=60, workers=2)
corpus = Corpus.load(config.train, load_tokenizer(tokenizer), config)
steps = Loader(corpus, config).steps()
next(steps)
"""


@pytest.fixture
def script(nemo, tokenizer, tmp_path):
    """Makes the command line of a process that loads, and then does what it is told."""
    tokenizer.save(tmp_path / "tokenizer")
    files = [str(nemo(12)), str(tmp_path / "tokenizer")]
    return lambda rest: [sys.executable, "-c", SCRIPT + textwrap.dedent(rest), *files]


@reads_proc
def test_full_shared_memory_is_an_error_and_no_endless_wait(make, monkeypatch):
    def fail(tensor):
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", fail)
    with pytest.raises(
        RuntimeError, match=r"^a loading.*\(28\)\): enlarge .*--shm-size.*`prefetch`"
    ):
        take(make(workers=1), 1)
    assert len(take(make(), 1)) == 1


@pytest.mark.parametrize(
    ("reported", "shown"),
    [
        ("Caught RuntimeError in DataLoader worker process 0.\nbad rate", "^Caught RuntimeError"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "^a loading process died"),
        ("DataLoader worker (pid(s) 7) exited unexpectedly", "^a loading process died"),
    ],
)
def test_an_error_in_a_worker_is_not_its_death(reported, shown):
    def failing():
        raise RuntimeError(reported)
        yield

    with pytest.raises(RuntimeError, match=shown):
        next_item(failing())


@reads_proc
def test_an_error_ends_the_workers(make, tmp_path):
    loader = make(workers=1)
    (tmp_path / f"corpus/audio/u{loader.plan(0).indices[0]}.wav").unlink()
    before = set(children(os.getpid()))
    with pytest.raises(AudioError) as caught:
        next(loader.steps())
    assert not running([*set(children(os.getpid())) - before])
    assert caught.traceback


@reads_proc
def test_workers_ignore_signals_that_are_not_their_parent_s(make):
    before = set(children(os.getpid()))
    with closing(make(workers=1).steps()) as steps:
        next(steps)
        (worker,) = set(children(os.getpid())) - before
        for name in ("INT", "TERM"):
            subprocess.run(["kill", f"-{name}", str(worker)], check=True)
        assert running([worker], patience=0.2)
        os.kill(worker, signal.SIGTERM)
        assert not running([worker])


@reads_proc
def test_a_worker_that_dies_gives_a_readable_error(script):
    command = script(
        """
        children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
        try:
            # One alone: torch reports each by a signal, which may come while the first is handled.
            os.kill(int(children[0]), signal.SIGKILL)
            for step in steps:
                pass
        except RuntimeError as error:
            print(str(error).strip())
        """
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert re.fullmatch(r".*worker \(pid.*\).* (killed|exited).*\n", done.stdout)


@reads_proc
def test_workers_die_with_the_training_process(script):
    command = script("print('loaded', flush=True); time.sleep(60)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        workers = children(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.wait()
    assert not running(workers)


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def running(pids, patience=3.0):
    """Those that still run after a moment; a zombie does not."""
    deadline = time.monotonic() + patience
    while (alive := [pid for pid in pids if _state(pid) not in "ZX"]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return alive


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
