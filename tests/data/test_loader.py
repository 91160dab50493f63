import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch

from effasr.data.audio import AudioError
from effasr.data.batch import Batch
from effasr.data.config import DataConfig
from effasr.data.loader import Corpus, Loader, Step
from effasr.data.tokenizer import SentencePieceTokenizer, Tokenizer


@pytest.fixture
def make(nemo: Callable[..., Path], tokenizer: Tokenizer) -> Callable[..., Loader]:
    """Makes a loader of 40 tones with about 4 micro-batches of 60 frames in a step."""
    manifest = nemo(40)

    def build(*, rank: int = 0, world_size: int = 1, **options: object) -> Loader:
        defaults = {"frame_budget": 60, "micro_batches": 4, "workers": 0}
        config = DataConfig(train=str(manifest), **(defaults | options))  # type: ignore[arg-type]
        corpus = Corpus.load(config.train, tokenizer, config, ctc=False)
        return Loader(corpus, config, seed=3, rank=rank, world_size=world_size)

    return build


def take(loader: Loader, count: int, epoch: int = 0, step: int = 0) -> list[Step]:
    with closing(loader.steps(epoch, step)) as steps:
        return list(islice(steps, count))


def tensors(batch: Batch) -> list[torch.Tensor]:
    layouts = (batch.audio.layout, batch.frames, batch.tokens.layout, batch.text.layout)
    values = (batch.audio.values, batch.tokens.values, batch.targets, batch.text.values)
    return [*values, batch.monotonic, *(layout.cu_seqlens for layout in layouts)]


def assert_equal(a: Step, b: Step) -> None:
    assert (a.epoch, a.step, a.num_steps) == (b.epoch, b.step, b.num_steps)
    for one, other in zip(a.batches, b.batches, strict=True):
        assert one.ids == other.ids
        for left, right in zip(tensors(one), tensors(other), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_sees_the_same_batches(make: Callable[..., Loader], workers: int) -> None:
    whole = take(make(workers=0), 7)
    assert whole[-1].epoch >= 2
    for start in (1, 4):
        at = whole[start - 1].next_position
        rest = take(make(workers=workers), 7 - start, *at)
        for expected, got in zip(whole[start:], rest, strict=True):
            assert_equal(expected, got)


def test_every_batch_has_the_same_shape(make: Callable[..., Loader]) -> None:
    steps = take(make(), 6)
    shapes = {
        tuple(tensor.shape for tensor in tensors(batch)) for step in steps for batch in step.batches
    }
    assert len(shapes) == 1


def test_a_step_holds_the_same_utterances_on_any_number_of_ranks(
    make: Callable[..., Loader],
) -> None:
    alone = take(make(), 3)
    for world_size in (2, 4):
        ranks = [take(make(rank=rank, world_size=world_size), 3) for rank in range(world_size)]
        for number, expected in enumerate(alone):
            parts = [steps[number].batches for steps in ranks]
            together = [batch.ids for shares in zip(*parts, strict=True) for batch in shares]
            assert together == [batch.ids for batch in expected.batches]


def test_an_epoch_holds_each_planned_utterance_once(make: Callable[..., Loader]) -> None:
    loader = make()
    steps = take(loader, loader.plan(0).num_steps)
    ids = [name for step in steps for batch in step.batches for name in batch.ids]
    assert len(ids) == len(set(ids)) == 40 - len(loader.plan(0).deferred)
    assert steps[-1].next_position == (1, 0)


def test_micro_batches_must_be_shared_evenly(make: Callable[..., Loader]) -> None:
    with pytest.raises(
        ValueError, match=r"multiple of the number of ranks, 3, but is 4: use 3 or 6"
    ):
        make(world_size=3)
    with pytest.raises(ValueError, match=r"number of ranks, 8, but is 4: use 8\."):
        make(world_size=8)
    with pytest.raises(ValueError, match=r"`rank` must be in 0 \.\. 1, but is 2"):
        make(rank=2, world_size=2)


def test_a_position_outside_the_epoch_is_refused(make: Callable[..., Loader]) -> None:
    loader = make()
    with pytest.raises(ValueError, match=r"`step` must be in 0 \.\. \d+, .*, but is 99"):
        loader.steps(0, 99)


@pytest.mark.parametrize("workers", [0, 1])
def test_audio_that_breaks_is_named(
    make: Callable[..., Loader], tmp_path: Path, workers: int
) -> None:
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


def test_audio_that_breaks_can_be_skipped(make: Callable[..., Loader], tmp_path: Path) -> None:
    loader = make(on_bad_audio="skip")
    gone = {f"u{index}" for index in loader.plan(0).indices[[0, -1]]}
    for name in gone:
        (tmp_path / f"corpus/audio/{name}.wav").unlink()
    steps = take(loader, loader.plan(0).num_steps)
    ids = {name for step in steps for batch in step.batches for name in batch.ids}
    skipped = [drop for step in steps for drop in step.skipped]
    assert {drop.id for drop in skipped} == gone
    assert {drop.reason for drop in skipped} == {"missing_audio"}
    assert not ids & gone
    assert all(drop.audio.endswith(f"{drop.id}.wav") for drop in skipped)


def test_loading_leaves_the_global_generator_alone(make: Callable[..., Loader]) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(make(workers=1), 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closing_ends_the_workers(make: Callable[..., Loader]) -> None:
    steps = make(workers=2).steps()
    next(steps)
    workers = children(os.getpid())
    assert len(workers) >= 2
    steps.close()
    assert not running(workers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_for_a_gpu_are_pinned(make: Callable[..., Loader], workers: int) -> None:
    (batch, *_) = take(make(workers=workers), 1)[0].batches
    assert all(tensor.is_pinned() for tensor in tensors(batch))
    on_gpu = batch.to("cuda")
    for moved, original in zip(tensors(on_gpu), tensors(batch), strict=True):
        assert torch.equal(moved.cpu(), original)


SCRIPT = """
import os, signal, sys, time
from effasr.data.loader import Corpus, DataConfig, Loader
from effasr.data.tokenizer import load_tokenizer
manifest, tokenizer = sys.argv[1:]
config = DataConfig(train=manifest, frame_budget=60, workers=2)
corpus = Corpus.load(config.train, load_tokenizer(tokenizer), config)
steps = Loader(corpus, config).steps()
next(steps)
"""


@pytest.fixture
def script(
    nemo: Callable[..., Path], tokenizer: SentencePieceTokenizer, tmp_path: Path
) -> Callable[[str], list[str]]:
    """Makes the command line of a process that loads, and then does what it is told."""
    tokenizer.save(tmp_path / "tokenizer")
    files = [str(nemo(12)), str(tmp_path / "tokenizer")]
    return lambda rest: [sys.executable, "-c", SCRIPT + textwrap.dedent(rest), *files]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_error_ends_the_workers(make: Callable[..., Loader], tmp_path: Path) -> None:
    loader = make(workers=1)
    (tmp_path / f"corpus/audio/u{loader.plan(0).indices[0]}.wav").unlink()
    before = set(children(os.getpid()))
    with pytest.raises(AudioError) as caught:
        next(loader.steps())
    assert not running([*set(children(os.getpid())) - before])
    assert caught.traceback


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_ignore_signals_that_are_not_their_parent_s(make: Callable[..., Loader]) -> None:
    with closing(make(workers=1).steps()) as steps:
        next(steps)
        (worker,) = children(os.getpid())
        for name in ("INT", "TERM"):
            subprocess.run(["kill", f"-{name}", str(worker)], check=True)
        assert running([worker], patience=0.2)
        os.kill(worker, signal.SIGTERM)
        assert not running([worker])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_dies_gives_a_readable_error(script: Callable[[str], list[str]]) -> None:
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r".*worker \(pid.*\).* (killed|exited).*\n", done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_die_with_the_training_process(script: Callable[[str], list[str]]) -> None:
    command = script("print('loaded', flush=True); time.sleep(60)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        workers = children(process.pid)
        assert len(workers) >= 2
        process.kill()
        process.wait()
    assert not running(workers)


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def running(pids: list[int], patience: float = 3.0) -> list[int]:
    """Those that still run after a moment; a zombie does not."""
    deadline = time.monotonic() + patience
    while (alive := [pid for pid in pids if _state(pid) not in "ZX"]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return alive


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
