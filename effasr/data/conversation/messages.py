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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from effasr.data.filters.rules import Reason, RejectedUtterance
from effasr.data.manifest.lines import first_fields, numbered_lines
from effasr.data.manifest.row import ManifestRow, RowError, absolute
from effasr.data.manifest.utterance import FileUtterance
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
    """Speech within a message."""

    path: str  # absolute
    offset: float | None = None  # seconds; None for a whole file
    duration: float | None = None  # seconds; None up to the end of the file


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: its parts, texts and speech, in order."""

    role: Role
    parts: tuple[str | AudioPart, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A line of a manifest."""

    id: str
    origin: str  # file and line
    messages: tuple[Message, ...]
    problem: RejectedUtterance | None = None  # why it cannot be used

    @property
    def clips(self) -> tuple[FileUtterance, ...]:
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
            for number, part in enumerate(_audio_parts(self.messages))
        )


def num_clips(messages: Sequence[Message]) -> int:
    return len(_audio_parts(messages))


def _audio_parts(messages: Sequence[Message]) -> list[AudioPart]:
    parts = [part for message in messages for part in message.parts]
    return [part for part in parts if isinstance(part, AudioPart)]


def is_conversations(path: str | Path) -> bool:
    """Return whether a manifest is one of conversations, judged by its first line."""
    return bool(first_fields(Path(path)).keys() & {"messages", "conversations"})


def conversations(path: str | Path) -> Iterator[Conversation]:
    """Yield the conversations of a manifest; no audio file is opened.

    A conversation that breaks a rule has a `Conversation.problem`: the first turn, after one of
    ``system`` if there is one, is of ``user``, then ``user`` and ``assistant`` take turns, and the
    last is of ``assistant``; only ``user`` speaks; no turn is empty.
    """
    path, names = Path(path), set[str]()
    for number, line in numbered_lines(path):
        row = ManifestRow.parse(line, path, number)
        name = row.values.get("id")
        if not isinstance(name, str) or not name:
            name = f"{path.name}:{number}"
        problem, messages = None, ()
        try:
            if name in names:
                raise _malformed(f"`id` {name!r} is that of an earlier line")
            if "conversations" in row.values and "messages" not in row.values:
                messages = _nemo(row)
            elif "messages" in row.values:
                messages = _hugging_face(row)
            else:
                raise _malformed("`messages` is missing")
            check_turns(messages)
            if messages[-1].role != "assistant":
                role = messages[-1].role
                raise RejectedUtterance(
                    Reason.ROLES, f"the last turn is of {role}, not of assistant"
                )
        except RejectedUtterance as error:
            problem = error
        except RowError as error:
            problem = _malformed(error.reason)
        names.add(name)
        yield Conversation(name, row.origin, messages, problem)


def check_turns(messages: Sequence[Message]) -> None:
    """Check the order and the content of turns; the last may be of any role."""
    turns = messages[1:] if messages and messages[0].role == "system" else messages
    if not turns:
        raise RejectedUtterance(Reason.ROLES, "there is no turn of user")
    for number, message in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if message.role != expected:
            raise RejectedUtterance(
                Reason.ROLES, f"turn {number + 1} is of {message.role}, but must be of {expected}"
            )
    for message in messages:
        has_audio = any(isinstance(part, AudioPart) for part in message.parts)
        if has_audio and message.role != "user":
            raise RejectedUtterance(
                Reason.ROLES, f"a turn of {message.role} has audio, but only user speaks"
            )
        if not has_audio and not "".join(map(str, message.parts)).strip():
            raise RejectedUtterance(Reason.EMPTY_TEXT, f"a turn of {message.role} is empty")


def _hugging_face(row: ManifestRow) -> tuple[Message, ...]:
    messages = []
    for turn in _list(row.values["messages"], "messages"):
        role = _role(_object(turn, "a message").get("role"), "role")
        content = turn.get("content")
        if isinstance(content, str):
            messages.append(Message(role, (content,)))
            continue
        parts = [_part(part, row) for part in _list(content, "content")]
        messages.append(Message(role, tuple(parts)))
    return tuple(messages)


def _part(part: Any, row: ManifestRow) -> str | AudioPart:
    kind = _object(part, "a part of `content`").get("type")
    if kind in ("text", "input_text"):
        text = part.get("text")
        if not isinstance(text, str):
            raise _malformed("`text` of a text part must be a string")
        return text
    if kind == "audio":
        path = next((part[key] for key in _AUDIO_KEYS if part.get(key) is not None), None)
        return _audio(path, part, row)
    raise _malformed(f"`type` of a part must be text or audio, but is {kind!r}")


def _nemo(row: ManifestRow) -> tuple[Message, ...]:
    messages: list[Message] = []
    for turn in _list(row.values["conversations"], "conversations"):
        role = _role(_object(turn, "a turn").get("from"), "from")
        value, kind = turn.get("value"), turn.get("type", "text")
        if kind == "audio":
            part: str | AudioPart = _audio(value, turn, row)
        elif kind == "text" and isinstance(value, str):
            part = value
        else:
            raise _malformed("a turn must have a `value` and the `type` text or audio")
        if messages and messages[-1].role == role:
            messages[-1] = Message(role, (*messages[-1].parts, " ", part))
        else:
            messages.append(Message(role, (part,)))
    return tuple(messages)


def _audio(path: Any, part: Mapping[str, Any], row: ManifestRow) -> AudioPart:
    if not isinstance(path, str) or not path:
        raise _malformed("an audio part must name its file")
    if "://" in path or path.startswith("data:"):
        raise _malformed(f"audio must be a local file, but is {path[:60]!r}: download it")
    fields = replace(row, values=part)
    return AudioPart(
        absolute(path, row.path.parent),
        fields.seconds("offset", zero=True),
        fields.seconds("duration"),
    )


def _role(name: Any, field: str) -> Role:
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        details = f"`{field}` must be one of {', '.join(_ROLES)}, but is {name!r}"
        raise RejectedUtterance(Reason.ROLES, details[:200])
    return role


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(f"{name} must be an object, but is {value!r}")
    return cast("Mapping[str, Any]", value)


def _list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise _malformed(f"`{name}` must be a list with entries, but is {value!r}")
    return value


def _malformed(details: str) -> RejectedUtterance:
    return RejectedUtterance(Reason.MESSAGE, details[:200])
