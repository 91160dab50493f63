"""Steps in which memory runs out, by failures that are put in."""

from dataclasses import replace

import pytest
import torch

from effasr.data.collate import collate
from effasr.model.asr import ASRModel
from effasr.training.fault_tolerance.nonfinite_guard import NonFiniteGuard
from effasr.training.fault_tolerance.oom_recovery import (
    OutOfMemory,
    is_out_of_memory,
    split,
    utterances,
)
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import StepReport, TrainState, train_step
from effasr.training.trainer import run
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


@pytest.mark.parametrize(("call", "where"), PLACES)
@pytest.mark.representative(call=[0, 1], where="backward")
@pytest.mark.representative(call=2, where="forward")
def test_the_step_is_that_which_would_have_been(quiet, batches, call, where):
    (model, train_state), (straight, expected) = quiet(), quiet()
    seen, requested = gradients_seen(train_state), gradients_seen(expected)
    for step in range(2):
        with shortage(model, *([call] if step == 1 else []), where=where):
            report = train_step(train_state, batches[3 * step : 3 * step + 3], step)
        plain = train_step(expected, batches[3 * step : 3 * step + 3], step)
    assert splits(report) == 1
    torch.testing.assert_close(seen, requested, rtol=1e-5, atol=1e-6)
    for (name, x), y in zip(model.named_parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=name)
    expected = plain.read() | {"splits": report.read()["splits"]}
    assert report.read() == pytest.approx(expected, rel=1e-5)
    losses = torch.cat([x[: len(b.ids)] for b, x in report.micro_batches])
    plain_losses = torch.cat([x[: len(b.ids)] for b, x in plain.micro_batches])
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=1e-5)
    assert [n for b, _ in report.micro_batches for n in b.ids] == [
        n for b in batches[3:6] for n in b.ids
    ]


def test_more_than_one_failure(quiet, batches):
    of_two = max((0, 1), key=lambda half: len(split(batches[1])[half].ids))
    for failing, sizes in (
        # The first and the second as they are, the first again, and the halves of the second, one
        # of which is split again.
        ((1, 3 if of_two == 0 else 4), [3, 3, 3, 1, 1, 1, 2]),
        # The first, its halves, the second, the halves of both.
        ((0, 3), [3, 1, 2, 3, 1, 1, 2, 2]),
    ):
        (model, train_state), (_, expected) = quiet(), quiet()
        seen, requested = gradients_seen(train_state), gradients_seen(expected)
        with shortage(model, *failing, where="backward") as calls:
            report = train_step(train_state, batches[:2], 0)
        train_step(expected, batches[:2], 0)
        assert sorted(len(batch.ids) for batch in calls) == sorted(sizes)
        assert [name for b, _ in report.micro_batches for name in b.ids] == [
            name for b in batches[:2] for name in b.ids
        ]
        assert splits(report) == 2
        torch.testing.assert_close(seen, requested, rtol=1e-5, atol=1e-6)


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


def test_a_loss_that_is_not_finite_is_still_left_out(quiet, batches, broken_batch):
    model, train_state = quiet()
    before = [p.detach().clone() for p in model.parameters()]
    with shortage(model, 1, where="forward"):
        report = train_step(train_state, [batches[0], broken_batch], 0)
    assert not report.read()["finite"]
    for x, y in zip(model.parameters(), before, strict=True):
        assert torch.equal(x, y)
    guard = NonFiniteGuard(model, train_state.config.autocast, "skip", train_state.context, None)  # type: ignore[arg-type]
    assert guard._describe(report)["utterances"] == ["9-2"]


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

    def replay(batch, counts):
        raise torch_error()

    with pytest.raises(OutOfMemory, match=r"CUDA graph cannot be split: lower data.frame_budget"):
        train_step(replace(train_state, graph=replay), batches[:1], 0)


def test_other_errors_are_not_taken_for_this_one(quiet, batches):
    model, train_state = quiet()
    with (
        shortage(model, 0, where="backward", error=lambda: RuntimeError("shape mismatch")),
        pytest.raises(RuntimeError, match="shape mismatch"),
    ):
        train_step(train_state, batches[:1], 0)


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


def test_batches_of_one_shape_go_on_after_it(quiet):
    """Nothing of the pieces' shapes is left behind."""
    model, train_state = quiet()
    for step in range(3):
        with shortage(model, *([1] if step == 0 else []), where="backward"):
            report = train_step(train_state, [make_batch(step), make_batch(step + 5)], step)
    assert splits(report) == 0
    assert report.read()["finite"]


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


def test_the_parts_hold_what_the_whole_held(batches):
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


def test_the_parts_have_no_tail_and_no_memory_of_the_whole(batches):
    whole = batches[0]
    first, _ = split(whole)
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
