"""Transcription of audio files and arrays, with its speed."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
from effasr.transcription.inputs.audio_stream import AudioStream, count_channels, open_stream
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
    requests = itertools.chain.from_iterable(
        _requests(number, source, prompt, recognizer.sample_rate)
        for number, source in enumerate(sources)
    )
    results = _joined(recognizer.results(requests, on_audio, interruption))
    return TranscriptionRun(results, recognizer.vad)


def render(result: Result, style: Literal["text", "jsonl"]) -> str:
    """Return a result as one line: id, tab and text, or its JSON object."""
    if style == "jsonl":
        return json_line(result.as_row())
    failed = not isinstance(result, Transcription)
    lines = [f"failed: {result.reason}"] if failed else text_lines(result)
    return "".join(f"{one_line(result.id)}\t{one_line(line)}\n" for line in lines)


def text_lines(result: Transcription) -> list[str]:
    """Return the text of a transcript, or of each channel, with a mark if it is partial."""
    lines = [result.text]
    if result.channels:
        lines = [f"channel {n}: {result.of_channel(n).text}" for n in result.channels]
    if result.partial is not None:
        lines[-1] = f"{lines[-1]} [partial: {one_line(result.partial)}]".lstrip()
    return lines


def _requests(
    number: int, source: str | Path | Source | Waveform, prompt: Prompt, sample_rate: int
) -> Iterator[Request]:
    """Yield the request of a source, or those of its channels."""
    if not isinstance(source, Source) or not source.per_channel:
        yield _request(source, prompt, sample_rate)
        return
    for channel in range(count_channels(source.audio, source.track)):
        request = _request(replace(source, channel=channel), prompt, sample_rate)
        # Two sources may have one name.
        yield replace(request, id=f"{_CHANNEL_OF}{number}\0{source.id}")


_CHANNEL_OF = "\0"  # begins the names of requests whose results are joined; no file has it


def _joined(results: Iterable[Result]) -> Iterator[Result]:
    """Join the results of the channels of a recording, segments in the order of their times."""
    for name, group in itertools.groupby(results, lambda result: result.id):
        if not name.startswith(_CHANNEL_OF):
            yield from group
            continue
        parts, name = list(group), name.split("\0", 2)[2]
        channels = [part for part in parts if isinstance(part, Transcription)]
        failures = [part.reason for part in parts if isinstance(part, Failure)]
        if failures:
            yield Failure(name, failures[0])
            continue
        joined = replace(
            channels[0],
            id=name,
            duration=max(part.duration for part in channels),
            partial=next((part.partial for part in channels if part.partial is not None), None),
            channels=tuple(range(len(channels))),
        )
        segments = itertools.chain.from_iterable(part.segments for part in channels)
        yield joined.with_segments(sorted(segments, key=lambda segment: segment.start))


def _request(source: str | Path | Source | Waveform, prompt: Prompt, sample_rate: int) -> Request:
    if isinstance(source, Waveform):
        return Request(source.id, partial(_mono, source, sample_rate), prompt)
    if isinstance(source, Source):
        load = partial(_load, source, sample_rate)
        return Request(source.id, load, source.prompt or prompt, source.channel)
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
        channels=source.channels if source.channel is None else (source.channel,),
        recorded=source.recorded,
        track=source.track,
    )


def _mono(waveform: Waveform, sample_rate: int) -> np.ndarray:
    samples = np.asarray(waveform.samples, dtype=np.float32)
    if samples.ndim == 2:
        samples = samples.mean(axis=1)
    if waveform.sample_rate != sample_rate:
        samples = soxr.resample(samples, waveform.sample_rate, sample_rate)
    return samples
