"""Token rows of a conversation, by the chat template of a tokenizer."""

from collections.abc import Sequence

import numpy as np

from effasr.data.conversation.messages import Message, num_clips
from effasr.data.conversation.rows import CLIP
from effasr.data.filters.rules import Reason, RejectedUtterance
from effasr.data.tokenizer.chat import ChatTokenizer
from effasr.untrusted.chat_template import TemplateError

_MARK = "\ue0fa"
"""A character for private use, which stands for a clip while the template is rendered."""


def training_rows(
    messages: Sequence[Message], tokenizer: ChatTokenizer
) -> list[tuple[int, np.ndarray]]:
    """Return what a conversation is trained as.

    One example has all answers where the template shows each of them as it asks for it. Some show
    earlier answers in another way than the last (Qwen3's, which leaves out their thinking). There
    each answer has its own example, of the turns before it as inference shows them.

    Each example is the number of turns, from the first, and the rows of `conversation_rows`.
    """
    answers = [turn for turn, message in enumerate(messages, 1) if message.role == "assistant"]
    try:
        return [(len(messages), conversation_rows(messages, tokenizer))]
    except _ChangedTurns:
        if len(answers) == 1:
            raise
    return [(turns, _answer_rows(messages[:turns], tokenizer)) for turns in answers]


def conversation_rows(messages: Sequence[Message], tokenizer: ChatTokenizer) -> np.ndarray:
    """Return the rows of a conversation, int32 (n,), coded as in `effasr.data.conversation.rows`.

    The model must write what the template adds for a turn of the assistant to a conversation that
    asks for one: the text and the token that ends the turn, which is added where the template has
    none. Texts are tokenized between turns and clips, as they are in inference.
    """
    return _checked(_rows(messages, tokenizer, asks=False), messages)


def prompt_rows(messages: Sequence[Message], tokenizer: ChatTokenizer) -> np.ndarray:
    """Return the rows of a conversation that asks the assistant to answer: int32 (n,)."""
    try:
        rows = _rows(messages, tokenizer, asks=True)
    except _ChangedTurns:
        rows = _encode(_render(messages, tokenizer, asks=True), tokenizer)
    return _checked([row if row >= 0 or row == CLIP else ~row for row in rows], messages)


class _ChangedTurns(RejectedUtterance):
    """The template shows a turn in another way when more follow."""

    def __init__(self, turn: int) -> None:
        super().__init__(
            Reason.CHAT_TEMPLATE,
            f"the chat template changes what is before turn {turn} when it follows",
        )


def _rows(messages: Sequence[Message], tokenizer: ChatTokenizer, *, asks: bool) -> list[int]:
    """Return the rows of a conversation, or of one that asks for an answer."""
    rows, cursor = [], 0
    whole = _render(messages, tokenizer, asks=asks)
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        question = _render(messages[:number], tokenizer, asks=True)
        answered = _render(messages[: number + 1], tokenizer, asks=False)
        if not (whole.startswith(answered) and answered.startswith(question)):
            raise _ChangedTurns(number + 1)
        written = answered[len(question) :].rstrip()
        rows += _encode(whole[cursor : len(question)], tokenizer) + _targets(written, tokenizer)
        cursor = len(question) + len(written)
    return rows + _encode(whole[cursor:], tokenizer) if asks else rows


def _answer_rows(messages: Sequence[Message], tokenizer: ChatTokenizer) -> np.ndarray:
    """Return the rows of a conversation of which the model must write the last turn alone."""
    question = _render(messages[:-1], tokenizer, asks=True)
    answered = _render(messages, tokenizer, asks=False)
    if not answered.startswith(question):
        raise _ChangedTurns(len(messages))
    prompt = prompt_rows(messages[:-1], tokenizer).tolist()
    return _checked(prompt + _targets(answered[len(question) :].rstrip(), tokenizer), messages)


def _targets(written: str, tokenizer: ChatTokenizer) -> list[int]:
    """Return the coded tokens that the model must write for a turn, with the one that ends it."""
    ids = tokenizer.encode(written, "")
    if not ids or ids[-1] not in tokenizer.stop_ids:
        ids.append(tokenizer.eos_id)
    return [~token for token in ids]


def _render(messages: Sequence[Message], tokenizer: ChatTokenizer, *, asks: bool) -> str:
    try:
        turns = []
        for message in messages:
            if any(isinstance(part, str) and _MARK in part for part in message.parts):
                raise RejectedUtterance(
                    Reason.MESSAGE, f"a text must not have the private character {_MARK!a}"
                )
            content = "".join(part if isinstance(part, str) else _MARK for part in message.parts)
            turns.append({"role": message.role, "content": content})
        return tokenizer.render(turns, asks=asks)
    except TemplateError as error:
        raise RejectedUtterance(Reason.CHAT_TEMPLATE, str(error)) from error


def _encode(text: str, tokenizer: ChatTokenizer) -> list[int]:
    first, *following = text.split(_MARK)
    ids = tokenizer.encode(first, "") if first else []
    for piece in following:
        ids.append(CLIP)
        ids += tokenizer.encode(piece, "") if piece else []
    return ids


def _checked(rows: list[int], messages: Sequence[Message]) -> np.ndarray:
    clips = num_clips(messages)
    if rows.count(CLIP) != clips:
        raise RejectedUtterance(
            Reason.CHAT_TEMPLATE,
            f"the chat template must write every clip once, but writes {rows.count(CLIP)} of "
            f"{clips}",
        )
    return np.array(rows, dtype=np.int32)
