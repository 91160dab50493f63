"""Two processes, with batches that they do not have in common, and with parts that are frozen."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from effasr.checkpoint import save_model
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import TextExample, collate, collate_text
from effasr.data.conversation.batch import ConversationBatch
from effasr.distributed.averager import DelayedConfig, LocalSGDConfig
from effasr.distributed.process_group import DistributedContext
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.experts import ExpertsConfig
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training.build import build_model
from effasr.training.config import TrainConfig
from effasr.training.step import train_step
from effasr.training.strategies.parallelism import average_over_ranks
from tests.support.quiet_run import (
    VOCABULARY,
    examples_of,
    make,
    quiet_config,
    uneven_batch,
    weights,
)
from tests.support.run_ranks import check_ranks
from tests.support.speech_llm import conversations, make_conversation_batch, speech_llm_config

STEPS = 3
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
ENDS = {"eos_id": 1, "pad_id": 0}
TALK = StaticShape(40, 70, 6, longest_frames=20, longest_tokens=40)


def exact(number: int) -> Batch:
    """Of a size of its own; every fourth is empty, so that it has no row at all."""
    return collate([] if number % 4 == 3 else examples_of(number), **ENDS)


def padded(number: int) -> Batch:
    return collate([] if number % 4 == 0 else examples_of(number), **ENDS, padded=True)


def mixed(number: int) -> Batch:
    """Speech or text, by turns on either rank, and now and then neither."""
    shape, step = StaticShape(30, 40, 4), number // 4
    if (number + step) % 3:
        return uneven_batch(number)
    pairs = [] if step == 2 else [TextExample(str(n), [4, 5, 6 + n], [2], [7]) for n in range(3)]
    return collate_text(pairs, shape, **ENDS)


def train(
    config: TrainConfig, context: DistributedContext, make_batch: Callable[[int], Batch]
) -> list[Tensor]:
    model, train_state = make(config, context)
    result = []
    for step in range(STEPS):
        batches = [make_batch(4 * step + n) for n in range(4)]
        torch.manual_seed(step)
        figures = train_step(train_state, batches[context.rank :: context.size], step).read()
        assert figures["finite"], "the step was not finite"
        result.append(torch.tensor(list(figures.values())))
    return [*result, *weights(model, train_state), *train_state.statistics]


def alike(
    context: DistributedContext,
    make_batch: Callable[[int], Batch],
    config: TrainConfig,
    changed: TrainConfig | None = None,
    strategies: tuple[str, ...] = ("fsdp2",),
):
    """On two ranks, and sharded over them, training is as on one."""
    expected = train(config, DistributedContext(0, 1, context.device), make_batch)
    for strategy in strategies:
        result = train(with_loop(changed or config, strategy=strategy), context, make_batch)
        torch.testing.assert_close(expected, result, rtol=1e-5, atol=1e-5)


def with_loop(config: TrainConfig, **settings) -> TrainConfig:
    return replace(config, training=replace(config.training, **settings))


def strategies(context: DistributedContext):
    """Batches of any size, some of which have no row on one of the ranks."""
    for make_batch in (exact, padded):
        alike(context, make_batch, quiet_config(OPTIMIZER))


def with_text(config: TrainConfig) -> TrainConfig:
    text = TextEncoderConfig(layers=2, heads=2, feed_forward=16)
    return replace(config, model=replace(config.model, text_encoder=text))


def text(context: DistributedContext):
    kinds = [[mixed(4 * step + n).source is None for n in range(4)] for step in range(STEPS)]
    assert any(a != b for step in kinds for a, b in zip(step[::2], step[1::2], strict=True))
    alike(context, mixed, with_text(quiet_config(OPTIMIZER)))


def recomputed(context: DistributedContext):
    """With layers computed again, each strategy trains as without, and each rank to the bit."""
    config = with_text(quiet_config(OPTIMIZER))
    again = with_loop(config, activation_checkpointing=True)
    alike(context, mixed, config, again)
    for strategy in ("ddp", "local_sgd"):
        both = [train(with_loop(c, strategy=strategy), context, mixed) for c in (config, again)]
        assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


def compiled(context: DistributedContext):
    """Layers that are compiled one by one, from one graph for all of a kind."""
    # The default backend writes and compiles C++, which takes minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
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


FROZEN = (
    (),
    ("language_model.model", "encoder"),
    ("language_model.model", "encoder.subsampling", "encoder.layers.0"),
    ("language_model.model.embed_tokens", "encoder.layers"),
)


def language_model(context: DistributedContext):
    """With parts frozen before, behind and among the others, and with adapters."""
    config = spoken_config()
    alike(context, talk, with_loop(config, freeze=FROZEN[2]))
    lora = LoRAConfig(
        rank=2,
        targets=("language_model.model.*_proj", "encoder.layers.1.*"),
        also_train=("language_model.adapter",),
    )
    alike(context, talk, replace(config, lora=lora))


def partly_frozen_language_model(context: DistributedContext):
    """Whole, and with other parts frozen."""
    for frozen in (*FROZEN[:2], FROZEN[3]):
        alike(context, talk, with_loop(spoken_config(), freeze=frozen))


def spoken_config() -> TrainConfig:
    """A speech language model, for steps in which one rank has speech and the other text."""
    kinds = [[bool(sum(talk(4 * step + n).clip_counts)) for n in range(4)] for step in range(STEPS)]
    assert any(a != b for step in kinds for a, b in zip(step[::2], step[1::2], strict=True))
    config, model = quiet_config(OPTIMIZER), speech_llm_config()
    return replace(config, model=replace(model, encoder=replace(model.encoder, layers=2)))


def partly_frozen_text(context: DistributedContext):
    """A rank has text where the other has speech, and one of the encoders is frozen."""
    config = with_text(quiet_config(OPTIMIZER))
    for frozen in (("encoder",), ("text_encoder", "encoder.layers.0"), ("text_encoder.layers",)):
        alike(context, mixed, with_loop(config, freeze=frozen))


def adapters_and_a_frozen_layer(context: DistributedContext):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(context.broadcast(folder)) / "base"
        plain = quiet_config(OPTIMIZER, ema_decay=0.9, clip=0.5)
        if context.is_main:
            tokenizer = Mock(save=lambda path: path.mkdir())
            save_model(path, build_model(plain, VOCABULARY, None, context.device), tokenizer)
        context.all_gather(None)
        lora = LoRAConfig(rank=3, alpha=6.0, also_train=("*norm*", "ctc_head"))
        adapted = replace(plain, init_from=str(path), lora=lora)
        alike(context, uneven_batch, adapted, strategies=("ddp", "fsdp2"))
        local_sgd = LocalSGDConfig(period=2, warmup_steps=1)
        for config, loop in (
            (adapted, {"strategy": "local_sgd", "local_sgd": local_sgd}),
            (with_loop(plain, freeze=("encoder.layers.0",)),
             {"strategy": "delayed", "delayed": DelayedConfig(warmup_steps=1)}),
        ):  # fmt: skip
            begun, _ = make(config, DistributedContext(0, 1, context.device))
            model, train_state = make(with_loop(config, **loop), context)
            for step in range(STEPS):
                train_step(train_state, [uneven_batch(2 * step + context.rank)], step)
            average_over_ranks(train_state, context)
            for name, parameter in begun.named_parameters():
                if not parameter.requires_grad:
                    assert torch.equal(model.get_parameter(name), parameter), name
            both = context.all_gather(dict(model.state_dict()))
            assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())
        context.all_gather(None)


def frozen_encoder(context: DistributedContext):
    plain = quiet_config(OPTIMIZER, ema_decay=0.9, clip=0.5)
    for frozen in (("encoder.layers.0",), ("encoder", "decoder.embed_tokens")):
        config = with_loop(plain, freeze=frozen)
        alike(context, uneven_batch, config, strategies=("ddp", "fsdp2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "functions",
    [
        (strategies,),
        (text, experts),
        (recomputed, partly_frozen_text),
        (compiled,),
        (adapters_and_a_frozen_layer,),
        (frozen_encoder,),
        (language_model,),
        (partly_frozen_language_model,),
    ],
    ids=lambda functions: functions[0].__name__,
)
@pytest.mark.representative(functions=(strategies,))
def test_training_on_two_ranks_is_that_of_one_process(functions):
    if "language_model" in functions[0].__name__:
        pytest.importorskip("transformers")
    check_ranks(*functions)
