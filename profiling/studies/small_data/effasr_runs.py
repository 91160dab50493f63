"""Runs effasr's commands as a user would, and measures their CPU time."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import run as run_process

from effasr.checkpoint import load_model, resolve
from effasr.training.run_dir.run_directory import METRICS, read_lines
from small_data import table
from small_data.corpora import SPLITS, Corpus

_SHORT, _LONG = 8, 32
"""Steps of two runs, whose difference gives the time of a step."""
QUIET = (
    *("training.tensorboard=false", "data.workers=0", "training.threads=1"),
    *("training.restart=true", "data.cache=null"),
)
"""Settings for one thread and no other process, so that CPU time is the time of one core."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Choice:
    """A training configuration and its decoding options.

    Attributes:
        name: Name in the table.
        recipe: Recipe of `effasr train`.
        vocab_size: Number of pieces per language.
        overrides: Overrides of the recipe, such as ``model.encoder.layers=6``.
        decoding: Options of `effasr evaluate`, by name.
    """

    name: str
    recipe: str
    vocab_size: int
    overrides: tuple[str, ...]
    decoding: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Trained:
    """A training run.

    Attributes:
        run: Folder of the run.
        parameters: Number of parameters of the model.
        steps: Number of updates.
        audio_s: Seconds of audio in these updates.
        cpu_s: CPU seconds of the training, without program start.
        ctc: CTC loss per token in the last line of the metrics; None for a model without CTC.
    """

    run: Path
    parameters: int
    steps: int
    audio_s: float
    cpu_s: float
    ctc: float | None


class Commands:
    """Runs ``effasr`` commands in a folder.

    Args:
        folder: Folder for data and runs.
        say: Function that prints a line.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder, self.say = folder, say
        folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, corpus: Corpus) -> None:
        """Run `effasr prepare` for each split, once."""
        for split in SPLITS:
            out = self.folder / "data" / corpus.folder.name / split
            if not (out / "report.json").exists():
                self.call("prepare", str(corpus.manifest(split)), str(out))

    def tokenizer(self, manifests: Sequence[Path], name: str, vocab_size: int) -> Path:
        """Run `effasr tokenizer` on manifests, once, and return the tokenizer's folder.

        Languages share the pieces, as those of the peer do.
        """
        out = self.folder / "data" / f"tokenizer_{name}_{vocab_size}_shared"
        if not out.exists():
            size = ("--shared", "--vocab-size", str(vocab_size))
            self.call("tokenizer", *map(str, manifests), str(out), *size)
        return out

    def train(
        self,
        choice: Choice,
        corpus: Corpus,
        *,
        cpu_s: float,
        seed: int,
        name: str,
        tokenizer: Path | None = None,
        init_from: Path | None = None,
    ) -> Trained:
        """Train for about ``cpu_s`` seconds of one core, with a step count measured beforehand.

        Args:
            choice: Training configuration.
            corpus: Corpus prepared by `prepare`.
            cpu_s: CPU seconds of the training, without program start.
            seed: Seed of the run.
            name: Name of the run.
            tokenizer: Folder of the tokenizer; by default that of ``init_from``, or of the corpus'
                own training set.
            init_from: Run to start from; None to train from scratch.
        """
        output = self.folder / "runs"
        train = self.folder / "data" / corpus.folder.name / "train"
        base = [choice.recipe, f"data.train={train}", f"seed={seed}", *QUIET]
        if init_from is not None:
            base.append(f"init_from={init_from}")
        elif tokenizer is None:
            texts = [corpus.manifest("train")]
            tokenizer = self.tokenizer(texts, corpus.folder.name, choice.vocab_size)
        base.append(f"data.tokenizer={tokenizer or repr('')}")
        base.append("data.validation=[]")
        base += [f"output={output}", f"training.checkpoint_every={10**9}", *choice.overrides]

        def training(steps: int, run: str) -> float:
            return self.call("train", *base, f"name={run}", f"training.max_steps={steps}")

        short, long = (training(steps, f"{name}_start") for steps in (_SHORT, _LONG))
        per_step = max((long - short) / (_LONG - _SHORT), 1e-3)
        start_s = max(short - _SHORT * per_step, 0.0)
        steps = max(1, round(cpu_s / per_step))
        self.say(f"{name}: {per_step:.3f} CPU s a step, so {steps} steps")
        spent = training(steps, name) - start_s
        lines = [line for line in read_lines(output / name / METRICS) if "audio_seconds" in line]
        return Trained(
            output / name,
            count_parameters(output / name),
            steps,
            _audio_seconds(lines),
            spent,
            lines[-1].get("ctc"),
        )

    def evaluate(self, run: Path, corpus: Corpus, split: str, decoding: Sequence[str]) -> dict:
        """Run `effasr evaluate` and return the content of ``wer.json``."""
        data, out = self.folder / "data" / corpus.folder.name / split, run / f"evaluation_{split}"
        options = ["--run", str(run), "--manifest", str(data), "--output", str(out)]
        self.call("evaluate", *options, "--worst", "0", *decoding)
        return json.loads((out / "wer.json").read_text(encoding="utf-8"))

    def call(self, *arguments: str) -> float:
        """Run a command and return its CPU seconds.

        Raises:
            RuntimeError: The command failed.
        """
        before = _children_s()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "effasr.cli", *arguments]
        ended = run_process(command, environment=environment)
        if ended.code != 0:
            raise RuntimeError(f"effasr {' '.join(arguments)}: {ended.reason}")
        return _children_s() - before


def once(path: Path, settings: Mapping[str, object], work: Callable[[], float]) -> float:
    """Return the CPU seconds of work that is done once, and is begun again if interrupted.

    Args:
        path: File of the CPU seconds; the settings are in a file beside it.
        settings: Options that the result depends on.
        work: Function that does the work and returns its CPU seconds.

    Raises:
        ValueError: The work was done with other settings.
    """
    kept = path.with_name("study_settings.json")
    if not path.is_file():
        spent = work()
        path.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(settings))
        path.write_text(json.dumps(spent))
    found = json.loads(kept.read_text()) if kept.is_file() else None
    if found != settings:
        raise ValueError(
            f"`--work` must be a folder of the same settings, {settings}, but {path.parent} has "
            f"{'unknown ones' if found is None else found}: name another folder."
        )
    return float(json.loads(path.read_text()))


def count_parameters(run: Path) -> int:
    """Return the number of trained parameters of a run's model."""
    import torch

    model = load_model(resolve(run), torch.device("cpu")).model
    return sum(parameter.numel() for parameter in model.parameters())


def _audio_seconds(lines: Sequence[dict[str, Any]]) -> float:
    """Return the audio of all steps: a line has the mean of the steps since the previous line."""
    total, last = 0.0, 0
    for line in lines:
        total += line["audio_seconds"] * (line["step"] - last)
        last = line["step"]
    return total


def _children_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summary_row(
    study: str,
    choice: Choice,
    corpus: Corpus,
    trained: Trained,
    decoding: str,
    split: str,
    result: dict[str, Any],
) -> dict[str, Any]:
    """Return a row of the table from ``wer.json``, without the seed."""
    low, high = result["wer_interval"]
    return {
        "study": study,
        "toolkit": "effasr",
        "version": table.version("effasr"),
        "configuration": choice.name,
        "corpus": corpus.name,
        "train_hours": round(corpus.hours("train"), 3),
        "text": "raw",
        "vocabulary": choice.vocab_size,
        **table.training(
            parameters=trained.parameters,
            cpu_s=trained.cpu_s,
            steps=trained.steps,
            audio_s=trained.audio_s,
            ctc=trained.ctc,
        ),
        "decoding": decoding,
        "split": split,
        **{key: result[key] for key in ("words", "insertions", "deletions", "substitutions")},
        "wer": round(result["wer"], 4),
        "wer_low": round(low, 4),
        "wer_high": round(high, 4),
        "cer": round(result["cer"], 4),
    }
