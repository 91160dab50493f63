"""A small model with its optimizer, and batches for it, with torch and numpy alone."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, TextExample, collate, collate_text
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.distributed.grad_sync import GradientSync
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.cost import cost_model, text_cost_model
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.training.loss import LossConfig, Objective
from effasr.training.step import StepConfig, TrainState
from effasr.training.step_stats import StepCosts

SHAPE = StaticShape(24, 20, 3, longest_frames=16, longest_tokens=10)
VOCABULARY = 12


def make_batch(seed: int, shape: StaticShape = SHAPE) -> Batch:
    """Two utterances, of other lengths for each seed."""
    generator = np.random.default_rng(seed)
    examples = [
        Example(
            str(n),
            generator.normal(size=samples - 640 * (seed % 4)).astype(np.float32),
            [1, 2],
            generator.integers(3, VOCABULARY, size=3).tolist(),
        )
        for n, samples in enumerate((14_000, 9_000))
    ]
    return collate(examples, shape, eos_id=1, pad_id=0)


def make_text_batch(seed: int) -> Batch:
    """Two text pairs."""
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, size=(2, 7)).tolist()
    examples = [TextExample(str(n), x[:4], [1, 2], x[4:]) for n, x in enumerate(ids)]
    return collate_text(examples, SHAPE, eos_id=1, pad_id=0)


def make_train_state(
    device: torch.device,
    position: str,
    dropout: float = 0.0,
    *,
    transducer: TransducerConfig | None = None,
    half: bool = False,
    text: bool = False,
) -> TrainState:
    """Every part that has a kernel, at its smallest.

    Args:
        device: Of the model.
        position: Of the encoder.
        dropout: Of encoder and decoder.
        transducer: In place of the decoder.
        half: Whether products are in bfloat16.
        text: Whether there is a text encoder.
    """
    torch.manual_seed(0)
    encoder = FastConformerConfig(
        width=32, layers=1, heads=2, feed_forward=32, subsampling_channels=8,
        residual_dropout=dropout, attention_dropout=dropout, position=position,
    )  # fmt: skip
    decoder = DecoderConfig(width=32, layers=1, heads=2, feed_forward=32, residual_dropout=dropout)
    config = ModelConfig(
        encoder=encoder,
        decoder=decoder if transducer is None else None,
        transducer=transducer,
        ctc=True,
        text_encoder=TextEncoderConfig(layers=1, heads=2, feed_forward=32) if text else None,
        spec_augment=SpecAugmentConfig(),
    )
    by_transducer = float(transducer is not None)
    model = ASRModel(config, VOCABULARY).to(device).train()
    return TrainState(
        config=StepConfig(
            learning_rate=lambda step: 1e-3,
            autocast=partial(torch.autocast, device.type, torch.bfloat16) if half else nullcontext,
            costs=StepCosts(cost_model(config, VOCABULARY), text_cost_model(config, VOCABULARY)),
            seed=0,
            clip=1.0,
            label_smoothing=0.1,
        ),
        context=DistributedContext(0, 1, device),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda"),
        objective=Objective(
            LossConfig(
                ctc_weight=0.3, transducer_weight=by_transducer, guided_weight=1 - by_transducer
            ),
            device,
        ),
        grad_sync=GradientSync(model),
    )
