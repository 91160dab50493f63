"""Recall of names, with and without boosting, and the word errors that it costs.

`data` adds to the demo's corpus commands with names that a generator makes of syllables, so that a
model learns to spell names. `measure` has the voices of the dev or test set say commands with 50
other names of the generator, which are the phrases. The errors on the demo's own set of the same
voices, in which no name is said, are false alarms.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import soundfile
import torch
from benchmarks import harness as tables

from effasr.checkpoint import load_model, resolve
from effasr.data.demo.plan import Recording, _cast
from effasr.data.demo.render import render
from effasr.data.demo.sentences import ENGLISH, Sentence
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.wer import count_errors, total
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import transcribe

COUNT = 50
TEMPLATES = (
    "call {name} at {hour}",
    "send {thing} to {name}",
    "call {name} at {hour} and close {opening} {room}",
    "turn off {device} {room} and send {thing} to {name}",
)
COLUMNS = [
    *("run", "seed", "method", "beam", "weight", "phrases", "set", "utterances", "recall"),
    *("other_words", "other_wer", "false_alarms", "plain_words", "plain_wer", "seconds"),
    *tables.VERSIONS,
]


def generated_name(rng: random.Random) -> str:
    syllables = [
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") + rng.choice(["", "", *"nrlst"])
        for _ in range(rng.choice((2, 3)))
    ]
    return "".join(syllables)


def measured_names(folder: Path) -> list[str]:
    """Return names that no text of the training set has."""
    seen = set((folder / "train.jsonl").read_text().replace('"', " ").split())
    rng, names = random.Random("measured"), list[str]()
    while len(names) < COUNT:
        name = generated_name(rng)
        if name not in seen and len(name) > 5:
            names.append(name)
            seen.add(name)
    return names


def command(template: str, name: str, rng: random.Random) -> str:
    slots = {slot: rng.choice(values)["en"] for slot, values in ENGLISH.slots.items()}
    return template.format(name=name, **slots)


def synthesise(texts: list[str], split: str, folder: Path, rng: random.Random) -> list[Recording]:
    (folder / split / "audio").mkdir(parents=True, exist_ok=True)
    cast = _cast([Sentence({"en": (text,)}) for text in texts], split, "en", rng, first=0)
    if not all((folder / item.path).is_file() for item in cast):
        render(folder, sorted(cast, key=lambda item: item.voice))
    return cast


def make_data(corpus: Path, folder: Path) -> None:
    for split, count, plain in (("train", 2400, 1600), ("dev", 100, 100)):
        rng = random.Random(f"names/{split}")
        texts = [command(rng.choice(TEMPLATES), generated_name(rng), rng) for _ in range(count)]
        rows = []
        for item in synthesise(texts, split, folder, rng):
            path = folder / item.path
            row = {"audio_filepath": str(path.resolve()), "duration": soundfile.info(path).duration}
            rows.append(row | {"text": item.texts["en"], "lang": "en"})
        for line in (corpus / f"{split}.jsonl").read_text().splitlines()[:plain]:
            row = json.loads(line)
            path = str((corpus / row["audio_filepath"]).resolve())
            rows.append({**row, "audio_filepath": path})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recordings(split: str, folder: Path, drawn: list[str]) -> list[tuple[Path, str, str]]:
    """Return files, texts and names: each name in two templates."""
    rng, names = random.Random(split), {}
    for number, name in enumerate(drawn * 2):
        template = TEMPLATES[(number + number // COUNT) % len(TEMPLATES)]
        names[command(template, name, rng)] = name
    cast = synthesise(list(names), split, folder / "measured", rng)
    return [
        (folder / "measured" / item.path, item.texts["en"], names[item.texts["en"]])
        for item in cast
    ]


def other_errors(reference: list[str], hypothesis: list[str], name: str) -> int:
    """Return the word errors but those of the name, which any word or none may replace."""
    row = list(range(len(hypothesis) + 1))
    for word in reference:
        free, before = word == name, row[0]
        row[0] += not free
        for n, other in enumerate(hypothesis, 1):
            same = before + (not free and word != other)
            before, row[n] = row[n], min(same, row[n] + (not free), row[n - 1] + 1)
    return row[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    if sys.argv[1] == "data":
        make_data(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    parser.add_argument("names", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--method", required=True)
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--weights", type=float, nargs="+", default=[0.0, 1.0, 1.5, 2.0, 3.0])
    parser.add_argument("--plain", type=int, default=400, help="utterances of the demo's set")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    loaded = load_model(resolve(options.run), torch.device("cpu"))
    folder = options.names
    drawn = measured_names(folder)
    named = recordings(options.split, folder, drawn)
    lines = (options.corpus / f"{options.split}.jsonl").read_text().splitlines()[: options.plain]
    plain = [json.loads(line) for line in lines]
    phrases = folder / "names.txt"
    phrases.write_text("".join(f"{name}\n" for name in drawn))
    files = [file for file, _, _ in named]
    files += [options.corpus / row["audio_filepath"] for row in plain]
    for beam in options.beams:
        for weight in options.weights:
            boost = {"boost": phrases, "boost_weight": weight} if weight else {}
            config = DecodingConfig(method=options.method, beam=beam, **boost)
            run = transcribe(
                loaded.model, loaded.tokenizer, files, prompt=loaded.prompt, config=config
            )
            results = [result for result in run if isinstance(result, Transcription)]
            texts = [result.text.split() for result in results]
            assert len(texts) == len(files)
            pairs = list(zip(named, texts, strict=False))
            other_words = sum(len(text.split()) - 1 for _, text, _ in named)
            errors = sum(other_errors(t.split(), hyp, name) for (_, t, name), hyp in pairs)
            unnamed = texts[len(named) :]
            counts = total(
                count_errors(row["text"], " ".join(text))
                for row, text in zip(plain, unnamed, strict=True)
            )
            row = {
                "run": options.run, "seed": 0, "method": options.method, "beam": beam,
                "weight": weight, "phrases": COUNT, "set": options.split,
                "utterances": len(named),
                "recall": round(sum(name in text for (_, _, name), text in pairs) / len(named), 4),
                "other_words": other_words, "other_wer": round(errors / other_words, 4),
                "false_alarms": sum(word in drawn for text in unnamed for word in text),
                "plain_words": counts.words, "plain_wer": round(counts.errors / counts.words, 4),
                "seconds": round(run.seconds, 1), **tables.provenance(torch.device("cpu")),
            }  # fmt: skip
            tables.append(options.csv, COLUMNS, row)
            tables.show(", ".join(f"{name} {row[name]}" for name in COLUMNS[2:14]))


if __name__ == "__main__":
    main()
