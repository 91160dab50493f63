"""What each of two processes does in test_lora.py; each scenario is a function."""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import torch
from torch import Tensor

from effasr.checkpoint import save_model
from effasr.distributed.delayed_averaging import DelayedConfig
from effasr.distributed.local_sgd import LocalSGDConfig
from effasr.distributed.process_group import World, joined
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training.build import build_model
from effasr.training.config import TrainConfig
from effasr.training.strategies import settle, whole
from tests.training.conftest import VOCABULARY
from tests.training.parallel_workers import make, train
from tests.training.scaling_workers import quiet_config

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-4)
STEPS = 4


def trained(config: TrainConfig, ranks: World, own: slice) -> dict[str, Tensor]:
    """Weights after some steps, and the losses."""
    model, trainee = make(config, ranks)
    losses = train(model, trainee, range(STEPS), own)
    settle(trainee)
    with whole(trainee, model):
        state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    return state | {"losses": torch.tensor(losses)}


def everything() -> None:
    with joined("cpu", timeout_s=60) as world, tempfile.TemporaryDirectory() as folder:
        path = Path(world.broadcast(folder)) / "base"
        plain = quiet_config(OPTIMIZER, ema_decay=0.9, clip=0.5)
        if world.is_main:
            tokenizer = Mock(save=lambda path: path.mkdir())
            save_model(path, build_model(plain, VOCABULARY, None, world.device), tokenizer)
        world.gather(None)
        lora = LoRAConfig(rank=3, alpha=6.0, also_train=("*norm*", "ctc_head"))
        adapted = replace(plain, init_from=str(path), lora=lora)
        frozen = replace(plain, training=replace(plain.training, freeze=("encoder.layers.0",)))
        below = ("encoder", "decoder.embed_tokens")
        encoder = replace(plain, training=replace(plain.training, freeze=below))
        alone, share = World(0, 1, world.device), slice(world.rank, None, 2)
        configs = adapted, frozen, encoder
        for config in configs:
            expected = trained(config, alone, slice(None))
            for strategy in ("ddp", "fsdp2"):
                loop = replace(config.training, strategy=strategy)
                found = trained(replace(config, training=loop), world, share)
                for name, value in expected.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
        sys.stdout.write("alike\n")
        for config, loop in (
            (
                adapted,
                {"strategy": "local_sgd", "local_sgd": LocalSGDConfig(period=2, warmup_steps=1)},
            ),
            (frozen, {"strategy": "delayed", "delayed": DelayedConfig(warmup_steps=1)}),
        ):
            settings = replace(config, training=replace(config.training, **loop))
            found = trained(settings, world, share)
            for name, parameter in make(config, alone)[0].named_parameters():
                if not parameter.requires_grad:
                    assert torch.equal(found[name], parameter), name
            everyone = world.gather(found)
            del everyone[0]["losses"]
            for name, value in everyone[0].items():
                assert torch.equal(everyone[1][name], value), name
        sys.stdout.write("untouched\n")
        world.gather(None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
