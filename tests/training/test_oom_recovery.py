"""Steps in which memory runs out, by failures that are put in: on one rank, and on one of two."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from effasr.data.batch import Batch
from effasr.data.collate import collate
from effasr.distributed.ddp import SYNC_BUFFERS, replicate
from effasr.distributed.grad_sync import DDPGradientSync
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.optim.adamw import OptimizerConfig
from effasr.training.fault_tolerance.oom_recovery import (
    OutOfMemory,
    is_out_of_memory,
    split,
    utterances,
)
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import StepReport, TrainState, train_step
from effasr.training.trainer import run
from tests.support.quiet_run import make, quiet_config
from tests.support.run_ranks import check_ranks, run_ranks
from tests.training.conftest import make_batch, without_randomness
from tests.training.shortage import CPU_ERROR, shortage, torch_error

PLACES = [(call, where) for call in range(3) for where in ("forward", "backward")]


@pytest.fixture
def quiet(make_train_state, model_config):
    config = without_randomness(model_config, conv_norm="layer_norm")
    return lambda **settings: make_train_state(model=config, **settings)


@pytest.fixture
def batch_norm(make_train_state, model_config):
    return lambda: make_train_state(model=without_randomness(model_config))


def gradients_seen(train_state: TrainState) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    step = train_state.optimizer.step

    def watched():
        seen.extend(p.grad.clone() for p in train_state.model.parameters())
        step()

    train_state.optimizer.step = watched
    return seen


def splits(report: StepReport) -> float:
    return report.read()["splits"]


def check_as_without(quiet, steps: list[list[Batch]], *calls: int, where: str) -> list[int]:
    """Let calls of the last step fail; returns how many utterances each of its calls has."""
    (model, state), (straight, expected) = quiet(), quiet()
    seen, requested = gradients_seen(state), gradients_seen(expected)
    for step, batches in enumerate(steps):
        failing = calls if step + 1 == len(steps) else ()
        with shortage(model, *failing, where=where) as called:
            report = train_step(state, batches, step)
        plain = train_step(expected, batches, step)
    assert splits(report) == len(calls)
    torch.testing.assert_close(seen, requested, rtol=1e-5, atol=1e-6)
    for (name, x), y in zip(model.named_parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=name)
    figures = plain.read() | {"splits": splits(report)}
    assert report.read() == pytest.approx(figures, rel=1e-5)
    losses, names = zip(*map(losses_of, (report, plain)), strict=True)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert names[0] == names[1]
    # Nothing of the pieces' shapes is left behind.
    after = train_step(state, steps[0], len(steps))
    assert (splits(after), after.read()["finite"]) == (0, 1)
    return [len(batch.ids) for batch in called]


def losses_of(report: StepReport) -> tuple[torch.Tensor, list[str]]:
    losses = torch.cat([x[: len(batch.ids)] for batch, x in report.micro_batches])
    return losses, [name for batch, _ in report.micro_batches for name in batch.ids]


@pytest.mark.parametrize(("call", "where"), PLACES)
@pytest.mark.representative(call=[0, 1], where="backward")
@pytest.mark.representative(call=2, where="forward")
def test_the_step_is_that_which_would_have_been(quiet, batches, call, where):
    check_as_without(quiet, [batches[:3], batches[3:]], call, where=where)


def test_more_than_one_failure(quiet, batches):
    of_two = max((0, 1), key=lambda half: len(split(batches[1])[half].ids))
    for failing, sizes in (
        # The first and the second as they are, the first again, and the halves of the second, one
        # of which is split again.
        ((1, 3 if of_two == 0 else 4), [3, 3, 3, 1, 1, 1, 2]),
        # The first, its halves, the second, the halves of both.
        ((0, 3), [3, 1, 2, 3, 1, 1, 2, 2]),
    ):
        called = check_as_without(quiet, [batches[:2]], *failing, where="backward")
        assert sorted(called) == sorted(sizes)


def test_nothing_is_left_of_the_attempt_that_failed(make_train_state, batches):
    """Dropout on: what is redone is a function of the step, and of the pieces, alone."""
    results = []
    for extra in (0, 1):
        model, train_state = make_train_state()
        torch.rand(extra)
        with shortage(model, 1, where=("forward", "backward")[extra]):
            train_step(train_state, batches[:2], 4)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_statistics_of_batch_norms_are_those_of_one_update(batch_norm, batches):
    """The mean of the pieces' is that of the whole; their variances leave out how means differ."""
    (model, train_state), (_, expected) = batch_norm(), batch_norm()
    with shortage(model, 1, where="backward"):
        train_step(train_state, batches[:2], 0)
    train_step(expected, batches[:2], 0)
    (mean, variance), (whole_mean, whole_variance) = train_state.statistics, expected.statistics
    assert mean.abs().max() > 1e-3
    torch.testing.assert_close(mean, whole_mean, rtol=1e-4, atol=1e-6)
    assert (variance <= whole_variance * 1.05).all()
    torch.testing.assert_close(variance, whole_variance, rtol=0.05, atol=1e-3)


def test_an_utterance_that_does_not_fit_alone_is_named(quiet, batches):
    model, train_state = quiet()
    with (
        shortage(model, *range(20), where="forward", error=lambda: RuntimeError(CPU_ERROR)),
        pytest.raises(OutOfMemory) as failed,
    ):
        train_step(train_state, batches[:1], 0)
    frames = batches[0].frames.lengths[0]
    message = str(failed.value)
    assert f"utterance '0-0' alone does not fit in memory: it has {frames} encoder fr" in message
    assert "and 5 tokens; this process has held" in message
    assert "4000000000 bytes" in message
    assert "data.max_duration" in message


def test_a_recorded_micro_batch_is_not_split(quiet, batches):
    _, train_state = quiet()

    def replay(batch, counts, **options):
        raise torch_error()

    with pytest.raises(OutOfMemory, match=r"CUDA graph cannot be split: lower data.frame_budget"):
        train_step(replace(train_state, graph=replay), batches[:1], 0)


def test_what_counts_as_want_of_memory():
    assert is_out_of_memory(torch_error())
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError(CPU_ERROR))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    unsupported = "could not create a primitive descriptor for the convolution forward propagation"
    assert not is_out_of_memory(RuntimeError(unsupported))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(real.value)


def test_pieces_are_not_compiled(quiet, batches, monkeypatch):
    """They have shapes of their own, and a compiler would take minutes for each."""
    model, train_state = quiet()
    rows = []

    def compiled(batch, **options):
        rows.append(batch.frames.rows)
        return model.forward(batch, **options)

    monkeypatch.setattr(model, "_compiled_call_impl", compiled)
    with shortage(model, 1, where="backward"):
        report = train_step(train_state, batches[:3], 0)
    assert splits(report) == 1
    assert rows == [60, 60, 60]


def test_a_run_tells_once_and_counts(make_config, tmp_path, monkeypatch, caplog):
    calls = iter(range(1000))
    forward = ASRModel.forward

    def short(self, batch, **options):
        if next(calls) in (4, 9):
            raise torch_error()
        return forward(self, batch, **options)

    monkeypatch.setattr(ASRModel, "forward", short)
    assert run(make_config(training={"max_steps": 6})) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["oom_splits"] for line in lines] == [0, 0, 1, 2, 2, 2]
    assert caplog.text.count("there was not enough memory for a micro-batch, near step 3") == 1
    assert caplog.text.count("not enough memory") == 1
    # It goes on counting after a resume.
    assert run(make_config(training={"max_steps": 7})) == 0
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["oom_splits"] == 2


def test_the_parts_hold_what_the_whole_held_and_no_tail(batches):
    whole = batches[0]
    parts = split(whole)
    assert parts[0].ids + parts[1].ids == whole.ids
    for name in ("audio", "tokens", "text"):
        packed = getattr(whole, name)
        together = [piece for part in parts for piece in getattr(part, name).unpack()]
        for piece, expected in zip(together, packed.unpack(), strict=False):
            assert torch.equal(piece, expected), name
    assert sum(part.audio_seconds for part in parts) == pytest.approx(whole.audio_seconds)
    for name in ("num_targets", "num_monotonic_targets", "num_frames", "num_tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    targets = torch.cat([part.targets for part in parts])
    assert torch.equal(targets, whole.targets[: whole.tokens.layout.total])
    frames = [length for part in parts for length in part.frames.lengths]
    assert frames == list(whole.frames.lengths[:3])
    first = parts[0]
    assert not first.frames.has_tail
    assert first.audio.values.shape[0] == first.audio.layout.total
    assert first.audio.values.untyped_storage().nbytes() < whole.audio.values.nbytes
    assert first.monotonic.shape == (len(first.ids),)


def test_the_cut_is_in_the_middle_of_the_work():
    places = set()
    for whole in map(make_batch, range(8)):
        sizes = [n + 5 for n in whole.frames.lengths[:3]]
        first, second = split(whole)
        places.add(len(first.ids))
        best = min(abs(2 * sum(sizes[:position]) - sum(sizes)) for position in (1, 2))
        assert abs(2 * sum(sizes[: len(first.ids)]) - sum(sizes)) == best
        assert len(second.ids) == 3 - len(first.ids)
    assert places == {1, 2}


def test_a_single_utterance_cannot_be_split(batches):
    alone = utterances(batches[0], 1, 2)
    assert alone.ids == ("0-1",)
    assert (alone.num_targets, alone.num_monotonic_targets) == (4, 0)
    with pytest.raises(ValueError, match=r"`batch` must have two utterances or more .* has 1"):
        split(alone)
    with pytest.raises(ValueError, match="has 0"):
        split(collate([], eos_id=1, pad_id=0))


STEPS, MICRO_BATCHES = 3, 3


def wrapped_quiet(context: DistributedContext, *, one_bucket: bool) -> tuple[ASRModel, TrainState]:
    """Nothing random, no batch norm; by default a bucket of gradients for every few parameters."""
    alone = DistributedContext(0, 1, context.device)
    model, train_state = make(quiet_config(OptimizerConfig(eps=1e-4)), alone)
    wrapped = replicate(model, context)
    if not one_bucket:
        options = {SYNC_BUFFERS: False}
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=0.004, gradient_as_bucket_view=True, **options
        )
    assert isinstance(wrapped, DistributedDataParallel)
    return model, replace(
        train_state, model=wrapped, context=context, grad_sync=DDPGradientSync(wrapped)
    )


def own(context: DistributedContext, step: int) -> list[Batch]:
    first = step * MICRO_BATCHES * context.size + context.rank
    return [make_batch(first + n * context.size) for n in range(MICRO_BATCHES)]


def train(
    context: DistributedContext, failures: dict[int, int], where: str, **options
) -> tuple[list, nn.Module]:
    model, train_state = wrapped_quiet(context, **options)
    values = []
    for step in range(STEPS):
        fails = [failures[step]] if step in failures and context.rank == 1 else []
        with shortage(model, *fails, where=where):
            report = train_step(train_state, own(context, step), step)
        values.append(report.read())
    return values, model


def recover(context: DistributedContext):
    """In the first step, whose buckets are not yet those of the later ones, and in another."""
    cases = [(False, *case) for case in itertools.product(range(3), ("forward", "backward"))]
    plain, straight = train(context, {}, "forward", one_bucket=False)
    for one_bucket, call, where in [*cases, (True, 2, "forward"), (True, 2, "backward")]:
        case = f"{one_bucket=} {call=} {where=}"
        values, model = train(context, {0: call, 2: call}, where, one_bucket=one_bucket)
        assert [line.pop("splits") for line in values] == [1, 0, 1], case
        for x, y in zip(values, plain, strict=True):
            expected = {name: y[name] for name in x}
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5, msg=case)
        torch.testing.assert_close(
            [*model.parameters()], [*straight.parameters()], rtol=1e-4, atol=1e-5, msg=case
        )
        both = context.all_gather([p.detach() for p in model.parameters()])
        assert all(torch.equal(x, y) for x, y in zip(*both, strict=True)), case


def alone(context: DistributedContext):
    """An utterance that does not fit at all ends every rank, and names itself."""
    model, train_state = wrapped_quiet(context, one_bucket=True)
    calls = range(20) if context.rank == 1 else []
    try:
        with shortage(model, *calls, where="backward"):
            train_step(train_state, own(context, 0), 0)
    except OutOfMemory as error:
        sys.stdout.write(f"{error}\n")
        raise


@pytest.mark.slow
def test_the_gradient_is_that_without_a_failure_wherever_it_fails():
    check_ranks(recover)


def test_what_does_not_fit_at_all_ends_every_rank():
    first, second = run_ranks(alone, timeout_s=30.0)
    assert first.returncode
    assert second.returncode
    assert "alone does not fit in memory" in second.stdout
    assert "PeerFailed: rank 1: utterance '1-0' alone does not fit" in first.stderr
