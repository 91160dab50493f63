"""Test sets with silence, from that of `effasr demo-data`: python pauses.py CORPUS OUT.

`alone` has the recordings as they are, `ends` each with silence at both ends, `talk` all of them in
one recording, with pauses between them. Silence is zeros, or noise (-55 dB of full scale at the
ends, -66 dB in the talk, under the speech as well).
"""

import json
import sys
from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000
NOISE = {"zeros": (0.0, 0.0), "noise": (10 ** (-55 / 20), 5e-4)}


def main(corpus: Path, out: Path) -> None:
    lines = [json.loads(line) for line in (corpus / "test.jsonl").read_text().splitlines()]
    audio = [soundfile.read(corpus / line["audio_filepath"], dtype="float32")[0] for line in lines]
    write(out, "alone", lines, audio)
    for kind, (at_ends, in_talk) in NOISE.items():
        for seconds in (0.5, 1.0):
            padded = [np.pad(speech, round(seconds * RATE)) for speech in audio]
            write(out, f"ends_{seconds:g}_{kind}", lines, noisy(padded, at_ends))
        for seconds in (0.3, 1.0):
            pause = round(seconds * RATE)
            talk = np.concatenate([np.pad(speech, (0, pause)) for speech in audio])
            whole = lines[0] | {"id": "talk", "text": " ".join(line["text"] for line in lines)}
            write(out, f"talk_{seconds:g}_{kind}", [whole], noisy([talk], in_talk))


def noisy(audio: list[np.ndarray], level: float) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [(speech + level * generator.standard_normal(len(speech))) for speech in audio]


def write(out: Path, name: str, lines: list[dict], audio: list[np.ndarray]) -> None:
    (out / name).mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.jsonl").open("w") as file:
        for line, samples in zip(lines, audio, strict=True):
            path = f"{name}/{line['id']}.wav"
            soundfile.write(out / path, samples.astype(np.float32), RATE, subtype="FLOAT")
            row = line | {"audio_filepath": path, "duration": len(samples) / RATE}
            file.write(json.dumps(row) + "\n")


main(Path(sys.argv[1]), Path(sys.argv[2]))
