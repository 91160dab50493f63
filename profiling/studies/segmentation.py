"""Joins utterances of a manifest to a talk with a text, and counts the ends that are cut right."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import soundfile

from effasr.data.audio.loudness import HOP_SECONDS, is_speech, loudness

MARGIN, NEAR = 0.1, 0.2  # seconds: background that segments have; largest error


def join(manifest: Path, out: Path, seconds: float) -> None:
    """Write talk.flac with pauses of 0.3 to 2 s, its texts, and when each utterance is said."""
    draw, noise = random.Random(1), np.random.default_rng(1)
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    draw.shuffle(rows)
    words = [word for row in rows for word in row["text"].split()]
    parts, truth, samples, rate = [], [], 0, 16_000
    for row in rows:
        audio, rate = soundfile.read(manifest.parent / row["audio_filepath"], dtype="float32")
        pause = round(draw.uniform(0.3, 2.0) * rate)
        at = (samples + pause) / rate
        speech = np.flatnonzero(is_speech(loudness(audio, rate))) * HOP_SECONDS
        truth.append([row["text"], at + speech[0], at + speech[-1] + HOP_SECONDS])
        parts += [1e-4 * noise.standard_normal(pause).astype(np.float32), audio]
        samples += pause + len(audio)
        if samples > seconds * rate:
            break
    texts = [text for text, *_ in truth]
    wrong = [damaged(text, words, draw) for text in texts]
    extra = list(wrong)
    for place in range(len(wrong) - 1, 0, -60):
        passage = " ".join(draw.choices(words, k=draw.choice([12, 60, 300])))
        extra.insert(place, f"\n\nChapter {place}\n\n{passage}.\n\n")
    missing = [text for number, text in enumerate(wrong) if number % 50 >= 8]
    out.mkdir(parents=True)
    (out / "truth.json").write_text(json.dumps(truth))
    sets = {"clean": texts, "wrong": wrong, "wrong, extra": extra, "wrong, missing": missing}
    for name, lines in sets.items():
        folder = out / name.replace(", ", "_")
        folder.mkdir()
        soundfile.write(folder / "talk.flac", np.concatenate(parts), rate)
        (folder / "talk.txt").write_text("\n".join(lines) + "\n")


def damaged(text: str, words: list[str], draw: random.Random) -> str:
    """Leave out a word in twenty, and replace as many; an end of a sentence stays."""
    kept = [word for word in text.split() if draw.random() >= 0.05]
    kept = [draw.choice(words) if draw.random() < 0.05 else word for word in kept]
    return " ".join(kept).rstrip(".!?") + (text[-1] if text[-1] in ".!?" else "")


def score(joined: str, texts: str, out: str) -> dict[str, float]:
    truth = json.loads((Path(joined) / "truth.json").read_text())
    if texts == "wrong_missing":
        truth = [row for number, row in enumerate(truth) if number % 50 >= 8]
    rows = [json.loads(line) for line in (Path(out) / "manifest.jsonl").read_text().splitlines()]
    begins = np.array([row["offset"] + MARGIN for row in rows])
    ends = np.array([row["offset"] + row["duration"] - MARGIN for row in rows])
    errors = [np.abs(begins - start).min() for _, start, _ in truth]
    errors += [np.abs(ends - end).min() for *_, end in truth]
    share = float(np.mean(np.array(errors) <= NEAR))
    median = float(np.median([row["confidence"] for row in rows]))
    return {"utterances": len(truth), "segments": len(rows), "near": share, "confidence": median}


parser = argparse.ArgumentParser()
parser.add_argument("paths", nargs="+")
parser.add_argument("--seconds", type=float)
options = parser.parse_args()
if options.seconds:
    join(*map(Path, options.paths), options.seconds)
else:
    result = json.dumps(score(*options.paths))
    (Path(options.paths[2]) / "score.json").write_text(result)
