"""Utterances of manifests in flat arrays, before budgets and shares are applied."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from effasr.data.audio.speed_perturbation import duration_at, name_at
from effasr.data.audio.waveform import AudioError
from effasr.data.filters.rules import Dropped, Limits, check_copies, frames_of
from effasr.data.index.columns import (
    AudioColumns,
    AudioColumnsBuilder,
    Ragged,
    RaggedBuilder,
    to_numpy,
)
from effasr.data.manifest.reader import request
from effasr.data.manifest.utterance import CutUtterance, Utterance
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class UtteranceTable:
    """Utterances of manifests in manifest order; built by `IndexBuilder` or mapped from a file.

    Attributes:
        audio: Audio location of each manifest line.
        tokens: int32, prompt and text tokens of each line.
        speakers: int32, speaker number of each line; -1 where it is unknown.
        rows: int32 (n,), the line of each utterance; several utterances may share one.
        speeds: uint8 (n,), index of each utterance's speed in `Limits.speed_perturbation`.
        token_lengths: int32 (n,), tokens of prompt and text.
        prompt_lengths: int32 (n,), tokens of the prompt.
        prompt_ids: int32 (n,), index of each utterance's prompt in ``prompts``.
        frames: int32 (n,), encoder frames.
        durations: float64 (n,), seconds.
        sources: uint16 (n,), source number of each utterance.
        opened: bool (n,), whether the audio file was opened; lhotse cuts carry their duration.
        dropped_before: int32, for each of ``dropped`` the number of utterances before it.
        dropped: Utterances that cannot be trained on with any token budget.
        prompts: The different prompts, in order of first appearance.
    """

    audio: AudioColumns
    tokens: Ragged
    speakers: np.ndarray
    rows: np.ndarray
    speeds: np.ndarray
    token_lengths: np.ndarray
    prompt_lengths: np.ndarray
    prompt_ids: np.ndarray
    frames: np.ndarray
    durations: np.ndarray
    sources: np.ndarray
    opened: np.ndarray
    dropped_before: np.ndarray
    dropped: tuple[Dropped, ...]
    prompts: tuple[Prompt, ...]

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def languages(self) -> np.ndarray:
        """int32 (n,), number of the language of each text."""
        numbers: dict[str, int] = {}
        targets = (prompt.target for prompt in self.prompts)
        every = [numbers.setdefault(target, len(numbers)) for target in targets]
        return np.array(every, dtype=np.int32)[self.prompt_ids]


class IndexBuilder:
    """Builds an `UtteranceTable`."""

    def __init__(self) -> None:
        self.audio = AudioColumnsBuilder()
        self.tokens = RaggedBuilder("i")
        self.speakers = array("i")
        self.rows = array("i")
        self.speeds = array("B")
        self.token_lengths = array("i")
        self.prompt_lengths = array("i")
        self.prompt_ids = array("i")
        self.frames = array("i")
        self.durations = array("d")
        self.sources = array("H")
        self.opened = array("b")
        self.dropped_before = array("i")
        self.dropped: list[Dropped] = []
        self.prompts: dict[Prompt, int] = {}
        self.speaker_ids: dict[str, int] = {}

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
        tokens, fitting, dropped = check_copies(cut, utterance.audio, limits, tokenizer)
        for drop in dropped:
            self._drop(drop)
        if not fitting:
            return
        assert tokens is not None
        self.audio.append(cut)
        self.tokens.append(tokens.prompt + tokens.text)
        speaker = cut.supervisions[0].speaker
        known = self.speaker_ids.setdefault(speaker, len(self.speaker_ids)) if speaker else -1
        self.speakers.append(known)
        prompt = self.prompts.setdefault(request(cut), len(self.prompts))
        for number in fitting:
            speed = limits.speed_perturbation[number]
            self.rows.append(len(self.audio) - 1)
            self.speeds.append(number)
            self.token_lengths.append(len(tokens.prompt) + len(tokens.text))
            self.prompt_lengths.append(len(tokens.prompt))
            self.prompt_ids.append(prompt)
            self.frames.append(frames_of(cut, limits.framing, speed))
            self.durations.append(duration_at(cut.duration, speed))
            self.sources.append(source)
            self.opened.append(not isinstance(utterance, CutUtterance))

    def _drop(self, drop: Dropped) -> None:
        self.dropped.append(drop)
        self.dropped_before.append(len(self.rows))

    def extend(self, other: IndexBuilder) -> None:
        """Add the utterances of another builder."""
        lines, utterances = len(self.audio), len(self.rows)
        ids = [self.prompts.setdefault(prompt, len(self.prompts)) for prompt in other.prompts]
        speakers = [
            self.speaker_ids.setdefault(name, len(self.speaker_ids)) for name in other.speaker_ids
        ]
        self.speakers.extend(speakers[number] if number >= 0 else -1 for number in other.speakers)
        self.rows.extend(row + lines for row in other.rows)
        self.prompt_ids.extend(ids[number] for number in other.prompt_ids)
        self.dropped_before.extend(number + utterances for number in other.dropped_before)
        self.dropped += other.dropped
        self.audio.extend(other.audio)
        self.tokens.extend(other.tokens)
        for name, values in vars(other).items():
            shifted = name in ("speakers", "rows", "prompt_ids", "dropped_before")
            if isinstance(values, array) and not shifted:
                getattr(self, name).extend(values)

    def table(self) -> UtteranceTable:
        """Return the table, which shares the memory of this; nothing can be added any more."""
        columns = {
            name: to_numpy(values)
            for name, values in vars(self).items()
            if isinstance(values, array)
        }
        return UtteranceTable(
            **columns | {"opened": columns["opened"].view(np.bool_)},
            audio=self.audio.build(),
            tokens=self.tokens.build(),
            dropped=tuple(self.dropped),
            prompts=tuple(self.prompts),
        )
