"""What each of two processes does in test_scaling_ranks.py; each scenario is a function."""

import sys
from dataclasses import replace

import numpy as np
import torch

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.distributed.process_group import World, joined
from effasr.model.asr import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training import build
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.step import train_step
from effasr.training.step_stats import Counts
from tests.training.conftest import VOCABULARY

SCALE, CLIP, STEPS = 8.0, 0.1, 3


def uneven_batch(number: int) -> Batch:
    """Micro-batches of unlike numbers of targets."""
    return collate(examples_of(number), StaticShape(60, 40, 4), eos_id=1, pad_id=0)


def examples_of(number: int) -> list[Example]:
    generator = np.random.default_rng(number)
    return [
        Example(
            id=f"{number}-{n}",
            audio=generator.normal(size=9_000).astype(np.float32),
            prompt=[2, 3],
            text=generator.integers(4, VOCABULARY, size=int(generator.integers(1, 8))).tolist(),
        )
        for n in range(1 + number % 3)
    ]


def quiet_config(optimizer: OptimizerConfig, **training) -> TrainConfig:
    """Nothing random, no batch norm."""
    model = ModelConfig(
        encoder=FastConformerConfig(
            width=16, layers=2, heads=2, feed_forward=16, subsampling_channels=4,
            conv_norm="layer_norm",
        ),
        decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16),
        ctc=True,
    )  # fmt: skip
    loop = LoopConfig(max_steps=20, **training)
    schedule = ScheduleConfig(warmup_steps=3)
    config = TrainConfig(model=model, training=loop, optimizer=optimizer, schedule=schedule)
    return build.resolve(
        replace(config, data=replace(config.data, micro_batches=4, frame_budget=60)), None
    )


def direct(model, trainee, batches: list[Batch]) -> tuple[float, float]:
    """Variance of the step's gradient and its square, from every micro-batch's own gradient."""
    counts = Counts.of(batches, trainee.world, False, trainee.cost)
    total = counts.tensor(trainee.world.device)
    gradients, targets = [], []
    for batch in batches:
        losses = model(batch, label_smoothing=trainee.label_smoothing, guided_sigma=None)
        loss = trainee.objective.parts(losses, *Counts.targets_of(total))[0]
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in parts]).double())
        targets.append(batch.num_targets)
    share = torch.tensor(targets, dtype=torch.float64) / sum(targets)
    means = torch.stack(gradients) / share[:, None]
    whole = torch.stack(gradients).sum(0)
    spread = (share * (means - whole).square().sum(1)).sum() / (len(batches) - 1)
    return spread.item(), max((whole.square().sum() - spread).item(), 0.0)


def gain() -> None:
    """Two micro-batches on each of two ranks, with clipping, against a direct computation."""
    config = quiet_config(
        OptimizerConfig(lr=1e-3, adascale=AdaScaleConfig(scale=SCALE, smoothing=0.5)), clip=CLIP
    )
    with joined("cpu", timeout_s=60) as world:
        models, trainees = [], []
        for ranks in (world, World(0, 1, world.device)):
            model = build.build_model(config, VOCABULARY, None, world.device)
            models.append(model)
            trainees.append(build.build_trainee(config, model, ranks))
        plain = build.build_model(config, VOCABULARY, None, world.device)
        averages, progress = None, 0.0
        for step in range(STEPS):
            batches = [uneven_batch(4 * step + n) for n in range(4)]
            assert len({batch.num_targets for batch in batches}) > 2
            plain.load_state_dict(models[0].state_dict())
            now = direct(plain, trainees[1], batches)
            keep = min(0.5, step / (step + 1))
            averages = [
                keep * old + (1 - keep) * new for old, new in zip(averages or now, now, strict=True)
            ]
            variance, square = averages
            expected = (SCALE * variance + square) / (variance + square)
            assert 1 < expected < SCALE
            for trainee, share in ((trainees[0], batches[world.rank :: 2]), (trainees[1], batches)):
                report = train_step(trainee, share, step)
                assert report.lr == trainee.learning_rate(int(progress))
                assert report.gain is not None
                got, seen, factor = report.gain.read()
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=0.0)
                torch.testing.assert_close(seen, progress + got, rtol=1e-4, atol=0.0)
                torch.testing.assert_close(factor, got**0.5)
                assert report.values.read()[5] > CLIP, "the gradient was not clipped"
                rate = trainee.optimizer.param_groups[0]["lr"]
                torch.testing.assert_close(rate.item(), report.lr * factor)
            progress += expected
        for ours, alone in zip(*(model.parameters() for model in models), strict=True):
            # A key's bias has a gradient of mere rounding, which Adam makes as large as any.
            torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)
        states = world.gather(trainees[0].adascale.state_dict())
        assert states[0] == states[1]
        sys.stdout.write("measured\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
