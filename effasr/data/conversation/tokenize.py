"""Token rows of a conversation, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from effasr.data.conversation.messages import Message
from effasr.data.conversation.rows import CLIP
from effasr.data.filters.rules import Reason, Unfit
from effasr.data.tokenizer.chat import ChatTokenizer
from effasr.untrusted.chat_template import TemplateError

_MARK = "\ue0fa"
"""A character for private use, which stands for a clip while the template is rendered."""


def conversation_rows(messages: Sequence[Message], tokenizer: ChatTokenizer) -> np.ndarray:
    """Return the rows of a conversation, coded as in `effasr.data.conversation.rows`.

    The model must write what the template adds for a turn of the assistant to a conversation that
    asks for one: the text and the token that ends the turn, which is added where the template has
    none. Texts are tokenized between turns and clips, as they are in inference.

    Args:
        messages: Turns, the last of the assistant.
        tokenizer: Tokenizer with a chat template.

    Returns:
        int32 (n,).

    Raises:
        Unfit: The template refuses the conversation, or changes earlier turns when more follow.
    """
    try:
        rows = _rows(messages, tokenizer, asks=False)
    except TemplateError as error:
        raise Unfit(Reason.CHAT_TEMPLATE, str(error)) from error
    return _checked(rows, messages)


def prompt_rows(messages: Sequence[Message], tokenizer: ChatTokenizer) -> np.ndarray:
    """Return the rows of a conversation that asks the assistant to answer: int32 (n,).

    Raises:
        Unfit: The template refuses the conversation.
    """
    try:
        try:
            rows = _rows(messages, tokenizer, asks=True)
        except Unfit:
            # A template may show earlier answers in another way than the last.
            rows = _encode(tokenizer.render(_turns(messages), asks=True), tokenizer)
    except TemplateError as error:
        raise Unfit(Reason.CHAT_TEMPLATE, str(error)) from error
    return _checked([row if row >= 0 or row == CLIP else ~row for row in rows], messages)


def _rows(messages: Sequence[Message], tokenizer: ChatTokenizer, *, asks: bool) -> list[int]:
    """Return the rows of a conversation, or of one that asks for an answer."""
    turns, rows, cursor = _turns(messages), [], 0
    whole = tokenizer.render(turns, asks=asks)
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = tokenizer.render(turns[:number], asks=True)
        answered = tokenizer.render(turns[: number + 1])
        if not (whole.startswith(answered) and answered.startswith(asked)):
            raise Unfit(
                Reason.CHAT_TEMPLATE,
                f"the chat template changes what is before turn {number + 1} when it follows",
            )
        written = answered[len(asked) :].rstrip()
        rows += _encode(whole[cursor : len(asked)], tokenizer)
        ids = tokenizer.encode(written, "")
        if not ids or ids[-1] not in tokenizer.stop_ids:
            ids.append(tokenizer.eos_id)
        rows += [~token for token in ids]
        cursor = len(asked) + len(written)
    return rows + _encode(whole[cursor:], tokenizer) if asks else rows


def _turns(messages: Sequence[Message]) -> list[dict[str, str]]:
    turns = []
    for message in messages:
        if any(isinstance(part, str) and _MARK in part for part in message.parts):
            raise Unfit(Reason.MESSAGE, f"a text must not have the private character {_MARK!a}")
        content = "".join(part if isinstance(part, str) else _MARK for part in message.parts)
        turns.append({"role": message.role, "content": content})
    return turns


def _encode(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Tokenize the text between clips."""
    first, *others = text.split(_MARK)
    ids = tokenizer.encode(first, "") if first else []
    for piece in others:
        ids.append(CLIP)
        ids += tokenizer.encode(piece, "") if piece else []
    return ids


def _checked(rows: list[int], messages: Sequence[Message]) -> np.ndarray:
    clips = sum(not isinstance(part, str) for message in messages for part in message.parts)
    if rows.count(CLIP) != clips:
        raise Unfit(
            Reason.CHAT_TEMPLATE,
            f"the chat template must write every clip once, but writes {rows.count(CLIP)} of "
            f"{clips}",
        )
    return np.array(rows, dtype=np.int32)
