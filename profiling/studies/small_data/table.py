"""Rows of the tables of these studies."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import rows
from bench.provenance import provenance

from effasr.evaluation.bootstrap import interval
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.wer import ErrorCounts, count_errors, total

COLUMNS = (
    *("study", "toolkit", "version", "configuration", "corpus", "train_hours", "text"),
    *("vocabulary", "parameters", "cpu_s", "steps", "audio_s", "audio_s_per_cpu_s", "ctc_loss"),
    *("decoding", "split", "words", "wer", "wer_low", "wer_high", "cer"),
    *("insertions", "deletions", "substitutions", "seed"),
    *("device", "torch", "triton", "git", "date"),
)
"""Columns. ``cpu_s`` covers training alone, in seconds of one thread; ``audio_s`` trained audio."""


def score(references: Sequence[str], hypotheses: Sequence[str]) -> list[ErrorCounts]:
    """Return the errors of each utterance after the default normalisation of `effasr evaluate`."""
    normalize = get_normalizer("basic")
    pairs = zip(references, hypotheses, strict=True)
    return [
        count_errors(normalize(reference), normalize(hypothesis)) for reference, hypothesis in pairs
    ]


def rates(errors: Sequence[ErrorCounts]) -> dict[str, Any]:
    """Return the rate columns from the errors of each utterance."""
    counted, (low, high) = total(errors), interval(errors)
    return {
        "words": counted.words,
        "wer": _rounded(counted.wer),
        "wer_low": _rounded(low),
        "wer_high": _rounded(high),
        "cer": _rounded(counted.cer),
        "insertions": counted.insertions,
        "deletions": counted.deletions,
        "substitutions": counted.substitutions,
    }


def training(
    *, parameters: int, cpu_s: float, steps: int, audio_s: float, ctc: float | None
) -> dict[str, Any]:
    """Return the columns of a training run."""
    return {
        "parameters": parameters,
        "cpu_s": round(cpu_s, 1),
        "steps": steps,
        "audio_s": round(audio_s),
        "audio_s_per_cpu_s": round(audio_s / cpu_s, 1),
        "ctc_loss": "" if ctc is None else round(ctc, 3),
    }


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row, with versions and date."""
    import torch

    found = provenance(torch.device("cpu"))
    rows.append(path, COLUMNS, row | {key: found[key] for key in COLUMNS if key in found})


def version(package: str, folder: Path | None = None) -> str:
    """Return the version of an installed package, or of one in a folder."""
    if folder is None:
        return importlib.metadata.version(package)
    for found in importlib.metadata.distributions(path=[str(folder)]):
        if found.name.lower() == package:
            return found.version
    raise ValueError(f"`--peer` must be a folder with {package}, but {folder} has none.")


def is_done(path: Path, **wanted: object) -> bool:
    """Return whether the table has a row with these values."""
    return any(
        all(row[key] == str(value) for key, value in wanted.items()) for row in rows.read(path)
    )


def _rounded(rate: float) -> float | str:
    return "" if math.isnan(rate) else round(rate, 4)


def show(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201
