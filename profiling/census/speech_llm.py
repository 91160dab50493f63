"""The speech language model of the census, and its batches: packed, and as padded ones have rows.

The model is that of the recipe ``speech_llm_lora`` at a published size: the encoder of Canary 1B
flash before a Qwen3 of 1.7 billion weights. Lengths are those of LibriSpeech, one recording for
each conversation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from benchmarks.workload import FRAMES_PER_SECOND, LISTED, read_durations

from effasr import config as configuration
from effasr.data.batch import StaticShape
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.conversation.collate import ConversationExample, collate_conversations
from effasr.data.conversation.rows import CLIP
from effasr.data.sampling.plan import UtteranceLengths
from effasr.model.asr import ASRModel
from effasr.model.presets import PRESETS
from effasr.nn.lora import adapt
from effasr.training.calibration.workload import Lengths, Population
from effasr.training.config import TrainConfig

NAME = "speech_llm_lora"  # the recipe

QWEN3_1_7B = {  # the sizes in its ``config.json``: https://huggingface.co/Qwen/Qwen3-1.7B
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}

Layout = Literal["packed", "random", "sorted"]
"""How conversations share rows: packed; or padded to the longest of a batch, whose conversations
are drawn, or are of similar length."""

_PROMPT, _TOKENS_PER_SECOND = 24, 3.6
"""Rows of the chat template and the instruction, and tokens of an answer."""

_SORTED_TOGETHER = 50
"""Batches among which conversations are sorted, as by transformers' ``group_by_length``."""


@dataclass(frozen=True)
class Rows:
    frames: int
    tokens: int


def configured(frame_budget: int) -> TrainConfig:
    overrides = [
        f"data.frame_budget={frame_budget}",
        "training.precision=bfloat16",
        "init_from=null",
    ]
    # Recomputed layers would count twice in both layouts.
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


def conversation_batch(config: TrainConfig, frame_budget: int, layout: Layout) -> ConversationBatch:
    """Return the conversations of a packed micro-batch, in as many rows as a layout needs."""
    settings, framing = config.model.language_model, config.model.features.framing
    assert settings is not None
    lengths = conversation_lengths(settings.stack)
    shape = Population.of(lengths, framing=framing).shape(frame_budget)
    planned = Population.of(lengths, framing=framing).planned(shape)[0]
    rows = Rows(frame_budget, shape.token_budget)
    if layout != "packed":
        rows = padded_rows(planned, lengths, layout)
    return _collated(
        planned, replace(shape, frame_budget=rows.frames, token_budget=rows.tokens), config
    )


def conversation_lengths(stack: int) -> UtteranceLengths:
    seconds = np.array(read_durations(LISTED))
    frames = np.maximum(1, np.rint(seconds * FRAMES_PER_SECOND)).astype(np.int32)
    answers = np.rint(seconds * _TOKENS_PER_SECOND).astype(np.int32)
    return UtteranceLengths(frames, -(-frames // stack) + answers + _PROMPT)


def padded_rows(planned: Lengths, lengths: UtteranceLengths, layout: Layout) -> Rows:
    """Return the rows of these conversations with the padding of a corpus in padded batches."""
    count = len(planned)
    rows = np.stack([lengths.frames, lengths.tokens], 1).astype(np.int64)
    generator = np.random.default_rng(0)
    # Several orders, as the list is short.
    shuffled = np.concatenate([generator.permutation(rows) for _ in range(_SORTED_TOGETHER)])
    if layout == "sorted":
        size = count * _SORTED_TOGETHER
        parts = [shuffled[n : n + size] for n in range(0, len(shuffled), size)]
        shuffled = np.concatenate([part[np.argsort(part[:, 0], kind="stable")] for part in parts])
    batches = shuffled[: len(shuffled) // count * count].reshape(-1, count, 2)
    used, padded = batches.sum((0, 1)), batches.max(1).sum(0) * count
    frames, tokens = (
        # Whole groups of 16 rows, and one for a tail.
        -(-int(np.ceil(sum(x[n] for x in planned) * padded[n] / used[n])) // 16) * 16 + 16
        for n in (0, 1)
    )
    return Rows(frames, tokens)


def _collated(planned: Lengths, shape: StaticShape, config: TrainConfig) -> ConversationBatch:
    settings, framing = config.model.language_model, config.model.features.framing
    assert settings is not None
    examples = []
    for number, (frames, rows) in enumerate(planned):
        speech = -(-frames // settings.stack)
        answer = rows - speech - _PROMPT
        # The last token is only predicted, and has no row.
        coded = [*[5] * _PROMPT, CLIP, *[~7] * (answer + 1)]
        audio = np.zeros(framing.samples_of(frames), np.float32)
        examples.append(ConversationExample(f"c{number}", np.array(coded, np.int32), (audio,)))
    options = {"stack": settings.stack, "pad_id": 0, "max_clips": shape.max_sequences}
    return collate_conversations(examples, shape, **options, framing=framing)
