"""Tiny speech language models of several families, and conversations for them."""

import json

import numpy as np
import torch

from effasr.data.batch import StaticShape
from effasr.data.conversation.batch import ConversationExample, collate_conversations
from effasr.data.conversation.rows import CLIP
from effasr.data.features.config import FeatureConfig
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.language_model.config import LanguageModelConfig

VOCABULARY = 61

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "sliding_window": 256},
    "smollm3": {},
}

ENCODER_DECODERS = {
    "t5": {},
    "mt5": {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    "umt5": {},
    "bart": {"decoder_start_token_id": 2},
}


def architecture(kind: str, **fields) -> str:
    """The ``config.json`` of a tiny language model."""
    if kind in ENCODER_DECODERS:
        # The names of T5, and of BART.
        sizes = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "num_heads": 4, "d_ff": 80}
        for stack in ("encoder", "decoder"):
            sizes |= {f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 80, f"{stack}_layers": 2}
        ids = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "num_layers": 2}
        return json.dumps({"model_type": kind} | sizes | ids | ENCODER_DECODERS[kind] | fields)
    sizes = {
        **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    return json.dumps({"model_type": kind, **sizes, **FAMILIES.get(kind, {}), **fields})


def speech_llm_config(
    kind: str = "llama", stack: int = 3, speech_input="encoder", **fields
) -> ModelConfig:
    return ModelConfig(
        features=FeatureConfig(mel_bins=16),
        encoder=FastConformerConfig(
            width=32,
            layers=1,
            heads=2,
            feed_forward=48,
            subsampling_channels=8,
            conv_norm="layer_norm",
        ),
        decoder=None,
        language_model=LanguageModelConfig(
            architecture=architecture(kind, **fields),
            stack=stack,
            weights="random",
            speech_input=speech_input,
        ),
    )


def speech_llm(kind: str = "llama", seed: int = 0, **options) -> ASRModel:
    torch.manual_seed(seed)
    model = ASRModel(speech_llm_config(kind, **options), VOCABULARY)
    with torch.no_grad():
        # Larger weights than those of an initialization, so that attention is far from uniform.
        for parameter in model.language_model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model.eval()


def conversations(seed: int = 0) -> list[ConversationExample]:
    """Conversations with one clip, with none, with two, and with two turns."""
    random = np.random.default_rng(seed)

    def given(count: int) -> list[int]:
        return random.integers(3, VOCABULARY, count).tolist()

    def written(count: int) -> list[int]:
        return [~token for token in given(count)]

    def clip(samples: int) -> np.ndarray:
        return random.normal(0, 0.1, samples).astype(np.float32)

    layouts = [
        ([*given(4), CLIP, *given(3), *written(6)], (9000,)),
        ([*given(9), *written(5)], ()),
        ([CLIP, *given(2), CLIP, *given(1), *written(4), *given(3), *written(3)], (12000, 3000)),
        ([*given(2), CLIP, *written(2)], (1400,)),
    ]
    return [
        ConversationExample(f"c{number}", np.array(rows, np.int32), tuple(map(clip, samples)))
        for number, (rows, samples) in enumerate(layouts)
    ]


def make_conversation_batch(examples, stack: int = 3, shape: StaticShape | None = None):
    clips = None if shape is None else 8
    return collate_conversations(examples, shape, stack=stack, pad_id=0, max_clips=clips)
