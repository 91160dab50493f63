"""Utterances of manifests in flat arrays, before budgets and shares are applied."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from effasr.data.audio.waveform import AudioError, duration_at, name_at
from effasr.data.filters.rules import Dropped, Limits, check_copies, frames_of
from effasr.data.index.columns import (
    AudioColumns,
    AudioColumnsBuilder,
    Ragged,
    RaggedBuilder,
    to_numpy,
)
from effasr.data.index.selection import UtteranceColumns
from effasr.data.manifest.cuts import audio_of, prompt_of
from effasr.data.manifest.utterance import CutUtterance, Utterance
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class UtteranceTable:
    """Utterances of manifests in manifest order; built by `IndexBuilder` or mapped from a file."""

    # Of each manifest line:
    audio: AudioColumns
    tokens: Ragged  # int32, of prompt and text
    times: Ragged  # float32, seconds of the tokens of times among them, at speed 1
    speakers: np.ndarray  # int32, numbers of speakers; -1 where the speaker is unknown
    # Of each utterance, several of which may share a line at different speeds:
    rows: np.ndarray  # int32 (n,), its line
    speeds: np.ndarray  # uint8 (n,), index in `Limits.speed_perturbation`
    token_lengths: np.ndarray  # int32 (n,), of prompt and text
    prompt_lengths: np.ndarray  # int32 (n,)
    prompt_ids: np.ndarray  # int32 (n,), index in ``prompts``
    frames: np.ndarray  # int32 (n,), of the encoder
    durations: np.ndarray  # float64 (n,), seconds
    sources: np.ndarray  # uint16 (n,)
    opened: np.ndarray  # bool (n,), whether the audio file was opened
    assumed: np.ndarray  # bool (n,), whether its line names no language
    dropped_before: np.ndarray  # int32, for each of ``dropped`` the number of utterances before it
    dropped: tuple[Dropped, ...]  # utterances that no token budget allows
    prompts: tuple[Prompt, ...]  # different ones, in order of first appearance

    def __len__(self) -> int:
        return len(self.frames)

    def columns(self, speeds: Sequence[float]) -> UtteranceColumns:
        def identify(index: int) -> tuple[str, str]:
            row = self.rows[index]
            name = name_at(self.audio.name(row), speeds[self.speeds[index]])
            return name, audio_of(self.audio[row])

        # Tokens of times are no text, of which each second has about as much.
        return UtteranceColumns(
            self.durations,
            self.frames,
            self.token_lengths,
            self.prompt_lengths + self.times.lengths[self.rows].astype(np.int32),
            self.sources,
            lambda: number_languages(self.prompts)[self.prompt_ids],
            identify,
        )


def number_languages(prompts: Iterable[Prompt]) -> np.ndarray:
    """Return the number of the language of each prompt's text, int32."""
    numbers: dict[str, int] = {}
    languages = [numbers.setdefault(prompt.target, len(numbers)) for prompt in prompts]
    return np.array(languages, dtype=np.int32)


_TYPECODES = {
    **dict.fromkeys(("speakers", "rows", "token_lengths", "prompt_lengths", "prompt_ids"), "i"),
    **{"frames": "i", "durations": "d", "sources": "H", "speeds": "B"},
    **{"dropped_before": "i", "opened": "b", "assumed": "b"},
}


class IndexBuilder:
    """Builds an `UtteranceTable`; ``columns`` are its flat columns by name."""

    def __init__(self) -> None:
        self.audio, self.tokens = AudioColumnsBuilder(), RaggedBuilder("i")
        self.times = RaggedBuilder("f")
        self.columns = {name: array(code) for name, code in _TYPECODES.items()}
        self.dropped: list[Dropped] = []
        self.prompts: dict[Prompt, int] = {}
        self.speaker_ids: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.columns["rows"])

    def add(
        self, name: str, utterance: Utterance, limits: Limits, tokenizer: Tokenizer, source: int
    ) -> None:
        """Add an utterance at every speed, or record why it was dropped."""
        try:
            cut = utterance.cut(name)
        except AudioError as error:
            for speed in limits.speed_perturbation:
                copy = name_at(name, speed)
                self._drop(Dropped(copy, error.problem, str(error), utterance.audio))
            return
        tokens, usable, dropped = check_copies(cut, utterance.audio, limits, tokenizer)
        for drop in dropped:
            self._drop(drop)
        if not usable:
            return
        assert tokens is not None
        self.audio.append(cut)
        self.tokens.append(tokens.prompt + tokens.text)
        self.times.append(tokens.times)
        self.columns["speakers"].append(self._speaker_id(cut.supervisions[0].speaker))
        prompt_id = self.prompts.setdefault(prompt_of(cut), len(self.prompts))
        count, speeds = len(usable), [limits.speed_perturbation[number] for number in usable]
        utterances = {
            "rows": [len(self.audio) - 1] * count,
            "speeds": usable,
            "token_lengths": [len(tokens.prompt) + len(tokens.text)] * count,
            "prompt_lengths": [len(tokens.prompt)] * count,
            "prompt_ids": [prompt_id] * count,
            "frames": [frames_of(cut, limits.framing, speed) for speed in speeds],
            "durations": [duration_at(cut.duration, speed) for speed in speeds],
            "sources": [source] * count,
            "opened": [not isinstance(utterance, CutUtterance)] * count,
            "assumed": ["lang" not in utterance.stated] * count,
        }
        for column, values in utterances.items():
            self.columns[column].extend(values)

    def _speaker_id(self, name: str | None) -> int:
        return self.speaker_ids.setdefault(name, len(self.speaker_ids)) if name else -1

    def _drop(self, drop: Dropped) -> None:
        self.dropped.append(drop)
        self.columns["dropped_before"].append(len(self))

    def extend(self, other: "IndexBuilder") -> None:
        lines, utterances = len(self.audio), len(self)
        prompt_ids = [
            self.prompts.setdefault(prompt, len(self.prompts)) for prompt in other.prompts
        ]
        speakers = [self._speaker_id(name) for name in other.speaker_ids]
        renumbered = {
            "speakers": lambda number: speakers[number] if number >= 0 else -1,
            "rows": lambda row: row + lines,
            "prompt_ids": lambda number: prompt_ids[number],
            "dropped_before": lambda number: number + utterances,
        }
        for name, values in other.columns.items():
            change = renumbered.get(name)
            self.columns[name].extend(values if change is None else map(change, values))
        self.dropped += other.dropped
        self.audio.extend(other.audio)
        self.tokens.extend(other.tokens)
        self.times.extend(other.times)

    def table(self) -> UtteranceTable:
        """Return the table, which shares the memory of this builder; nothing can be added to it."""
        columns = {name: to_numpy(values) for name, values in self.columns.items()}
        return UtteranceTable(
            **columns | {name: columns[name].view(np.bool_) for name in ("opened", "assumed")},
            audio=self.audio.build(),
            tokens=self.tokens.build(),
            times=self.times.build(),
            dropped=tuple(self.dropped),
            prompts=tuple(self.prompts),
        )
