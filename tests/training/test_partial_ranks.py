"""Adapters and frozen parts, trained on two processes by each strategy."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from effasr.checkpoint import save_model
from effasr.distributed.averager import DelayedConfig, LocalSGDConfig
from effasr.distributed.process_group import DistributedContext
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training.build import build_model
from effasr.training.config import TrainConfig
from effasr.training.strategies.parallelism import average_over_ranks, full_weights
from tests.support.quiet_run import VOCABULARY, make, quiet_config, train
from tests.support.run_ranks import check_ranks

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
STEPS = 4


def trained(config: TrainConfig, ranks: DistributedContext, own: slice) -> dict[str, Tensor]:
    model, train_state = make(config, ranks)
    losses = train(model, train_state, range(STEPS), own)
    average_over_ranks(train_state, ranks)
    with full_weights(train_state, model):
        state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    return state | {"losses": torch.tensor(losses)}


def alone_of(context: DistributedContext) -> DistributedContext:
    return DistributedContext(0, 1, context.device)


def assert_as_one(config: TrainConfig, context: DistributedContext):
    expected = trained(config, alone_of(context), slice(None))
    for strategy in ("ddp", "fsdp2"):
        loop = replace(config.training, strategy=strategy)
        found = trained(
            replace(config, training=loop), context, slice(context.rank, None, context.size)
        )
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


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
        frozen = replace(plain, training=replace(plain.training, freeze=("encoder.layers.0",)))
        assert_as_one(adapted, context)
        for config, loop in (
            (
                adapted,
                {"strategy": "local_sgd", "local_sgd": LocalSGDConfig(period=2, warmup_steps=1)},
            ),
            (frozen, {"strategy": "delayed", "delayed": DelayedConfig(warmup_steps=1)}),
        ):
            settings = replace(config, training=replace(config.training, **loop))
            found = trained(settings, context, slice(context.rank, None, 2))
            for name, parameter in make(config, alone_of(context))[0].named_parameters():
                if not parameter.requires_grad:
                    assert torch.equal(found[name], parameter), name
            everyone = context.all_gather(found)
            del everyone[0]["losses"]
            for name, value in everyone[0].items():
                assert torch.equal(everyone[1][name], value), name
        context.all_gather(None)


def frozen_encoder(context: DistributedContext):
    plain = quiet_config(OPTIMIZER, ema_decay=0.9, clip=0.5)
    for frozen in (("encoder.layers.0",), ("encoder", "decoder.embed_tokens")):
        assert_as_one(replace(plain, training=replace(plain.training, freeze=frozen)), context)


@pytest.mark.slow
@pytest.mark.extended
def test_two_ranks_train_as_one():
    check_ranks(adapters_and_a_frozen_layer)


@pytest.mark.slow
@pytest.mark.extended
def test_two_ranks_with_frozen_parts_train_as_one():
    check_ranks(frozen_encoder)
