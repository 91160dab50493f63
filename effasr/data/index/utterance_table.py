"""What manifests hold, in flat arrays: before a budget is known, and before one takes any away."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import IO, Protocol

import numpy as np

from effasr.data.audio.speed_perturbation import duration_at, name_at
from effasr.data.audio.waveform import AudioError
from effasr.data.filters.rules import Dropped, Limits, check_copies, frames_of
from effasr.data.index.ragged import Ragged, ragged
from effasr.data.manifest.reader import request
from effasr.data.manifest.utterance import CutUtterance, Utterance
from effasr.data.mixture_summary import SOURCE_DTYPE
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class UtteranceTable:
    """Utterances of manifests, in their order; made by `Gathering`, or mapped from a file.

    Attributes:
        lines: uint8, each a lhotse cut as JSON.
        tokens: int32, prompt and text of each line.
        rows: int32 (n,), the line of each utterance; several may share one.
        speeds: uint8 (n,), the number of each utterance's speed in `Limits.speed_perturbation`.
        token_lengths: int32 (n,), tokens of prompt and text.
        prompt_lengths: int32 (n,), tokens of the prompt.
        frames: int32 (n,), encoder frames.
        durations: float64 (n,), seconds.
        sources: uint16 (n,), the number of each utterance's source.
        monotonic: bool (n,), whether the text follows the speech in order.
        opened: bool (n,), whether its audio was looked at: a cut says by itself how long it is.
        dropped: What cannot be trained on, whatever the token budget is.
        dropped_before: int32, for each of these, how many utterances came before it.
        prompts: How often each request is made.
    """

    lines: Ragged
    tokens: Ragged
    rows: np.ndarray
    speeds: np.ndarray
    token_lengths: np.ndarray
    prompt_lengths: np.ndarray
    frames: np.ndarray
    durations: np.ndarray
    sources: np.ndarray
    monotonic: np.ndarray
    opened: np.ndarray
    dropped: tuple[Dropped, ...]
    dropped_before: np.ndarray
    prompts: Counter[Prompt]

    def __len__(self) -> int:
        return len(self.frames)


class Lines(Protocol):
    """Where the lines go."""

    def add(self, data: bytes | bytearray) -> None:
        """Add what comes next."""
        ...

    def values(self) -> np.ndarray:
        """uint8, all of it; nothing is added after."""
        ...


class LinesInMemory:
    """Lines in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, data: bytes | bytearray) -> None:
        """See `Lines`."""
        self.data += data

    def values(self) -> np.ndarray:
        """See `Lines`."""
        return np.frombuffer(self.data, dtype=np.uint8)


class LinesInFile:
    """Lines in a file, which is mapped: they are most of a corpus.

    Args:
        file: Empty and open for reading and writing; it stays open as long as this.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = 0

    def add(self, data: bytes | bytearray) -> None:
        """See `Lines`."""
        self._size += self._file.write(data)

    def values(self) -> np.ndarray:
        """See `Lines`."""
        self._file.flush()
        if not self._size:
            return np.zeros(0, np.uint8)
        return np.asarray(np.memmap(self._file, np.uint8, "r"))


class Gathering:
    """A table while it is made.

    Args:
        lines: Where the lines go; into memory by default.
    """

    def __init__(self, lines: Lines | None = None) -> None:
        self.lines: Lines = LinesInMemory() if lines is None else lines
        self.dropped: list[Dropped] = []
        self.dropped_before = array("i")
        self.tokens = array("i")
        self.line_lengths = array("i")
        self.row_tokens = array("i")
        self.token_lengths = array("i")
        self.rows = array("i")
        self.speeds = array("B")
        self.prompt_lengths = array("i")
        self.frames = array("i")
        self.durations = array("d")
        self.sources = array("H")
        self.monotonic = array("b")
        self.opened = array("b")
        self.prompts: Counter[Prompt] = Counter()

    def add(
        self, name: str, utterance: Utterance, limits: Limits, tokenizer: Tokenizer, source: int
    ) -> None:
        """Keep an utterance, or note why not."""
        try:
            cut = utterance.cut(name)
        except AudioError as error:
            for speed in limits.speed_perturbation:
                copy = name_at(name, speed)
                self._drop(Dropped(copy, error.problem, str(error), utterance.audio))
            return
        tokens, fitting, dropped = check_copies(cut, utterance.audio, limits, tokenizer)
        for drop in dropped:
            self._drop(drop)
        if not fitting:
            return
        assert tokens is not None
        line = utterance.line if isinstance(utterance, CutUtterance) else None
        data = (line or json.dumps(cut.to_dict(), ensure_ascii=False)).encode()
        self.lines.add(data)
        self.line_lengths.append(len(data))
        self.tokens.extend(tokens.prompt)
        self.tokens.extend(tokens.text)
        self.row_tokens.append(len(tokens.prompt) + len(tokens.text))
        for number in fitting:
            speed = limits.speed_perturbation[number]
            self.rows.append(len(self.line_lengths) - 1)
            self.speeds.append(number)
            self.token_lengths.append(self.row_tokens[-1])
            self.prompt_lengths.append(len(tokens.prompt))
            self.frames.append(frames_of(cut, limits.framing, speed))
            self.durations.append(duration_at(cut.duration, speed))
            self.sources.append(source)
            self.monotonic.append(tokens.monotonic)
            self.opened.append(not isinstance(utterance, CutUtterance))
        self.prompts[request(cut)] += len(fitting)

    def _drop(self, drop: Dropped) -> None:
        self.dropped.append(drop)
        self.dropped_before.append(len(self.rows))

    def extend(self, other: Gathering) -> None:
        """Add what another one, with its lines in memory, has gathered."""
        assert isinstance(other.lines, LinesInMemory)
        before, utterances = len(self.line_lengths), len(self.rows)
        self.lines.add(other.lines.data)
        self.rows.extend(row + before for row in other.rows)
        self.dropped_before.extend(number + utterances for number in other.dropped_before)
        self.dropped += other.dropped
        self.prompts.update(other.prompts)
        for name, values in vars(other).items():
            if isinstance(values, array) and name not in ("rows", "dropped_before"):
                getattr(self, name).extend(values)

    def table(self) -> UtteranceTable:
        """The table, which shares the memory of this; nothing can be added any more."""
        return UtteranceTable(
            lines=ragged(self.lines.values(), _values(self.line_lengths, np.int32)),
            tokens=ragged(_values(self.tokens, np.int32), _values(self.row_tokens, np.int32)),
            token_lengths=_values(self.token_lengths, np.int32),
            rows=_values(self.rows, np.int32),
            speeds=_values(self.speeds, np.uint8),
            prompt_lengths=_values(self.prompt_lengths, np.int32),
            frames=_values(self.frames, np.int32),
            durations=_values(self.durations, np.float64),
            sources=_values(self.sources, SOURCE_DTYPE),
            monotonic=_values(self.monotonic, np.bool_),
            opened=_values(self.opened, np.bool_),
            dropped=tuple(self.dropped),
            dropped_before=_values(self.dropped_before, np.int32),
            prompts=self.prompts,
        )


def _values(values: array, dtype: type) -> np.ndarray:
    return np.frombuffer(values, dtype) if values else np.zeros(0, dtype)
