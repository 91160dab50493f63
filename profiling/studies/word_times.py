"""Error of word timestamps on speech whose times are known.

    python profiling/studies/word_times.py runs/NAME [--sentences 100] [--output ROWS.json]

eSpeak NG says sentences of the demo corpus' test split, with voices that training has not heard,
in noise, and tells at which sample each word begins and ends. The model transcribes them with
times; where its words are those that were said, both are compared. The tail of a word is part of
the pause behind it for a listener, so its end is less certain than its start.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from effasr.checkpoint import load_model, resolve
from effasr.data.demo import sentences as phrases
from effasr.data.demo.acoustics import SAMPLE_RATE, Espeak, SpokenWords, record
from effasr.data.demo.plan import Recording, plan
from effasr.decoding.config import DecodingConfig
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import Waveform, transcribe

DIGITS = frozenset(phrase["en"] for phrase in phrases.DIGITS)
TOLERANCE_MS = 80  # an encoder frame


class Spoken(NamedTuple):
    waveform: Waveform
    words: tuple[SpokenWords, ...]


class WordError(NamedTuple):
    """Reported minus true times of a word, in seconds."""

    is_digit: bool
    start: float
    end: float


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Describe errors, in milliseconds: mean and 95th percentile of their size, median, share."""
    errors = 1000 * np.asarray(seconds)
    sizes = np.abs(errors)
    return {
        "words": len(errors),
        "mean": round(float(sizes.mean()), 1),
        "bias": round(float(np.median(errors)), 1),
        "p95": round(float(np.quantile(sizes, 0.95)), 1),
        f"within_{TOLERANCE_MS}_ms": round(float((sizes <= TOLERANCE_MS).mean()), 4),
    }


def speak(recordings: Iterable[Recording]) -> list[Spoken]:
    espeak = Espeak()
    made = []
    for item in recordings:
        espeak.select(item.voice)
        speech = espeak.speak(item.spoken, rate=item.rate, pitch=item.pitch)
        words = tuple(
            SpokenWords(x.text.replace(",", ""), x.start + item.lead_s, x.end + item.lead_s)
            for x in espeak.words(item.spoken)
        )
        fields = ("gain_db", "snr_db", "noise_slope", "lead_s", "tail_s", "seed")
        acoustics = {name: getattr(item, name) for name in fields}
        samples = record(speech, espeak.sample_rate, **acoustics).astype(np.float32) / 32768
        made.append(Spoken(Waveform(item.path, samples, SAMPLE_RATE), words))
    return made


def compare(spoken: Sequence[Spoken], results: Sequence[Transcription]) -> list[WordError]:
    """Return the errors in recordings whose transcript has all words, and no others.

    Several words that were said as one have a start and an end together.
    """
    errors = []
    for recording, result in zip(spoken, results, strict=True):
        words = [word for segment in result.segments for word in segment.words or ()]
        if " ".join(x.text for x in words) != " ".join(x.text for x in recording.words):
            continue
        is_digit = all(word.text in DIGITS for word in recording.words)
        position = 0
        for true in recording.words:
            last = position + len(true.text.split())
            start, end = words[position].start - true.start, words[last - 1].end - true.end
            errors.append(WordError(is_digit, start, end))
            position = last
    return errors


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="other sentences than the corpus has")
    parser.add_argument("--output", type=Path, help="JSON of the figures")
    options = parser.parse_args(arguments)
    if options.sentences < 1:
        parser.error(f"`--sentences` must be at least 1, but is {options.sentences}.")
    loaded = load_model(resolve(options.run))
    planned = plan(multilingual=False, utterances=20 * options.sentences, seed=options.seed)
    test = [recording for recording in planned if recording.split == "test"]
    chosen = random.Random(options.seed).sample(test, options.sentences)
    spoken = speak(sorted(chosen, key=lambda recording: recording.voice))
    results = transcribe(
        loaded.model,
        loaded.tokenizer,
        [recording.waveform for recording in spoken],
        prompt=loaded.prompt,
        config=DecodingConfig(words=True),
    )
    errors = compare(spoken, [x for x in results if isinstance(x, Transcription)])
    if not errors:
        sys.exit("No transcript has the words that were said: train the model first.")
    figures = {}
    for kind, is_digit in (("digits", True), ("commands", False)):
        for end in ("start", "end"):
            values = [getattr(x, end) for x in errors if x.is_digit == is_digit]
            if not values:
                continue
            row = figures[f"{kind} {end}s"] = summary(values)
            sys.stdout.write(
                f"{kind:8}  {end}s  {row['words']} words  mean |error| {row['mean']:.0f} ms  "
                f"median error {row['bias']:+.0f} ms  95 % within {row['p95']:.0f} ms  "
                f"{100 * row[f'within_{TOLERANCE_MS}_ms']:.1f} % within {TOLERANCE_MS} ms\n"
            )
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
