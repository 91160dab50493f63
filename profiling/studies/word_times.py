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
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from effasr.checkpoint import load_model, resolve
from effasr.data.demo import sentences as phrases
from effasr.data.demo.acoustics import SAMPLE_RATE, Espeak, SpokenWords, record
from effasr.data.demo.plan import Recording, plan
from effasr.decoding.config import DecodingConfig
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import Waveform, transcribe

_DIGITS = frozenset(phrase["en"] for phrase in phrases.DIGITS)

TOLERANCE_S = 0.08
"""An encoder frame."""


@dataclass(frozen=True)
class Errors:
    """Reported minus true times of one kind, in milliseconds.

    Attributes:
        words: Number of compared words.
        mean: Mean absolute error.
        bias: Median error, with its sign.
        p95: 95th percentile of the absolute error.
        within_80_ms: Share of errors of at most one encoder frame.
    """

    words: int
    mean: float
    bias: float
    p95: float
    within_80_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Errors:
        """Describe errors in seconds, at least one."""
        errors = 1000 * np.asarray(seconds)
        sizes = np.abs(errors)
        return cls(
            words=len(errors),
            mean=round(float(sizes.mean()), 1),
            bias=round(float(np.median(errors)), 1),
            p95=round(float(np.quantile(sizes, 0.95)), 1),
            within_80_ms=round(float((sizes <= 1000 * TOLERANCE_S).mean()), 4),
        )


@dataclass(frozen=True)
class Spoken:
    """A recording whose words are known."""

    waveform: Waveform
    words: tuple[SpokenWords, ...]


def speak(recordings: Iterable[Recording]) -> list[Spoken]:
    """Synthesise recordings as the demo corpus has them, and note when each word is said."""
    espeak = Espeak()
    made = []
    for item in recordings:
        espeak.select(item.voice)
        speech = espeak.speak(item.spoken, rate=item.rate, pitch=item.pitch)
        words = tuple(
            SpokenWords(
                word.text.replace(",", ""), word.start + item.lead_s, word.end + item.lead_s
            )
            for word in espeak.words(item.spoken)
        )
        audio = record(
            speech,
            espeak.sample_rate,
            gain_db=item.gain_db,
            snr_db=item.snr_db,
            noise_slope=item.noise_slope,
            lead_s=item.lead_s,
            tail_s=item.tail_s,
            seed=item.seed,
        )
        samples = audio.astype(np.float32) / 32768
        made.append(Spoken(Waveform(item.path, samples, SAMPLE_RATE), words))
    return made


def compare(
    spoken: Sequence[Spoken], results: Sequence[Transcription]
) -> list[tuple[bool, float, float]]:
    """Return whether it is a digit of a string of such, and the errors of start and end in seconds.

    Recordings count whose transcript has all words, and no others. Several words that were said as
    one have a start and an end together.
    """
    errors = []
    for one, result in zip(spoken, results, strict=True):
        found = [word for segment in result.segments for word in segment.words or ()]
        if " ".join(word.text for word in found) != " ".join(word.text for word in one.words):
            continue
        digits = all(word.text in _DIGITS for word in one.words)
        place = 0
        for true in one.words:
            last = place + len(true.text.split())
            start, end = found[place].start, found[last - 1].end
            errors.append((digits, start - true.start, end - true.end))
            place = last
    return errors


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors, and write them to a file if requested."""
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
    test = [
        one
        for one in plan(multilingual=False, utterances=20 * options.sentences, seed=options.seed)
        if one.split == "test"
    ]
    chosen = random.Random(options.seed).sample(test, options.sentences)
    spoken = speak(sorted(chosen, key=lambda one: one.voice))
    results = transcribe(
        loaded.model,
        loaded.tokenizer,
        [one.waveform for one in spoken],
        prompt=loaded.prompt,
        config=DecodingConfig(words=True),
    )
    texts = [result for result in results if isinstance(result, Transcription)]
    errors = compare(spoken, texts)
    if not errors:
        sys.exit("No transcript has the words that were said: train the model first.")
    figures = {}
    for kind, wanted in (("digits", True), ("commands", False)):
        for which, name in ((1, "starts"), (2, "ends")):
            values = [row[which] for row in errors if row[0] == wanted]
            if not values:
                continue
            row = asdict(Errors.of(values))
            figures[f"{kind} {name}"] = row
            sys.stdout.write(
                f"{kind:8}  {name:6}  {row['words']} words  mean |error| {row['mean']:.0f} ms  "
                f"median error {row['bias']:+.0f} ms  95 % within {row['p95']:.0f} ms  "
                f"{100 * row['within_80_ms']:.1f} % within 80 ms\n"
            )
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
