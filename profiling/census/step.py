"""Runs and records one training step of a published architecture on the fake GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from benchmarks.workload import FRAMES_PER_SECOND, LISTED, read_durations

from census.fake_gpu import fake_batch, fake_gpu, materialize
from census.recorder import Entry, Recorder
from effasr import config as configuration
from effasr.data.batch import Batch
from effasr.data.sampling.plan import UtteranceLengths
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
from effasr.nn.attention import RelativeSelfAttention
from effasr.training import build
from effasr.training.calibration.workload import Population, batch_of
from effasr.training.config import TrainConfig, resolve_losses
from effasr.training.step import train_step
from effasr_kernels.runtime.launch import diverted

_TOKENS_PER_SECOND, _PROMPT = 3.6, 5


@dataclass(frozen=True)
class Recorded:
    config: TrainConfig
    batch: Batch
    entries: list[Entry]
    waits: list[str]
    parameters: int


def record(model: str, frame_budget: int, overrides: Sequence[str] = ()) -> Recorded:
    """Record a step of one micro-batch: forward, backward and update, with dropout.

    The second step of a run is recorded, so that cached tables and optimizer moments exist.
    """
    if model not in PRESETS:
        models = ", ".join(sorted(PRESETS))
        raise ValueError(f"`model` must be one of {models}, but is {model!r}.")
    if frame_budget < 1:
        raise ValueError(f"`frame_budget` must be at least 1, but is {frame_budget}.")
    config, network = _of_preset(model, frame_budget, overrides)
    batch = planned_batch(config, frame_budget, PRESET_VOCABULARIES[model])
    if any(frame_budget in x.shape for x in network.parameters()):
        raise ValueError(
            f"`frame_budget` must not be the size of a weight, as frames are told from channels by "
            f"their number, but is {frame_budget}: take {frame_budget + 16}."
        )
    config = replace(config, loss=resolve_losses(config.loss, config.model))
    if config.kernels.attention != "auto":
        # Of the encoder; a call that asks whether it serves cannot be made with fake tensors.
        for module in network.modules():
            if isinstance(module, RelativeSelfAttention):
                module.backend = config.kernels.attention
    recorders = []
    with fake_gpu() as device:
        materialize(network, device)
        with diverted(lambda _: None):
            state = build.build_train_state(config, network, DistributedContext(0, 1, device))
        for step in range(2):
            recorders.append(Recorder(network, device.type, frame_budget))
            with recorders[-1].recording():
                train_step(state, [fake_batch(batch)], step)
    parameters = sum(x.numel() for x in network.parameters())
    return Recorded(config, batch, recorders[-1].entries, recorders[-1].waits, parameters)


def _of_preset(
    model: str, frame_budget: int, changes: Sequence[str]
) -> tuple[TrainConfig, ASRModel]:
    overrides = [
        f"data.frame_budget={frame_budget}",
        "training.precision=bfloat16",
        "init_from=null",
        *changes,
    ]
    config = configuration.load(TrainConfig, model, overrides)
    with torch.device("meta"):
        return config, ASRModel(config.model, PRESET_VOCABULARIES[model]).train()


def planned_batch(config: TrainConfig, frame_budget: int, vocab_size: int) -> Batch:
    """Return a micro-batch as made by the planner, with utterance lengths as in LibriSpeech."""
    seconds = np.array(read_durations(LISTED))
    frames = np.maximum(1, np.rint(seconds * FRAMES_PER_SECOND)).astype(np.int32)
    tokens = np.rint(seconds * _TOKENS_PER_SECOND).astype(np.int32) + _PROMPT
    lengths = UtteranceLengths(frames, tokens)
    framing = config.model.features.framing
    population = Population.of(lengths, max_sequences="auto", framing=framing)
    shape = population.shape(frame_budget)
    batch = batch_of(population.planned(shape)[0], shape, vocab_size, 0)
    # Only a model whose experts have names is told them.
    return batch if config.model.named_experts() else replace(batch, expert=None)
