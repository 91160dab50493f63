"""The speech language model of the census, and its packed batches.

The model is that of the recipe ``speech_llm_lora`` at a published size: the encoder of Canary 1B
flash before a Qwen3 of 1.7 billion weights. Lengths are those of LibriSpeech, one recording for
each conversation.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import torch
from benchmarks.speech import MODELS
from benchmarks.workload import FRAMES_PER_SECOND, LISTED, read_durations

from effasr import config as configuration
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.conversation.collate import ConversationExample, collate_conversations
from effasr.data.conversation.rows import CLIP
from effasr.data.sampling.plan import UtteranceLengths
from effasr.model.asr import ASRModel
from effasr.model.presets import PRESETS
from effasr.nn.lora import adapt
from effasr.training.calibration.workload import Population
from effasr.training.config import TrainConfig

NAME = "speech_llm_lora"  # the recipe

QWEN3_1_7B = MODELS["qwen3"]

_PROMPT, _TOKENS_PER_SECOND = 24, 3.6
"""Rows of the chat template and the instruction, and tokens of an answer."""


def configured(frame_budget: int) -> TrainConfig:
    overrides = [
        f"data.frame_budget={frame_budget}",
        "training.precision=bfloat16",
        "init_from=null",
    ]
    # Recomputed layers would count twice.
    config = configuration.load(
        TrainConfig, NAME, [*overrides, "training.activation_checkpointing=false"]
    )
    encoder = PRESETS["canary_1b_flash"]
    settings = config.model.language_model
    assert settings is not None
    settings = replace(settings, architecture=json.dumps(QWEN3_1_7B), weights="random")
    model = replace(
        config.model,
        features=encoder.features,
        spec_augment=encoder.spec_augment,
        encoder=encoder.encoder,
        language_model=settings,
    )
    return replace(config, model=model)


def network(config: TrainConfig) -> ASRModel:
    with torch.device("meta"):
        model = ASRModel(config.model, QWEN3_1_7B["vocab_size"]).train()
        assert config.lora is not None
        adapt(model, config.lora)
    return model


def conversation_batch(config: TrainConfig, frame_budget: int) -> ConversationBatch:
    settings, framing = config.model.language_model, config.model.features.framing
    assert settings is not None
    lengths = conversation_lengths(settings.stack)
    population = Population.of(lengths, max_sequences="auto", framing=framing)
    shape = population.shape(frame_budget)
    examples = []
    for number, (frames, rows) in enumerate(population.planned(shape)[0]):
        speech = -(-frames // settings.stack)
        answer = rows - speech - _PROMPT
        # The last token is only predicted, and has no row.
        coded = [*[5] * _PROMPT, CLIP, *[~7] * (answer + 1)]
        audio = np.zeros(framing.samples_of(frames), np.float32)
        examples.append(ConversationExample(f"c{number}", np.array(coded, np.int32), (audio,)))
    options = {"stack": settings.stack, "pad_id": 0, "max_clips": shape.max_sequences}
    return collate_conversations(examples, shape, **options, framing=framing)


def conversation_lengths(stack: int) -> UtteranceLengths:
    seconds = np.array(read_durations(LISTED))
    frames = np.maximum(1, np.rint(seconds * FRAMES_PER_SECOND)).astype(np.int32)
    answers = np.rint(seconds * _TOKENS_PER_SECOND).astype(np.int32)
    return UtteranceLengths(frames, -(-frames // stack) + answers + _PROMPT)
