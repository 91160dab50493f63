"""A teacher that labels utterances without text inside training."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.training.config import LossConfig, TeacherConfig
from effasr.training.resolve import resolve_config
from effasr.training.step import train_step
from effasr.training.untranscribed.teacher import add_labels, averaged, emitted
from effasr_kernels import PackedLayout, PackedSequence
from tests.training.conftest import built

SHAPE = StaticShape(90, 60, 8)


@pytest.fixture
def state(make_with_teacher):
    model, made = built(make_with_teacher())
    with torch.no_grad():
        for value in made.average.average.values():
            value += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    return model, made


def audio(count: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=int(n)).astype(np.float32) for n in draw.integers(9e3, 2e4, count)]


def batch_of(waves, texts, rooms):
    each_item = zip(waves, texts, rooms, strict=True)
    examples = [
        Example(str(n), wave, [] if text is None else [2], text, reserved=room)
        for n, (wave, text, room) in enumerate(each_item)
    ]
    return collate(examples, SHAPE, eos_id=1, pad_id=0)


def texts_of(text: PackedSequence) -> list[list[int]]:
    return [item.tolist() for item in text.unpack()]


def test_greedy_labels_in_rows_of_a_static_shape():
    frames = PackedLayout.from_lengths([6, 0, 5, 4], rows=20, num_sequences=6)
    best = torch.tensor([9, 3, 3, 9, 3, 4, 5, 5, 9, 9, 6, 7, 8, 7, 8, *[2] * 5])
    says = emitted(best, frames, blank_id=9)
    assert says[15:].sum() == 0
    text = PackedSequence(
        torch.tensor([1, 2, 0, 0, 0, 0, 0, 0, 0, 0]),
        PackedLayout.from_lengths([0, 2, 0, 0], rows=10, num_sequences=6, static_max_seqlen=5),
    )
    room = torch.tensor([5, 0, 2, 3, 0, 0])
    labelled, tokens = add_labels(text, best, says, frames, room)
    # The last has one token too many.
    assert tokens.tolist() == [3, 0, 2, 4, 0, 0]
    assert labelled.values.shape == (10,)
    assert texts_of(labelled) == [[3, 3, 4], [1, 2], [5, 6], [], [], []]
    assert not labelled.layout.known_on_host
    assert labelled.layout.max_seqlen_bound == 5
    nothing = torch.zeros(6, dtype=torch.int64)
    same, none = add_labels(text, best, says, frames, nothing)
    assert texts_of(same) == texts_of(text)
    assert not none.any()


def test_the_teacher_writes_what_the_average_says(state):
    model, made = state
    waves = audio(4)
    texts, rooms = [[4, 5], None, None, [6]], [0, 20, 20, 0]
    batch = batch_of(waves, texts, rooms)
    (labelled,), added = made.teacher.label([batch], 0)
    with made.average.in_place(), torch.no_grad():
        model.eval()
        expected = ctc_greedy(model, model.encode(batch), blank_id=12)
        model.train()
    result = texts_of(labelled.text)
    assert result[0] == [4, 5]
    assert result[3] == [6]
    assert result[1:3] == expected[1:3]
    assert expected[1]
    assert labelled.monotonic.tolist()[:4] == [True] * 4
    assert added.item() == len(expected[1]) + len(expected[2]) + 2
    assert labelled.label_room is None
    assert labelled.text.values.shape == batch.text.values.shape
    line = made.teacher.line()
    assert (line["teacher_utterances"], line["teacher_used"]) == (2, 1.0)
    assert 0 < line["teacher_confidence"] < 1
    assert made.teacher.line()["teacher_used"] is None


def test_labels_train_as_transcripts_do(state):
    model, made = state
    waves = audio(3)
    batch = batch_of(waves, [[4, 5], None, None], [0, 20, 20])
    (labelled,), added = made.teacher.label([batch], 0)
    written = texts_of(labelled.text)
    same = batch_of(waves, [[4, 5], *written[1:3]], [0, 0, 0])
    assert same.num_monotonic_targets == batch.num_monotonic_targets + int(added)
    model.eval()
    item, other = model(labelled), model(same)
    torch.testing.assert_close(item.ctc, other.ctc)
    gradients = [torch.autograd.grad(x.ctc, model.ctc_head.weight)[0] for x in (item, other)]
    torch.testing.assert_close(*gradients)
    # The decoder learns from transcripts alone.
    alone = model(batch_of(waves[:1], [[4, 5]], [0]))
    torch.testing.assert_close(item.cross_entropy, alone.cross_entropy)


def test_a_step_divides_by_the_labels_too(state):
    _, made = state
    batch = batch_of(audio(3), [[4, 5], None, None], [0, 20, 20])
    (labelled,), added = made.teacher.label([batch], 0)
    report = train_step(made, [batch], 0)
    counts = report.counts.read()
    assert counts[1] == batch.num_monotonic_targets + added.item()
    assert counts[0] == batch.num_targets
    assert report.read()["finite"] == 1
    assert labelled.num_targets == batch.num_targets


def test_labels_that_are_long_or_unsure_are_not_used(state):
    _, made = state
    batch = batch_of(audio(3), [[4, 5], None, None], [0, 1, 20])
    (labelled,), added = made.teacher.label([batch], 0)
    lengths = labelled.text.layout.cu_seqlens.diff().tolist()
    assert lengths[1] == 0
    assert labelled.monotonic.tolist()[:3] == [True, False, True]
    assert made.teacher.line()["teacher_over_room"] == 0.5
    made.teacher._config = TeacherConfig(min_confidence=1.0)
    (unsure,), none = made.teacher.label([batch], 0)
    assert none.item() == 0 < added.item()
    assert unsure.monotonic.tolist()[:3] == [True, False, False]
    made.teacher._config = TeacherConfig(after_step=3)
    (early,), none = made.teacher.label([batch], 2)
    assert none.item() == 0
    assert early.text is batch.text
    assert made.teacher.label([batch], 3)[1].item() == added.item()


def test_the_teacher_has_the_weights_of_the_average_without_a_copy(state):
    model, made = state
    teacher, average = averaged(model, made.average), made.average.average
    for name, parameter in teacher.named_parameters():
        assert parameter.data_ptr() == average[name].data_ptr()
        assert not parameter.requires_grad
    for (_, item), (_, other) in zip(teacher.named_buffers(), model.named_buffers(), strict=True):
        assert item is other
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(
        p.data_ptr() for p in teacher.parameters()
    )
    before = teacher.ctc_head.weight.clone()
    made.average.update(5)
    assert not teacher.ctc_head.weight.equal(before)


def test_the_average_knows_by_how_much_the_batch_is_larger(make_with_teacher):
    ruled = {"training": {"ema_reference_micro_batches": 2}}
    for micro_batches, settings, scale in ((2, {}, 1), (8, ruled, 4), (8, {}, 1)):
        settings = settings | {"data": {"micro_batches": micro_batches}}
        assert built(make_with_teacher(**settings))[1].average.scale == scale


def test_error_messages(make_with_teacher, make_config, model_config):
    without_ctc = {"model": replace(model_config, ctc=False), "loss": LossConfig()}
    for config, message in (
        (make_with_teacher(training={"teacher": None}), r"`training\.teacher` must be given"),
        (make_config(training={"teacher": TeacherConfig()}), "`training.teacher` must be given"),
        (make_with_teacher(training={"ema_decay": None}), "`training.ema_decay` must be given"),
        (make_with_teacher(training={"strategy": "fsdp2"}), "`training.strategy` must be ddp"),
        (make_with_teacher(**without_ctc), r"`model\.ctc`"),
        (make_with_teacher(loss=LossConfig(ctc_weight=0.0)), "`loss.ctc_weight` must be greater"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_config(config, None)
    for options in ({"after_step": -1}, {"min_confidence": 1.5}):
        with pytest.raises(ValueError, match=next(iter(options))):
            TeacherConfig(**options)
