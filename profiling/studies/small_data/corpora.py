"""Subsets of a corpus of read speech: one language or several, complete or some minutes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class Corpus:
    """NeMo manifests on disk.

    Attributes:
        name: ``en``, ``nl`` or, with several languages, ``en+nl``.
        folder: Folder of ``train.jsonl``, ``dev.jsonl`` and ``test.jsonl``, with absolute audio
            paths. Its name, also that of the prepared data, is another one for each draw.
    """

    name: str
    folder: Path

    def manifest(self, split: str) -> Path:
        """Return the manifest path of a split."""
        return self.folder / f"{split}.jsonl"

    def rows(self, split: str) -> list[dict]:
        """Return the rows of the manifest of a split."""
        lines = self.manifest(split).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def hours(self, split: str) -> float:
        """Return the duration of a split, in hours."""
        return sum(row["duration"] for row in self.rows(split)) / 3600


def write_corpus(
    source: Path,
    languages: Sequence[str],
    out: Path,
    *,
    minutes: float | None = None,
    seed: int = 0,
) -> Corpus:
    """Join the manifests ``LANGUAGE_SPLIT.jsonl`` of a folder.

    Args:
        source: Folder with NeMo manifests whose paths are relative to it.
        languages: Languages of the corpus.
        out: Folder to write.
        minutes: Minutes of training data per language, drawn at random; None for all. A draw of
            fewer minutes is a subset of a draw of more.
        seed: Seed of the draw.

    Raises:
        ValueError: The source lacks a manifest, or a language has fewer minutes.
    """
    out.mkdir(parents=True, exist_ok=True)
    name = "+".join(languages)
    corpus = Corpus(name if minutes is None else f"{name}-{minutes:g}min", out)
    for split in SPLITS:
        rows = []
        for language in languages:
            own = _read(source, language, split)
            if split == "train" and minutes is not None:
                own = _draw(own, minutes, language, seed)
            rows += own
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        corpus.manifest(split).write_text("".join(lines), encoding="utf-8")
    return corpus


def _read(source: Path, language: str, split: str) -> list[dict]:
    path = source / f"{language}_{split}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"`source` must have {path.name}, but {source} does not: name the folder of a corpus "
            "with LANGUAGE_SPLIT.jsonl for train, dev and test."
        )
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["audio_filepath"] = str((source / row["audio_filepath"]).resolve())
    return rows


def _draw(rows: list[dict], minutes: float, language: str, seed: int) -> list[dict]:
    random.Random(f"{seed} {language}").shuffle(rows)
    left, drawn = 60 * minutes, []
    for row in rows:
        if left <= 0:
            return drawn
        left -= row["duration"]
        drawn.append(row)
    if left > 0:
        raise ValueError(
            f"`minutes` must be at most those of {language}, "
            f"{sum(row['duration'] for row in rows) / 60:.1f}, but is {minutes:g}."
        )
    return drawn
