"""Reads conversations: JSON lines with ``messages`` of text and audio.

Three layouts are read. Hugging Face's chat layout, which is also ours::

    {"id": "a", "messages": [
        {"role": "system", "content": "You transcribe speech."},
        {"role": "user", "content": [
            {"type": "audio", "audio": "a.wav", "offset": 1.0, "duration": 2.5},
            {"type": "text", "text": "What is said?"}]},
        {"role": "assistant", "content": "hello"}]}

and NeMo's, with a line's turns under ``conversations``, each of one part::

    {"id": "a", "conversations": [
        {"from": "User", "value": "What is said?", "type": "text"},
        {"from": "User", "value": "a.wav", "type": "audio", "duration": 2.5},
        {"from": "Assistant", "value": "hello", "type": "text"}]}

Neighbouring turns of one role are one message in NeMo's layout, joined by spaces. Relative audio
paths are relative to the manifest's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from effasr.data.filters.rules import Reason, Unfit
from effasr.data.manifest.fields import seconds_field
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.data.manifest.utterance import FileUtterance, absolute
from effasr.data.prompt import Prompt

Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_AUDIO_KEYS = ("audio", "path", "audio_filepath", "audio_url", "url")
"""Fields of an audio part that name the file, in the layouts of different models."""


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Speech within a message.

    Attributes:
        path: Absolute path of the file.
        offset: Start in the file, in seconds; None if it is the whole file.
        duration: Duration in seconds; None if it ends with the file.
    """

    path: str
    offset: float | None = None
    duration: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: its parts, texts and speech, in order."""

    role: Role
    parts: tuple[str | AudioPart, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A line of a manifest.

    Attributes:
        id: Name of the conversation.
        origin: File and line, for messages.
        messages: The turns.
        problem: Why it cannot be used; None if it can.
    """

    id: str
    origin: str
    messages: tuple[Message, ...]
    problem: Unfit | None = None

    @property
    def clips(self) -> tuple[FileUtterance, ...]:
        """Its speech, in order."""
        found = _audio_parts(self.messages)
        return tuple(
            FileUtterance(
                id=f"{self.id}-{number}",
                named=True,
                origin=self.origin,
                audio=part.path,
                text="",
                prompt=Prompt(),
                offset=part.offset,
                duration=part.duration,
            )
            for number, part in enumerate(found)
        )


def num_clips(messages: Sequence[Message]) -> int:
    """Return the number of audio parts of messages."""
    return len(_audio_parts(messages))


def _audio_parts(messages: Sequence[Message]) -> list[AudioPart]:
    parts = [part for message in messages for part in message.parts]
    return [part for part in parts if isinstance(part, AudioPart)]


def is_conversations(path: str | Path) -> bool:
    """Return whether a manifest is one of conversations, judged by its first line.

    Raises:
        ValueError: That line cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        return False
    for number, line in numbered_lines(path):
        row = parse_object(line, f"{path}:{number}")
        return "messages" in row or "conversations" in row
    return False


def conversations(path: str | Path) -> Iterator[Conversation]:
    """Yield the conversations of a manifest; no audio file is opened.

    A conversation that breaks a rule has a `Conversation.problem`: the first turn, after one of
    ``system`` if there is one, is of ``user``, then ``user`` and ``assistant`` take turns, and the
    last is of ``assistant``; only ``user`` speaks; no turn is empty.

    Raises:
        ValueError: The file cannot be read, or a line is no JSON object.
    """
    path, names = Path(path), set[str]()
    for number, line in numbered_lines(path):
        origin = f"{path}:{number}"
        row = parse_object(line, origin)
        given = row.get("id")
        name = given if isinstance(given, str) and given else f"{path.name}:{number}"
        problem, messages = None, ()
        try:
            if name in names:
                raise Unfit(Reason.MESSAGE, f"`id` {name!r} is that of an earlier line")
            messages = parse_messages(row, origin, path.parent)
        except Unfit as error:
            problem = error
        except ValueError as error:
            problem = Unfit(Reason.MESSAGE, str(error).removeprefix(f"{origin}: "))
        names.add(name)
        yield Conversation(name, origin, messages, problem)


def parse_messages(row: Mapping[str, Any], origin: str, folder: Path) -> tuple[Message, ...]:
    """Return the messages of a line and check them.

    Args:
        row: The line.
        origin: File and line, for messages.
        folder: Folder that relative audio paths are relative to.

    Raises:
        Unfit: A rule of `conversations` is broken.
        ValueError: A field has the wrong type.
    """
    if "conversations" in row and "messages" not in row:
        found = _nemo(_sequence(row["conversations"], "conversations"), origin, folder)
    elif "messages" in row:
        found = _hugging_face(_sequence(row["messages"], "messages"), origin, folder)
    else:
        raise Unfit(Reason.MESSAGE, "`messages` is missing")
    check_turns(found)
    if found[-1].role != "assistant":
        raise Unfit(Reason.ROLES, f"the last turn is of {found[-1].role}, not of assistant")
    return found


def check_turns(messages: Sequence[Message]) -> None:
    """Check the order and the content of turns; the last may be of any role.

    Raises:
        Unfit: A rule of `conversations` is broken.
    """
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not turns:
        raise Unfit(Reason.ROLES, "there is no turn of user")
    for number, message in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if message.role != expected:
            raise Unfit(
                Reason.ROLES, f"turn {number + 1} is of {message.role}, but must be of {expected}"
            )
    for message in messages:
        has_audio = any(isinstance(part, AudioPart) for part in message.parts)
        if has_audio and message.role != "user":
            raise Unfit(Reason.ROLES, f"a turn of {message.role} has audio, but only user speaks")
        if not has_audio and not "".join(map(str, message.parts)).strip():
            raise Unfit(Reason.EMPTY_TEXT, f"a turn of {message.role} is empty")


def _hugging_face(turns: Sequence[Any], origin: str, folder: Path) -> tuple[Message, ...]:
    messages = []
    for turn in turns:
        role = _role(_mapping(turn, "a message").get("role"), "role")
        content = turn.get("content")
        if isinstance(content, str):
            messages.append(Message(role, (content,)))
            continue
        parts = [_part(part, origin, folder) for part in _sequence(content, "content")]
        messages.append(Message(role, tuple(parts)))
    return tuple(messages)


def _part(part: Any, origin: str, folder: Path) -> str | AudioPart:
    kind = _mapping(part, "a part of `content`").get("type")
    if kind in ("text", "input_text"):
        text = part.get("text")
        if not isinstance(text, str):
            raise Unfit(Reason.MESSAGE, "`text` of a text part must be a string")
        return text
    if kind == "audio":
        where = next((part[key] for key in _AUDIO_KEYS if part.get(key) is not None), None)
        return _audio(where, part, origin, folder)
    raise Unfit(Reason.MESSAGE, f"`type` of a part must be text or audio, but is {kind!r}"[:200])


def _nemo(turns: Sequence[Any], origin: str, folder: Path) -> tuple[Message, ...]:
    messages: list[Message] = []
    for turn in turns:
        role = _role(_mapping(turn, "a turn").get("from"), "from")
        value, kind = turn.get("value"), turn.get("type", "text")
        if kind == "audio":
            part: str | AudioPart = _audio(value, turn, origin, folder)
        elif kind == "text" and isinstance(value, str):
            part = value
        else:
            raise Unfit(Reason.MESSAGE, "a turn must have a `value` and the `type` text or audio")
        if messages and messages[-1].role == role:
            messages[-1] = Message(role, (*messages[-1].parts, " ", part))
        else:
            messages.append(Message(role, (part,)))
    return tuple(messages)


def _audio(where: Any, part: Mapping[str, Any], origin: str, folder: Path) -> AudioPart:
    if not isinstance(where, str) or not where:
        raise Unfit(Reason.MESSAGE, "an audio part must name its file")
    if "://" in where or where.startswith("data:"):
        raise Unfit(
            Reason.MESSAGE, f"audio must be a local file, but is {where[:60]!r}: download it"
        )
    return AudioPart(
        absolute(where, folder),
        seconds_field(part, "offset", origin, zero=True),
        seconds_field(part, "duration", origin),
    )


def _role(name: Any, field: str) -> Role:
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        known = ", ".join(_ROLES)
        raise Unfit(Reason.ROLES, f"`{field}` must be one of {known}, but is {name!r}"[:200])
    return role


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Unfit(Reason.MESSAGE, f"{what} must be an object, but is {value!r}"[:200])
    return cast("Mapping[str, Any]", value)


def _sequence(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise Unfit(Reason.MESSAGE, f"`{name}` must be a list with entries, but is {value!r}"[:200])
    return value
