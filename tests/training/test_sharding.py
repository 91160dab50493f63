"""fsdp2 over two processes, with batches that ranks do not have in common."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import TextExample, collate, collate_text
from effasr.data.conversation.batch import ConversationBatch
from effasr.distributed.process_group import DistributedContext
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.experts import ExpertsConfig
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import TrainConfig
from effasr.training.step import train_step
from tests.support.quiet_run import examples_of, make, quiet_config, uneven_batch, weights
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
    found = []
    for step in range(STEPS):
        batches = [make_batch(4 * step + n) for n in range(4)]
        torch.manual_seed(step)
        figures = train_step(train_state, batches[context.rank :: context.size], step).read()
        assert figures["finite"], "the step was not finite"
        found.append(torch.tensor(list(figures.values())))
    return [*found, *weights(model, train_state), *train_state.statistics]


def alike(
    context: DistributedContext,
    make_batch: Callable[[int], Batch],
    config: TrainConfig,
    sharded: TrainConfig | None = None,
):
    """Sharded over two ranks, training is as on one."""
    expected = train(config, DistributedContext(0, 1, context.device), make_batch)
    loop = replace((sharded or config).training, strategy="fsdp2")
    found = train(replace(sharded or config, training=loop), context, make_batch)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


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
    again = replace(config, training=replace(config.training, activation_checkpointing=True))
    alike(context, mixed, config, again)
    for strategy in ("ddp", "local_sgd"):
        both = [
            train(replace(c, training=replace(c.training, strategy=strategy)), context, mixed)
            for c in (config, again)
        ]
        assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


def compiled(context: DistributedContext):
    """Layers that are compiled one by one, from one graph for all of a kind."""
    # The default backend writes and compiles C++, which takes minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    config = quiet_config(OPTIMIZER)
    settings = replace(config.training, compile=True, activation_checkpointing=True)
    alike(context, uneven_batch, config, replace(config, training=settings))
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
    alike(context, talk, frozen_in(config, FROZEN[2]))
    lora = LoRAConfig(
        rank=2,
        targets=("language_model.model.*_proj", "encoder.layers.1.*"),
        also_train=("language_model.adapter",),
    )
    alike(context, talk, replace(config, lora=lora))


def partly_frozen_language_model(context: DistributedContext):
    """Whole, and with other parts frozen."""
    for frozen in (*FROZEN[:2], FROZEN[3]):
        alike(context, talk, frozen_in(spoken_config(), frozen))


def frozen_in(config: TrainConfig, frozen: tuple[str, ...]) -> TrainConfig:
    return replace(config, training=replace(config.training, freeze=frozen))


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
        alike(context, mixed, frozen_in(config, frozen))


@pytest.mark.slow
def test_sharded_training_is_that_of_one_process():
    check_ranks(strategies)


@pytest.mark.slow
@pytest.mark.extended
def test_sharded_training_of_texts_and_experts_is_that_of_one_process():
    check_ranks(text, experts)


@pytest.mark.slow
@pytest.mark.extended
def test_sharded_training_of_layers_computed_again_or_frozen_is_that_of_one_process():
    check_ranks(recomputed, partly_frozen_text)


@pytest.mark.slow
@pytest.mark.extended
def test_sharded_training_of_compiled_layers_is_that_of_one_process():
    check_ranks(compiled)


@pytest.mark.slow
@pytest.mark.extended
def test_a_sharded_language_model_trains_as_that_of_one_process():
    pytest.importorskip("transformers")
    check_ranks(language_model)


@pytest.mark.slow
@pytest.mark.extended
def test_a_sharded_language_model_with_frozen_parts_trains_as_that_of_one_process():
    pytest.importorskip("transformers")
    check_ranks(partly_frozen_language_model)
