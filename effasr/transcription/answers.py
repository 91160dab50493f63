"""Answers a conversation with a speech language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from effasr.checkpoint import LoadedModel
from effasr.data.audio.waveform import read_audio
from effasr.data.conversation.collate import asking, collate_conversations
from effasr.data.conversation.messages import AudioPart, Message, check_turns
from effasr.data.conversation.tokenize import prompt_rows
from effasr.data.filters.rules import Reason, Unfit
from effasr.data.tokenizer import ChatTokenizer
from effasr.decoding.config import LENGTH_PENALTY
from effasr.decoding.language_model.search import answers
from effasr.model.language_model.architecture import max_rows


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the assistant, and whether it reached its limit."""

    text: str
    truncated: bool


@torch.no_grad()
def answer(
    loaded: LoadedModel, messages: Sequence[Message], *, beam: int = 1, max_tokens: int = 256
) -> Answer:
    """Answer the last turn of a conversation, which is of the user.

    Args:
        loaded: Model with a language model, and its tokenizer.
        messages: The turns.
        beam: Hypotheses of the answer; 1 for greedy search.
        max_tokens: Most tokens of the answer.

    Raises:
        AudioError: A recording cannot be read.
        Unfit: The turns are not in order, the chat template refuses them, or they are too long.
        ValueError: The model has no language model.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    settings = model.config.language_model
    if settings is None or not isinstance(tokenizer, ChatTokenizer):
        raise ValueError("`loaded` must have a language model and its tokenizer, but has none.")
    assert settings.architecture is not None
    check_turns(messages)
    if messages[-1].role != "user":
        raise Unfit(Reason.ROLES, f"the last turn must be of user, but is of {messages[-1].role}")
    parts = [part for message in messages for part in message.parts]
    rate = model.config.features.sample_rate
    clips = [
        read_audio(part.path, rate, offset=part.offset or 0.0, duration=part.duration)
        for part in parts
        if isinstance(part, AudioPart)
    ]
    batch = collate_conversations(
        [asking("question", prompt_rows(messages, tokenizer).tolist(), tuple(clips))],
        stack=settings.stack,
        pad_id=tokenizer.pad_id,
        framing=model.config.features.framing,
    )
    most, rows = max_rows(settings.architecture), batch.token_lengths[0]
    if most is not None:
        if rows >= most:
            raise Unfit(Reason.MODEL, f"{rows} rows, but the language model has at most {most}")
        max_tokens = min(max_tokens, most - rows)
    device = next(model.parameters()).device
    (found,) = answers(
        model,
        batch.to(device),
        [max_tokens],
        tokenizer.stop_ids,
        classes=tokenizer.vocab_size,
        beam=beam,
        length_penalty=LENGTH_PENALTY,
    )
    return Answer(tokenizer.decode(found.tokens).strip(), found.truncated)
