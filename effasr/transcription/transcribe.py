"""Transcription of audio files and arrays, with its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import soxr

from effasr.data.audio.waveform import load_audio
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.model.asr import ASRModel
from effasr.transcription.inputs.arrival import Interruption
from effasr.transcription.inputs.audio_stream import AudioStream, open_stream
from effasr.transcription.inputs.sources import Source
from effasr.transcription.json_files import json_line, one_line
from effasr.transcription.recognizer import Recognizer, Request
from effasr.transcription.results import Failure, Result, Transcription


@dataclass(frozen=True, slots=True)
class Waveform:
    id: str
    samples: np.ndarray  # floating point (samples,) or (samples, channels), full scale 1
    sample_rate: int


class TranscriptionRun:
    """The results of one call of `transcribe`, to iterate over once."""

    def __init__(self, results: Iterator[Result], vad: str):
        self._results = results
        self.vad = vad  # name of the detector of speech
        self.audio_seconds = 0.0
        self.seconds = 0.0
        self.failed = 0

    @property
    def rtfx(self) -> float:
        """Seconds of audio per second of this call; 0 before the first result."""
        return self.audio_seconds / self.seconds if self.seconds else 0.0

    def __iter__(self) -> Iterator[Result]:
        started = time.perf_counter()
        for result in self._results:
            self.seconds = time.perf_counter() - started
            if isinstance(result, Failure):
                self.failed += 1
            else:
                self.audio_seconds += result.duration
            yield result


def transcribe(
    model: ASRModel,
    tokenizer: Tokenizer,
    sources: Iterable[str | Path | Source | Waveform],
    *,
    prompt: Prompt | None = None,
    config: DecodingConfig | None = None,
    on_audio: Callable[[float], None] | None = None,
    interruption: Interruption | None = None,
) -> TranscriptionRun:
    """Transcribe recordings of any sample rate, number of channels and length.

    Results come in the order of the sources, while later ones are being read. A source that cannot
    be read gives a `Failure`, and the others go on.

    Args:
        model: Decodes on its device.
        tokenizer: Tokenizer of the model.
        sources: Audio files, results of `effasr.transcription.inputs.sources`, or audio in memory.
            Channels are averaged. Only a part of a long file is in memory at a time.
        prompt: Languages and task of sources without a prompt; English speech to English text by
            default.
        config: The default configuration by default.
        on_audio: Called after each batch, with the seconds of audio in it.
        interruption: Ends the results when it is requested: recordings that are decoded in part
            have a transcript that is marked as partial.

    Raises:
        ValueError: The tokenizer does not know the prompt's languages, CTC is asked to translate,
            or the model lacks what ``config.method`` needs.
    """
    prompt = Prompt() if prompt is None else prompt
    recognizer = Recognizer(model, tokenizer, config)
    recognizer.prompt(prompt)  # a wrong prompt is the caller's error, not that of each file
    requests = (_request(source, prompt, recognizer.sample_rate) for source in sources)
    results = recognizer.results(requests, on_audio, interruption)
    return TranscriptionRun(results, recognizer.vad)


def render(result: Result, style: Literal["text", "jsonl"]) -> str:
    """Return a result as one line: id, tab and text, or its JSON object."""
    if style == "jsonl":
        return json_line(result.as_row())
    text = full_text(result) if isinstance(result, Transcription) else f"failed: {result.reason}"
    return f"{one_line(result.id)}\t{one_line(text)}\n"


def full_text(result: Transcription) -> str:
    """Return the text of a transcript, with a mark if it is partial."""
    if result.partial is None:
        return result.text
    return f"{result.text} [partial: {one_line(result.partial)}]".lstrip()


def _request(source: str | Path | Source | Waveform, prompt: Prompt, sample_rate: int) -> Request:
    if isinstance(source, Waveform):
        return Request(source.id, partial(_mono, source, sample_rate), prompt)
    if isinstance(source, Source):
        return Request(source.id, partial(_load, source, sample_rate), source.prompt or prompt)
    return Request(str(source), partial(open_stream, source, sample_rate), prompt)


def _load(source: Source, sample_rate: int) -> np.ndarray | AudioStream:
    if source.problem is not None:
        raise ValueError(source.problem)
    if source.cut is not None:
        return load_audio(source.cut, sample_rate)
    return open_stream(
        source.audio,
        sample_rate,
        offset=source.offset,
        duration=source.duration,
        channels=source.channels,
        track=source.track,
    )


def _mono(waveform: Waveform, sample_rate: int) -> np.ndarray:
    samples = np.asarray(waveform.samples, dtype=np.float32)
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if waveform.sample_rate != sample_rate:
        samples = soxr.resample(samples, waveform.sample_rate, sample_rate)
    return samples
