"""Several processes: the same training as in one, and the same files, with each strategy.

Batches differ between ranks in size and kind, and parts of the model are frozen.
"""

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from effasr.checkpoint import save_model
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, TextExample, collate, collate_text
from effasr.data.config import DataConfig
from effasr.data.conversation.batch import ConversationBatch
from effasr.distributed.averager import DelayedConfig, LocalSGDConfig
from effasr.distributed.fsdp import full_tensor, shard
from effasr.distributed.grad_sync import DDPGradientSync, FlatGradientSync
from effasr.distributed.process_group import DistributedContext
from effasr.distributed.tensor_files import read_whole
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQConfig
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.experts import ExpertsConfig
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig, initialize_state
from effasr.training import build, cuda_graph
from effasr.training.config import LossConfig, TeacherConfig, TrainConfig
from effasr.training.resolve import resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import TrainState, train_step
from effasr.training.strategies.parallelism import average_over_ranks
from effasr.training.trainer import run
from tests.support.quiet_run import (
    ALONE,
    ENDS,
    VOCABULARY,
    alike,
    empty_or_uneven,
    examples_of,
    make,
    outcome,
    quiet_config,
    train,
    uneven_batch,
    weights,
    with_loop,
)
from tests.support.run_ranks import check_ranks, train_on_ranks
from tests.support.speech_llm import conversations, make_conversation_batch, speech_llm_config
from tests.training.conftest import published
from tests.training.test_equivalence import graphed, record

STEPS = 3
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
TALK = StaticShape(40, 70, 6, longest_frames=20, longest_tokens=40)


def equal(context: DistributedContext):
    """One process, ddp and fsdp2 train alike; so do their averages of the weights."""
    config = quiet_config(OPTIMIZER, ema_decay=0.9, clip=0.5)
    alike(context, empty_or_uneven, config, strategies=("ddp", "fsdp2"))
    model, state = make(with_loop(config, strategy="fsdp2"), context)
    parts = sum(cast(DTensor, p).to_local().numel() for p in state.model.parameters())
    assert parts < 0.6 * sum(p.numel() for p in model.parameters())


def recorded(context: DistributedContext):
    """Ranks that replay a graph each, and add up gradients afterwards, train as with ddp."""
    # A recording that a CPU can replay.
    cuda_graph.check_recordable = lambda model, context: None
    cuda_graph._capture = record
    for strategy in ("ddp", "local_sgd"):
        results = []
        for is_recorded in (False, True):
            config = quiet_config(
                OPTIMIZER,
                strategy=strategy,
                local_sgd=LocalSGDConfig(period=2, warmup_steps=1),
                cuda_graph=is_recorded,
                clip=0.5,
            )
            model = build.build_model(config, VOCABULARY, None, context.device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(context.rank)  # All begin with the weights of rank 0.
            state = build.build_train_state(config, model, context)
            # As learners begin, which must leave each gradient where ranks exchange it.
            initialize_state(state.optimizer)
            assert (state.graph is not None) == is_recorded
            kind = FlatGradientSync if is_recorded else DDPGradientSync
            assert isinstance(state.grad_sync, kind)
            figures = train(state, range(4), context, empty_or_uneven)
            results.append([*figures, *weights(model, state)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def half_precision(context: DistributedContext):
    """In bfloat16, fsdp2 gathers parameters in it, and copies of weights change no bit."""
    loss = []
    for strategy in ("ddp", "fsdp2"):
        config = quiet_config(OptimizerConfig(), strategy=strategy, precision="bfloat16")
        _, state = make(config, context)
        loss.append(torch.stack([x[0] for x in train(state, range(3), context, uneven_batch)]))
        assert all(p.dtype == torch.float32 for p in state.model.parameters())
    torch.testing.assert_close(*loss, rtol=0.02, atol=0.0)
    plain = quiet_config(OPTIMIZER, precision="bfloat16", bfloat16_weights=False, clip=0.5)
    copies = with_loop(plain, bfloat16_weights=True)
    assert_equal(*(outcome(config, context) for config in (plain, copies)))


def assert_equal(first: list[Tensor], second: list[Tensor]):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def local(context: DistributedContext):
    """Ranks go apart after the warm-up, and meet at the mean at the end of each period."""
    reference = quiet_config(OptimizerConfig(lr=1e-2), ema_decay=0.9)
    periods = LocalSGDConfig(period=3, warmup_steps=2)
    model, state = make(with_loop(reference, strategy="local_sgd", local_sgd=periods), context)
    expected, plain = make(reference, context)
    for step in range(8):
        before = []
        averager = state.averager
        after = averager.after

        def seen(step: int, before=before, after=after):
            before += [p.detach().clone() for p in model.parameters()]
            after(step)

        object.__setattr__(averager, "after", seen)
        train(state, range(step, step + 1), context, empty_or_uneven)
        object.__setattr__(averager, "after", after)
        now = weights(model, state)
        both = context.all_gather(now)
        is_equal = all(torch.equal(x, y) for x, y in zip(*both, strict=True))
        assert is_equal == (step < 2 or step in (4, 7)), step
        if step < 2:
            train(plain, range(step, step + 1), context, empty_or_uneven)
            torch.testing.assert_close(now, [*expected.parameters()])
        if step in (4, 7):
            for x, *parts in zip(now, *context.all_gather(before), strict=True):
                torch.testing.assert_close(x, torch.stack(parts).mean(0))
    train(state, range(8, 9), context, empty_or_uneven)
    mine = everything_of(model, state)
    means = [torch.stack(both).mean(0) for both in zip(*context.all_gather(mine), strict=True)]
    assert any(not torch.equal(x, y) for x, y in zip(mine, means, strict=True))
    average_over_ranks(state, context)
    torch.testing.assert_close(everything_of(model, state), means)


def everything_of(model: ASRModel, state: TrainState) -> list[Tensor]:
    assert state.average is not None
    moments = [
        value.clone()
        for p in model.parameters()
        for name, value in state.optimizer.state[p].items()
        if name.startswith("exp_avg")
    ]
    averages = [value.clone() for value in state.average.average.values()]
    return [*weights(model, state), *averages, *moments]


def broken(context: DistributedContext):
    """A gradient that is not finite on one rank alone: no rank makes the update."""
    settings = LocalSGDConfig(period=100, warmup_steps=0)
    config = quiet_config(OptimizerConfig(), strategy="local_sgd", local_sgd=settings)
    model, state = make(config, context)
    before = weights(model, state)
    first = next(model.parameters())
    factor = torch.nan if context.rank == 1 else 1.0
    handle = first.register_hook(lambda gradient: gradient * factor)
    report = train_step(state, [uneven_batch(context.rank)], 0)
    assert report.read()["loss"] == report.read()["loss"]
    assert not report.read()["finite"]
    assert_equal(before, weights(model, state))
    handle.remove()
    assert train_step(state, [uneven_batch(2 + context.rank)], 1).read()["finite"]


def test_two_ranks_train_as_each_strategy_says():
    check_ranks(equal, recorded, half_precision, local, broken)


def exact(number: int) -> Batch:
    """Of a size of its own; every fourth is empty, so that it has no row at all."""
    return collate([] if number % 4 == 3 else examples_of(number), **ENDS)


def padded(number: int) -> Batch:
    return collate([] if number % 4 == 0 else examples_of(number), **ENDS, padded=True)


def mixed(number: int, *, aligned: bool = False) -> Batch:
    """Speech or text, by turns on either rank, and now and then neither."""
    shape, step = StaticShape(30, 40, 4), number // 4
    if (number + step) % 3:
        return uneven_batch(number)
    pairs = [] if step == 2 else [TextExample(str(n), [4, 5, 6 + n], [2], [7]) for n in range(3)]
    return collate_text(pairs, shape, **ENDS, aligned=aligned)


joint = partial(mixed, aligned=True)


def check_differs_between_ranks(kind_of):
    """In some step, the last micro-batches of two ranks are of two kinds."""
    kinds = [[kind_of(4 * step + n) for n in range(4)] for step in range(STEPS)]
    assert any(a != b for step in kinds for a, b in zip(step[::2], step[1::2], strict=True))


def strategies(context: DistributedContext):
    """Batches of any size, some of which have no row on one of the ranks."""
    for make_batch in (exact, padded):
        alike(context, make_batch, quiet_config(OPTIMIZER))


def with_text() -> TrainConfig:
    check_differs_between_ranks(lambda number: mixed(number).source is None)
    config = quiet_config(OPTIMIZER)
    text = TextEncoderConfig(layers=2, heads=2, feed_forward=16)
    return replace(config, model=replace(config.model, text_encoder=text))


def text(context: DistributedContext):
    alike(context, mixed, with_text())


def shared_text(context: DistributedContext):
    """The text encoder reads transcripts, too, and layers of speech read texts."""
    config = with_text()
    encoder = replace(config.model.text_encoder, shared_layers=1, upsample=2)
    loss = replace(config.loss, consistency_weight=0.5)
    config = replace(config, loss=loss, model=replace(config.model, text_encoder=encoder))
    alike(context, joint, config)
    alike(context, joint, with_loop(config, freeze=("text_encoder.layers", "encoder.layers.0")))


def recomputed(context: DistributedContext):
    """With layers computed again, each strategy trains as without, and each rank to the bit."""
    config = with_text()
    again = with_loop(config, activation_checkpointing=True)
    alike(context, mixed, config, again)
    for strategy in ("ddp", "local_sgd"):
        assert_equal(
            *(outcome(with_loop(c, strategy=strategy), context, mixed) for c in (config, again))
        )


def use_eager_compiler():
    # The default backend writes and compiles C++, which takes minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]


def compiled(context: DistributedContext):
    """Layers that are compiled one by one, from one graph for all of a kind."""
    use_eager_compiler()
    config = quiet_config(OPTIMIZER)
    changed = with_loop(config, compile=True, activation_checkpointing=True)
    alike(context, uneven_batch, config, changed)
    # Of the encoder and of the decoder.
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]


def experts(context: DistributedContext):
    """Routers and the weights of experts, also where a rank has no row."""
    config = quiet_config(OPTIMIZER)
    routed = ExpertsConfig(count=3, top_k=2, balance=0.1)
    assert config.model.decoder is not None
    model = replace(
        config.model,
        encoder=replace(config.model.encoder, experts=routed),
        decoder=replace(config.model.decoder, experts=routed),
    )
    alike(context, exact, replace(config, model=model))


def talk(number: int) -> ConversationBatch:
    """Spoken or written conversations, by turns on either rank, and now and then none."""
    spoken, step = conversations(number), number // 4
    written = spoken[1:2] if step < 2 else []
    return make_conversation_batch(written if (number + step) % 3 else spoken[2:], shape=TALK)


def spoken_config() -> TrainConfig:
    """A speech language model, for steps in which one rank has speech and the other text."""
    check_differs_between_ranks(lambda number: bool(sum(talk(number).clip_counts)))
    config, model = quiet_config(OPTIMIZER), speech_llm_config()
    return replace(config, model=replace(model, encoder=replace(model.encoder, layers=2)))


def language_model(context: DistributedContext):
    """With parts frozen before, behind and among the others, and with adapters."""
    config = spoken_config()
    frozen = ("language_model.model", "encoder.subsampling", "encoder.layers.0")
    alike(context, talk, with_loop(config, freeze=frozen))
    lora = LoRAConfig(
        rank=2,
        targets=("language_model.model.*_proj", "encoder.layers.1.*"),
        also_train=("language_model.adapter",),
    )
    alike(context, talk, replace(config, lora=lora))


def partly_frozen_language_model(context: DistributedContext):
    """Whole, and with other parts frozen."""
    for frozen in (
        (),
        ("language_model.model", "encoder"),
        ("language_model.model.embed_tokens", "encoder.layers"),
    ):
        alike(context, talk, with_loop(spoken_config(), freeze=frozen))


def partly_frozen_text(context: DistributedContext):
    """A rank has text where the other has speech, and one of the encoders is frozen."""
    for frozen in (("encoder",), ("text_encoder", "encoder.layers.0"), ("text_encoder.layers",)):
        alike(context, mixed, with_loop(with_text(), freeze=frozen))


def of_languages(number: int) -> Batch:
    batch = uneven_batch(number)
    counts = torch.arange(batch.tokens.layout.num_sequences)
    return replace(batch, expert=(counts + number) % 3)


def adapters_and_a_frozen_layer(context: DistributedContext):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(context.broadcast(folder)) / "base"
        plain = quiet_config(OPTIMIZER, ema_decay=0.9, clip=0.5)
        if context.is_main:
            tokenizer = Mock(save=lambda path: path.mkdir())
            save_model(path, build.build_model(plain, VOCABULARY, None, context.device), tokenizer)
        context.all_gather(None)
        lora = LoRAConfig(rank=3, alpha=6.0, also_train=("*norm*", "ctc_head"))
        adapted = replace(plain, init_from=str(path), lora=lora)
        alike(context, uneven_batch, adapted, strategies=("ddp", "fsdp2"))
        languages = replace(adapted, lora=replace(lora, by_language=("de", "nl")))
        alike(context, of_languages, languages, strategies=("ddp", "fsdp2"))
        local_sgd = LocalSGDConfig(period=2, warmup_steps=1)
        for config, loop in (
            (adapted, {"strategy": "local_sgd", "local_sgd": local_sgd}),
            (with_loop(plain, freeze=("encoder.layers.0",)),
             {"strategy": "delayed", "delayed": DelayedConfig(warmup_steps=1)}),
        ):  # fmt: skip
            begun, _ = make(config, ALONE)
            model, state = make(with_loop(config, **loop), context)
            train(state, range(STEPS), context, uneven_batch)
            average_over_ranks(state, context)
            for name, parameter in begun.named_parameters():
                if not parameter.requires_grad:
                    assert torch.equal(model.get_parameter(name), parameter), name
            assert_equal(*context.all_gather([*model.state_dict().values()]))
        context.all_gather(None)


def frozen_encoder(context: DistributedContext):
    plain = quiet_config(OPTIMIZER, ema_decay=0.9, clip=0.5)
    for frozen in (("encoder.layers.0",), ("encoder", "decoder.embed_tokens")):
        config = with_loop(plain, freeze=frozen)
        alike(context, uneven_batch, config, strategies=("ddp", "fsdp2"))


def pretraining(**training) -> TrainConfig:
    config = quiet_config(OPTIMIZER, **training)
    best_rq = BestRQConfig(codebooks=2, codes=16, code_width=4, span_s=0.16)
    model = replace(config.model, decoder=None, ctc=False, best_rq=best_rq)
    data = replace(config.data, text="ignored")
    return resolve_config(replace(config, model=model, data=data, loss=LossConfig()), None)


def teaching() -> TrainConfig:
    plain = quiet_config(OPTIMIZER)
    config = with_loop(plain, ema_decay=0.9, teacher=TeacherConfig(after_step=1))
    data = DataConfig(text="optional", micro_batches=4, frame_budget=60)
    return resolve_config(replace(config, data=data), None)


def untranscribed(number: int, *, reserved: int = 0) -> Batch:
    """Without texts; where tokens are reserved for labels, the first utterance has a text."""
    draw, examples = np.random.default_rng(number), []
    for n in range(1 + number % 3):
        audio = draw.normal(size=9_000).astype(np.float32)
        written = draw.integers(4, VOCABULARY, size=4).tolist()
        content = ([2, 3], written) if reserved and not n else ([], None)
        room = reserved if content[1] is None else 0
        examples.append(Example(f"{number}-{n}", audio, *content, reserved=room))
    return collate(examples, StaticShape(60, 40 if reserved else 1, 4), **ENDS)


taught = partial(untranscribed, reserved=9)


def optimizers(context: DistributedContext):
    """Each rank orthogonalizes some of the matrices; norms for LAMB are of whole parameters."""
    muon = OptimizerConfig(name="muon", lr=1e-2, eps=1e-4)
    alike(context, uneven_batch, quiet_config(muon, clip=0.5), strategies=("ddp",))
    lamb = OptimizerConfig(name="lamb", lr=1e-2, eps=1e-4)
    alike(context, empty_or_uneven, quiet_config(lamb), strategies=("ddp", "fsdp2"))


class Nested(torch.nn.Module):
    """Layers that have lists of modules, as T5's."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @classmethod
    def make(cls) -> torch.nn.Module:
        part = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        return cls(cls(part(), part()), cls(part(), part()))


def lists_in_layers(context: DistributedContext):
    torch.manual_seed(0)
    model, x = Nested.make(), torch.randn(3, 4)
    expected = model(x)
    expected.sum().backward()
    sharded = Nested.make()
    sharded.load_state_dict(model.state_dict())
    shard(sharded, context)
    result = sharded(x)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    for part, whole in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(part.grad), whole.grad)


def labels_and_codes(context: DistributedContext):
    """The same codes, masks, labels and counts as in one process."""
    alike(context, untranscribed, pretraining(), strategies=("ddp", "fsdp2"))
    alike(context, taught, teaching(), strategies=("ddp",))


def compiled_pretraining(context: DistributedContext):
    use_eager_compiler()
    alike(context, untranscribed, pretraining(), pretraining(compile=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "functions",
    [
        (strategies, optimizers, lists_in_layers),
        (text, experts),
        (shared_text,),
        (recomputed, partly_frozen_text),
        (compiled,),
        (compiled_pretraining,),
        (adapters_and_a_frozen_layer,),
        (frozen_encoder, labels_and_codes),
        (language_model,),
        (partly_frozen_language_model,),
    ],
    ids=lambda functions: functions[0].__name__,
)
@pytest.mark.representative(functions=(strategies, optimizers, lists_in_layers))
def test_training_on_two_ranks_is_that_of_one_process(functions):
    if "language_model" in functions[0].__name__:
        pytest.importorskip("transformers")
    check_ranks(*functions)


@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.extended
def test_a_compiled_step_without_texts_is_that_step():
    first, second = (
        outcome(pretraining(compile=is_compiled), ALONE, untranscribed)
        for is_compiled in (False, True)
    )
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "make_batch"), [(pretraining, untranscribed), (teaching, taught)]
)
def test_a_recorded_step_without_texts_is_that_step(config, make_batch):
    first, second = (outcome(config(), ALONE, make_batch, *change) for change in ((), (graphed,)))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_goes_on_with_another_strategy(make_config, model_config, tones, tmp_path):
    """On one, on two with fsdp2, and on one again; masks would be drawn by each rank."""
    # The gradient of a key's bias is rounding noise, which Adam would magnify.
    settings = {
        "model": model_config,
        "optimizer": OptimizerConfig(eps=1e-4),
        "data": {"validation": [str(tones / "test.jsonl")]},
    }
    loop = {"validate_every": 4}
    assert run(make_config(name="straight", training=loop, **settings)) == 0
    assert run(make_config(training=loop | {"stop_at": 3}, **settings)) == 0
    sharded = loop | {"strategy": "fsdp2", "stop_at": 9, "threads": 1}
    train_on_ranks(make_config(training=sharded, **settings))
    assert run(make_config(training=loop, **settings)) == 0
    ours, theirs = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert [line["step"] for line in ours] == list(range(1, 13))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    validated = read_lines(tmp_path / "run" / "validation.jsonl")
    assert [line["step"] for line in validated] == [4, 8, 12]
    got, expected = (
        # Ranks have running statistics of their own batches, of which the mean is kept.
        {n: x for n, x in state.items() if "running" not in n and "tracked" not in n}
        for state in (
            published(tmp_path / name / "checkpoints" / "step_00000012")
            for name in ("run", "straight")
        )
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "local_sgd"])
@pytest.mark.representative(strategy="fsdp2")
def test_two_ranks_go_on_to_the_last_bit(make_config, tmp_path, strategy):
    loop = {"strategy": strategy, "threads": 1, "max_steps": 8}
    if strategy == "local_sgd":
        loop["local_sgd"] = LocalSGDConfig(period=3, warmup_steps=1)
    newest = tmp_path / "run" / "checkpoints" / "step_00000008"
    ends = []
    for _ in range(2):
        train_on_ranks(make_config(training=loop))
        ends.append(published(newest) | read_whole(newest / "training"))
        parts = [file.stat().st_size for file in (newest / "training").glob("*.distcp")]
        # As if the run had been killed after the checkpoint before.
        shutil.rmtree(newest)
    assert ends[0].keys() == ends[1].keys()
    assert any(name.startswith("trained/") for name in ends[0])
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    if strategy == "fsdp2":
        # Each rank writes its part.
        assert len(parts) == 2
        assert max(parts) < 0.7 * sum(parts)


FSDP2 = {"strategy": "fsdp2"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": FSDP2 | {"cuda_graph": True}},
         r"`training\.cuda_graph` must be false with training\.strategy fsdp2"),
        ({"training": FSDP2, "data": {"frame_budget": "auto"}},
         r"`data\.frame_budget` must be a number with training\.strategy fsdp2"),
        ({"training": FSDP2, "optimizer": OptimizerConfig(name="muon")},
         r"`optimizer\.name` must not be muon with training\.strategy fsdp2"),
    ],
)  # fmt: skip
def test_error_messages(make_config, settings, message):
    with pytest.raises(ValueError, match=message):
        run(make_config(**settings))
