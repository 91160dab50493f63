"""Audio without text: pretraining on it, runs that start from that, and labels of a teacher."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from effasr import checkpoint
from effasr import config as configuration
from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.tokenizer import NoTokenizer
from effasr.decoding.checks import choose_method
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.model.config import ModelConfig
from effasr.training import build
from effasr.training.config import LossConfig, TeacherConfig, TrainConfig
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.trainer import run
from effasr.training.untranscribed.pretraining import CodeUse, entropy
from effasr.training.untranscribed.teacher import add_labels, averaged, emitted
from effasr_kernels import PackedLayout, PackedSequence
from tests.training.conftest import BEST_RQ, built, published


def test_damaged_audio_of_a_validation_set_is_counted(make_pretraining, tones, tmp_path):
    """Its header is sound, so nothing shows before the validation."""
    rows = [json.loads(line) for line in (tones / "test.jsonl").read_text().splitlines()]
    first, *whole = [row | {"audio_filepath": f"{tones}/{row['audio_filepath']}"} for row in rows]
    broken = np.full(int(first["duration"] * 16_000), np.nan, dtype=np.float32)
    soundfile.write(tmp_path / "broken.wav", broken, 16_000, subtype="FLOAT")
    damaged = [first | {"audio_filepath": "broken.wav"}]
    sets = {"whole": whole, "mixed": damaged + whole, "damaged": damaged}
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"validation": [f"{tmp_path}/{name}.jsonl" for name in sets]}
    assert run(make_pretraining(data=data, training={"max_steps": 1, "validate_every": 1})) == 0
    whole, mixed, damaged = read_lines(tmp_path / "run/validation.jsonl")
    assert (whole["failed"], mixed["failed"], damaged["failed"]) == (0, 1, 1)
    assert mixed["cross_entropy"] == whole["cross_entropy"]
    assert damaged["cross_entropy"] is None


def test_the_loss_falls_and_starts_at_that_of_guessing(make_pretraining, tones, tmp_path):
    training = {"max_steps": 60, "log_every": 10, "validate_every": 30, "ema_decay": None}
    data = {"validation": str(tones / "test.jsonl")}
    config = make_pretraining(training=training, data=data)
    assert run(replace(config, optimizer=replace(config.optimizer, lr=5e-3))) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    # Xavier's weights give logits of variance 2 or so to normalised frames.
    assert lines[0]["cross_entropy"] < math.log(BEST_RQ.codes) + 1.5
    assert lines[-1]["cross_entropy"] < lines[0]["cross_entropy"] - 0.3
    for line in lines:
        assert 0 < line["code_entropy_0"] <= math.log(BEST_RQ.codes)
        assert line["code_perplexity_0"] == pytest.approx(math.exp(line["code_entropy_0"]))
        assert line["tokens"] == 0
        assert line["useful_tflops"] > 0
    validations = read_lines(tmp_path / "run" / "validation.jsonl")
    assert [line["step"] for line in validations] == [30, 60]
    path = tmp_path / "run" / "checkpoints" / "step_00000060"
    state = torch.load(path / "training.pt", weights_only=True)
    assert state["best"] == min(line["cross_entropy"] for line in validations)
    # It writes no text.
    loaded = checkpoint.load_model(path)
    assert isinstance(loaded.tokenizer, NoTokenizer)
    with pytest.raises(ValueError, match="pretrained on audio alone"):
        choose_method(loaded.model, "auto")
    with pytest.raises(ValueError, match="fine-tune it with init_from"):
        loaded.tokenizer.encode("one", "en")


@pytest.mark.parametrize("ctc", [True, False])
def test_another_model_takes_the_encoder(make_pretraining, make_config, tones, tmp_path, ctc):
    assert run(make_pretraining(name="first", training={"max_steps": 2})) == 0
    source = tmp_path / "first"
    local = {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16}
    mapping = configuration.to_mapping(make_config(name="second", training={"max_steps": 2}))
    mapping |= {"init_from": str(source), "model": {"ctc": ctc, "decoder": None if ctc else local}}
    mapping["loss"] = {}
    recipe = tmp_path / "second.yaml"
    recipe.write_text(json.dumps(mapping))
    config = configuration.load(TrainConfig, recipe, [])
    assert config.model.best_rq is None
    assert config.model.encoder.width == 16
    resolved = resolve_config(config, None)
    tokenizer = find_tokenizer(resolved, None)
    assert not isinstance(tokenizer, NoTokenizer)
    model = build.build_model(resolved, tokenizer.vocab_size, None, torch.device("cpu"))
    assert model.vocab_size == tokenizer.vocab_size
    pretrained = published(source)
    local = model.state_dict()
    used = [name for name in pretrained if name.startswith("encoder.")]
    assert used
    assert all(local[name].equal(pretrained[name]) for name in used)
    for stop in (1, None):
        assert run(replace(config, training=replace(config.training, stop_at=stop))) == 0
    assert choose_method(
        checkpoint.load_model(checkpoint.resolve(tmp_path / "second")).model, "auto"
    )


def test_pretraining_goes_on_and_new_heads_are_trained(
    make_pretraining, make_config, tmp_path, model_config
):
    assert run(make_pretraining(name="first", training={"max_steps": 1})) == 0
    source, cpu = str(tmp_path / "first"), torch.device("cpu")
    resolved = resolve_config(make_pretraining(init_from=source, model=ModelConfig()), None)
    assert resolved.model.best_rq == BEST_RQ
    weights = published(source)
    model = build.build_model(resolved, 1, None, cpu)
    assert all(weights[name].equal(value) for name, value in model.state_dict().items())
    options = {"init_from": source, "model": model_config}
    with pytest.raises(ValueError, match=r"`model\.ctc_head` must not be in `training\.freeze`"):
        build.build_model(make_config(training={"freeze": ("ctc_head",)}, **options), 30, None, cpu)
    frozen = make_config(training={"freeze": ("encoder",)}, **options)
    assert build.build_model(frozen, 30, None, cpu).ctc_head is not None


def test_error_messages(make_pretraining, make_with_teacher, make_config, model_config, tones):
    without_ctc = {"model": replace(model_config, ctc=False), "loss": LossConfig()}
    tokenizer = {"tokenizer": str(tones / "tokenizer")}
    for config, message in (
        (make_pretraining(data={"text": "required"}), r"`data\.text` must be ignored"),
        (make_pretraining(data=tokenizer), r"`data\.tokenizer` must be"),
        (make_config(data={"text": "ignored"}), r"`data\.text` must be required"),
        (make_pretraining(loss=LossConfig(guided_weight=1.0)), "`loss.guided_weight` must be 0"),
        (make_pretraining(loss=LossConfig(ctc_weight=0.5)), "must not use CTC"),
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


def test_the_use_of_codes_is_their_entropy_since_the_last_line(make_pretraining):
    counts = torch.tensor([[5, 5, 0, 0], [4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    expected = torch.tensor([math.log(2), 0.0, math.log(4), 0.0], dtype=torch.float64)
    torch.testing.assert_close(entropy(counts), expected)
    config = resolve_config(make_pretraining(), None)
    model = build.build_model(config, 1, None, torch.device("cpu"))
    model.best_rq.code_counts[:] = torch.arange(16)
    use = CodeUse(model.best_rq)
    state = use.state_dict()
    assert use.line()["code_entropy_0"] > 2
    assert use.line()["code_entropy_0"] == 0
    use.load_state_dict(state)
    assert use.line()["code_perplexity_1"] > 8


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
    same, none = add_labels(text, best, says, frames, torch.zeros(6, dtype=torch.int64))
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
    same = batch_of(waves, [[4, 5], *texts_of(labelled.text)[1:3]], [0, 0, 0])
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
    assert labelled.text.layout.cu_seqlens.diff().tolist()[1] == 0
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


def test_without_memory_for_labels_the_remedy_is_named(state, monkeypatch):
    def label(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(state[1].teacher, "label", label)
    with pytest.raises(OutOfMemory, match=r"2\.00 GiB.*lower data\.frame_budget"):
        train_step(state[1], [], 0)


def test_the_average_knows_by_how_much_the_batch_is_larger(make_with_teacher):
    ruled = {"training": {"ema_reference_micro_batches": 2}}
    for micro_batches, settings, scale in ((2, {}, 1), (8, ruled, 4), (8, {}, 1)):
        settings = settings | {"data": {"micro_batches": micro_batches}}
        assert built(make_with_teacher(**settings))[1].average.scale == scale
