"""Trains a recogniser and its corrector, by the commands that a user would type."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from effasr.cli.main import main
from effasr.data.demo.corpus import build

_HELD_OUT_SEED = 1
"""Seed of the demo corpus that correctors learn from: that of the recognisers is 0."""

_VALIDATION = 100
"""Utterances of the pairs that validate, not train, a corrector."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained.

    Attributes:
        work: Folder of data and runs.
        steps: Steps of a recogniser, by the recipe demo, whose schedule is as long.
        corrector_steps: Likewise by the recipe corrector.
        utterances: Recordings of which pairs are made, with other sentences and noise than those
            that the recogniser was trained on, by the same voices.
        beam: Of the search that makes the lists.
        nbest: Texts of a list.
        methods: Methods of decoding, each of which makes a list of every recording; its name is the
            source of the pairs.
        device: Device of all.
    """

    work: Path
    steps: int
    corrector_steps: int
    utterances: int
    beam: int
    nbest: int
    methods: tuple[str, ...]
    device: str


def recognizer(settings: Settings, corpus: Path, seed: int) -> Path:
    """Train a recogniser on a demo corpus, unless it is there; return its run."""
    tokenizer = corpus / "tokenizer"
    if not tokenizer.is_dir():
        _run("tokenizer", corpus / "train.jsonl", tokenizer, "--vocab-size", 160)
    return _train(
        settings,
        "demo",
        f"demo_{seed}_{settings.steps}",
        f"seed={seed}",
        f"data.train={corpus / 'train.jsonl'}",
        f"data.validation={corpus / 'dev.jsonl'}",
        f"data.tokenizer={tokenizer}",
        f"training.max_steps={settings.steps}",
        f"training.validate_every={settings.steps}",
    )


def corrector(settings: Settings, run: Path, name: str, seed: int) -> Path:
    """Train a corrector of what a recogniser writes, unless it is there; return its run."""
    folder = settings.work / f"pairs_{name}"
    train, dev, tokenizer = (folder / part for part in ("train.jsonl", "dev.jsonl", "tokenizer"))
    if not tokenizer.is_dir():
        held_out = build(
            settings.work / "held_out", utterances=settings.utterances, seed=_HELD_OUT_SEED, jobs=1
        )
        lists = []
        for method in settings.methods:
            lists.append(folder / f"{method}.jsonl")
            if not lists[-1].is_file():
                search = "--method", method, "--beam", settings.beam, "--nbest", settings.nbest
                own = "--source", method, "--device", settings.device
                _run("make-correction-data", run, held_out.train, lists[-1], *search, *own)
        _divide(lists, train, dev)
        _run("tokenizer", train, tokenizer, "--vocab-size", 160)
    return _train(
        settings,
        "corrector",
        f"corrector_{name}_{settings.corrector_steps}",
        f"seed={seed}",
        f"data.train={train}",
        f"data.validation={dev}",
        f"data.tokenizer={tokenizer}",
        f"training.max_steps={settings.corrector_steps}",
        f"training.validate_every={settings.corrector_steps}",
    )


def _divide(lists: Sequence[Path], train: Path, dev: Path) -> None:
    """Divide pairs by recordings, so that all lists of one are on the same side."""
    lines = [line for path in lists for line in path.read_text(encoding="utf-8").splitlines()]
    names = [json.loads(line)["id"] for line in lines]
    drawn = sorted(set(names))
    random.Random(0).shuffle(drawn)
    held = set(drawn[: min(_VALIDATION, len(drawn) // 2)])
    for path, wanted in ((train, False), (dev, True)):
        chosen = [line for line, name in zip(lines, names, strict=True) if (name in held) == wanted]
        path.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")


def _train(settings: Settings, recipe: str, name: str, *overrides: str) -> Path:
    output = settings.work / "runs"
    device = "auto" if settings.device == "auto" else settings.device.split(":")[0]
    own = f"name={name}", f"output={output}", f"training.device={device}"
    # A run that has ended ends again at once.
    _run("train", recipe, *own, *overrides)
    return output / name


def _run(*words: object) -> None:
    code = main([str(word) for word in words])
    if code:
        raise RuntimeError(f"effasr {' '.join(map(str, words))} ended with code {code}")
