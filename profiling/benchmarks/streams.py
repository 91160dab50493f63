"""Streams that arrive in real time at an `OnlineRecognizer`: delays, RTFx and memory.

The clock is simulated: decoding advances it by the time it takes, and where there is nothing to
decode it jumps to the next chunk. So an hour of audio takes as long as it is decoded, and a
recognizer that is too slow for its streams falls behind as it would with real ones.

The delay of a frame has two parts. The algorithmic entry, from its end to the last sample of its
chunk, depends on the model alone. The rest is the time from the arrival of that sample until
`decode` returns, with what is recognised: waiting for other streams, and computing.
"""

from __future__ import annotations

import os
import random
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from effasr.transcription.online import OnlineRecognizer, OnlineStream

COLUMNS = (
    *("model", "method", "beam", "context", "chunk_s", "streams", "tick_s", "utterances"),
    *("audio_s", "rtfx", "algorithmic_p50_s", "algorithmic_p99_s", "delay_p50_s", "delay_p90_s"),
    *("delay_p99_s", "rss_minute_1_mb", "rss_end_mb", "wer"),
    *("threads", "dtype", *harness.VERSIONS),
)


class Repeated:
    """Audio of any length that repeats the same samples, and takes the memory of these alone."""

    def __init__(self, samples: np.ndarray, length: int):
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        indices = np.arange(*part.indices(self._length))
        return self._samples[indices % len(self._samples)]


Audio = np.ndarray | Repeated


@dataclass(slots=True)
class Served:
    audio_s: float = 0.0
    busy_s: float = 0.0  # in `OnlineRecognizer.decode`
    texts: list[str] = field(default_factory=list)
    # Frames by their algorithmic delay, of which there are few values.
    algorithmic_s: Counter[float] = field(default_factory=Counter)
    # The rest of the delay, of each chunk of each stream.
    delays_s: array[float] = field(default_factory=lambda: array("d"))
    # Resident memory after the first simulated minute, and at the end.
    rss_mb: tuple[float, float] = (0.0, 0.0)


def row(recognizer: OnlineRecognizer, served: Served, streams: int, beam: int) -> dict[str, Any]:
    """Return the columns that follow from a recognizer, its beam and its streams."""
    context, counts = recognizer.context, served.algorithmic_s
    algorithmic = np.quantile(np.repeat(list(counts), list(counts.values())), (0.5, 0.99))
    delays = np.quantile(served.delays_s, (0.5, 0.9, 0.99))
    names = [name for name in COLUMNS if name.startswith(("algorithmic", "delay"))]
    times = zip(names, (*algorithmic, *delays), strict=True)
    return {
        **{"method": recognizer.method, "beam": beam, "streams": streams},
        "context": f"{context.left}/{context.right}/{context.chunk}",
        "chunk_s": round(recognizer.latency_seconds, 3),
        "threads": torch.get_num_threads(),
        "utterances": len(served.texts),
        "audio_s": round(served.audio_s, 2),
        "rtfx": round(served.audio_s / served.busy_s, 2),
        **{name: round(float(value), 5) for name, value in times},
        "rss_minute_1_mb": round(served.rss_mb[0], 1),
        "rss_end_mb": round(served.rss_mb[1], 1),
    }


def described(row: Mapping[str, Any]) -> str:
    return (
        f"{row['model']}, {row['method']}, beam {row['beam']}, {row['streams']} streams, context "
        f"{row['context']}: RTFx {row['rtfx']}, "
        f"delay {row['algorithmic_p50_s']:.2f} s + {1000 * row['delay_p50_s']:.1f} ms (90 %: "
        f"{1000 * row['delay_p90_s']:.1f}, 99 %: {1000 * row['delay_p99_s']:.1f})"
        f", memory {row['rss_minute_1_mb']} to {row['rss_end_mb']} MB"
    )


@dataclass(slots=True)
class _Live:
    """A stream, and how much of its recording has arrived."""

    name: int
    audio: Audio
    begin: float
    stream: OnlineStream
    fed: int = 0
    decoded: int = 0

    def feed(self, now: float, rate: int) -> None:
        """Feed what has arrived; a rounded time must not hide the sample that it stands for."""
        arrived = min(len(self.audio), max(0, int((now - self.begin) * rate + 1e-3)))
        if arrived > self.fed:
            self.stream.feed(self.audio[self.fed : arrived])
            self.fed = arrived
        if arrived == len(self.audio) and not self.stream.finished:
            self.stream.finish()

    def ready(self, rate: int) -> float:
        """Return when the next chunk can be decoded."""
        return self.begin + min(self.stream.samples_needed, len(self.audio)) / rate


def serve(
    recognizer: OnlineRecognizer, recordings: Sequence[Audio], streams: int, tick_s: float = 0.0
) -> Served:
    """Decode recordings, so many at a time, each at the pace at which it is spoken.

    Streams begin at different times within a chunk; where one ends, the next recording begins.
    From one call of `OnlineRecognizer.decode` to the next there are at least `tick_s` seconds: a
    batch costs the same for one stream as for all.
    """
    rate, draw = recognizer.sample_rate, random.Random(0)
    served = Served(texts=[""] * len(recordings))
    waiting, live, now = deque(enumerate(recordings)), list[_Live](), 0.0

    def begin(at: float) -> None:
        name, audio = waiting.popleft()
        live.append(_Live(name, audio, at, recognizer.open()))

    for _ in range(min(streams, len(recordings))):
        begin(draw.uniform(0, recognizer.latency_seconds))
    first_minute = None
    while live:
        for entry in live:
            entry.feed(now, rate)
        started = time.perf_counter()
        count = recognizer.decode()
        passed = time.perf_counter() - started
        served.busy_s += passed
        next_tick, now = now + tick_s, now + passed
        for entry in list(live):
            _note_delays(served, recognizer, entry, now)
            served.texts[entry.name] += "".join(f" {part.text}" for part in entry.stream.take())
            if entry.stream.done:
                served.audio_s += len(entry.audio) / rate
                live.remove(entry)
                if waiting:
                    begin(now)
        if first_minute is None and now >= 60:
            first_minute = _rss_mb()
        now = max(now, next_tick)
        if not count and live:
            now = max(now, min(entry.ready(rate) for entry in live))
    served.texts = [text.strip() for text in served.texts]
    end = _rss_mb()
    served.rss_mb = end if first_minute is None else first_minute, end
    return served


def _note_delays(served: Served, recognizer: OnlineRecognizer, entry: _Live, now: float) -> None:
    """Note the delays of the chunks of a stream that are decoded by now."""
    rate, chunk = recognizer.sample_rate, recognizer.context.chunk
    size = round(recognizer.frame_seconds * rate)
    while entry.decoded < entry.stream.frames:
        frames = range(entry.decoded, min(entry.decoded + chunk, entry.stream.frames))
        # The last window of a chunk reaches beyond it.
        beyond = entry.stream.samples_needed - size * (entry.stream.frames + chunk)
        needed = min(size * (entry.decoded + chunk) + beyond, len(entry.audio))
        served.delays_s.append(now - entry.begin - needed / rate)
        served.algorithmic_s.update(max(0, needed - size * (frame + 1)) / rate for frame in frames)
        entry.decoded = frames.stop


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
