"""Ranks that cannot share the micro-batches of a step evenly; apart, for what it must import."""

import sys

import numpy as np
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.distributed.process_group import World, joined
from effasr.model.asr import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.training import build
from effasr.training.config import TrainConfig
from effasr.training.step import train_step


def uneven() -> None:
    """Three micro-batches on two ranks, one of which gets an empty one, train as on one rank."""
    shape = StaticShape(60, 30, 4)
    generator = np.random.default_rng(0)
    audio = lambda count: generator.normal(size=count).astype(np.float32)
    given = [
        [Example(f"{m}-{n}", audio(9_000 - 2_000 * n), [2, 3], [4 + m, 5]) for n in range(2)]
        for m in range(3)
    ]
    batches = [collate(examples, shape, eos_id=1, pad_id=0) for examples in (*given, [])]
    layer = {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16, "residual_dropout": 0.1}
    model_config = ModelConfig(
        encoder=FastConformerConfig(**layer, subsampling_channels=4),
        decoder=DecoderConfig(**layer),
        ctc=True,
    )
    config = build.resolve(TrainConfig(model=model_config), None)
    with joined("cpu") as world:
        models = []
        own = batches[world.rank :: world.size]
        for ranks, share in ((world, own), (World(0, 1, world.device), batches[:3])):
            model = build.build_model(config, 12, None, world.device)
            trainee = build.build_trainee(config, model, ranks)
            for step in range(2):
                report = train_step(trainee, share, step)
                assert report.values.read()[6], "the step was not finite"
            models.append(model)
        for ours, alone in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(ours, alone)
        sums = [sum(p.double().sum().item() for p in model.parameters()) for model in models]
        assert len(set(world.gather(sums[0]))) == 1


if __name__ == "__main__":
    globals()[sys.argv[1]]()
