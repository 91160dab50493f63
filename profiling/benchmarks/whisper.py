"""Whisper on a CPU: fine-tuning against transformers, transcribing also against CTranslate2.

    python profiling/bench.py whisper finetune|transcribe [--model tiny|base|small] [--batch 8]
        [--systems ...] [--threads N] [--lengths FILE] [--steps 20] [--output CSV] [--dry-run]

One random model is written by transformers, imported and exported by effasr and converted by
CTranslate2 (faster-whisper's engine), so all systems have the same weights. Audio is noise and
texts are random tokens, as long as utterances of a list of real ones.

Each system has a process of its own, whose high-water mark is ``peak_bytes``; ``base_bytes`` is
what it held when its packages were imported and no weight was read. They take turns, a step or a
pass each; ``step_s`` is the median of its duration, ``audio_s`` the audio in it, for steps the mean
of an epoch, since all compute as many frames; ``audio_s_per_s`` is their ratio: of a pass, RTFx.

``finetune``: a step is forward, backward, clipping and AdamW in float32.

    transformers    batches of padded features of 30 s, made before the clock starts; its own loss
    effasr_silence  the same utterances packed, silence up to 30 s behind each (minimum_s 30)
    effasr          without silence (minimum_s 0), as much audio in a step on average
    effasr_filled   without silence, as many frames in a step as transformers computes

``transcribe``: a pass is features, encoder and greedy decoding of all utterances. Random weights
end a text anywhere, so the end token is suppressed; every system writes as many tokens of an
utterance as English has in the longest utterance of its batch, where utterances are sorted.

    transformers            ``generate`` on batches of padded features
    ctranslate2_float32     the same batches
    ctranslate2_int8        the same, weights rounded to 8 bits
    effasr_silence, effasr  as above, with continuous batching in as many slots as a batch has

Before anything is timed, losses must agree with transformers' within 1e-3 (also after the updates
of the warm-up), and of the tokens the share --agreement, where systems compute the same function.
What is not installed or not supported is left out, with the reason. Needs transformers; for
CTranslate2 ``pip install ctranslate2``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import harness
from benchmarks.speech import agreement
from benchmarks.whisper_systems import (
    CTRANSLATE2,
    REFERENCE,
    SIZES,
    SYSTEMS,
    Settings,
    System,
    build,
    prepare,
    status_bytes,
)
from benchmarks.workload import LISTED, read_durations

COLUMNS = (
    *("task", "system", "model", "minimum_s", "batch", "lengths", "utterances", "audio_s"),
    *("frames", "tokens", "audio_s_per_s", "step_s", "p20_s", "p80_s", "peak_bytes", "base_bytes"),
    *("loss", "loss_difference", "agreement", "note", "threads", "version", *harness.VERSIONS),
)
SAME = "effasr_silence", "ctranslate2_float32"  # compute what transformers computes
LOSS_TOLERANCE = 1e-3
_PAUSE_S = 0.3  # idle threads of a system may spin for so long after its turn


# --- processes ------------------------------------------------------------------------------------


def _high_water_mark() -> int:
    """Return the peak memory of this process since it began."""
    # What getrusage gives counts the process that started this one, on Linux as well.
    unit = 1 if sys.platform == "darwin" else 1024
    return status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_loaded: list[System] = []  # the system of a process


def _redirect(log: Path) -> None:
    """Keep what packages print out of the benchmark's table."""
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)


def _load(settings: Settings, system: str) -> dict[str, Any]:
    torch.set_num_threads(settings.threads)
    _loaded.append(build(settings, system))
    return {"version": _loaded[0].version, "base_bytes": _loaded[0].base_bytes}


def _call(request: str, *arguments: int) -> dict[str, Any]:
    if request == "memory":
        return {"peak_bytes": _high_water_mark()}
    return getattr(_loaded[0], request)(*arguments)


class SystemFailed(Exception):
    """A system cannot be measured; the message says why."""


class Measured:
    """A system in a process of its own, which waits between requests, and its answers."""

    def __init__(self, settings: Settings, system: str) -> None:
        self.about: dict[str, Any] = {}  # the reply after loading, and the result of the check
        self.checked: dict[str, Any] = {}
        self.losses: list[float] = []
        self.runs: list[dict[str, Any]] = []
        self._log = Path(settings.folder, f"{settings.task}_{system}.log")
        context = multiprocessing.get_context("spawn")
        self.process = ProcessPoolExecutor(1, context, _redirect, (self._log,))
        self._load = self.process.submit(_load, settings, system)

    def load(self) -> None:
        self.about |= self._result(self._load)

    def ask(self, request: str, *arguments: int) -> dict[str, Any]:
        return self._result(self.process.submit(_call, request, *arguments))

    def _result(self, future: Future[dict[str, Any]]) -> dict[str, Any]:
        try:
            return future.result()
        except BrokenProcessPool:
            lines = self._log.read_text().splitlines() if self._log.exists() else []
            last = next((f": {line}" for line in reversed(lines) if line.strip()), "")
            raise SystemFailed(f"its process ended{last}") from None
        except Exception as error:  # the benchmark says why, and goes on with the others
            text = str(error).strip() or type(error).__name__
            raise SystemFailed(text.splitlines()[0]) from error


# --- the benchmark --------------------------------------------------------------------------------


class Benchmark:
    """The systems of one task, those that failed left out."""

    def __init__(self, settings: Settings, least_agreement: float) -> None:
        self.failed: dict[str, str] = {}  # with the reason
        self._settings, self._least = settings, least_agreement
        self._systems: dict[str, Measured] = {}

    def leave_out(self, system: str, reason: str) -> None:
        self._systems.pop(system, None)
        self.failed[system] = reason

    def measure(self, systems: Sequence[str], warm: int, steps: int) -> list[dict[str, Any]]:
        """Load, compare and time systems; returns a row for each that did not fail."""
        threads = {f"{name}_NUM_THREADS": str(self._settings.threads) for name in ("OMP", "MKL")}
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, threads))
            for system in systems:
                self._systems[system] = Measured(self._settings, system)
                stack.enter_context(self._systems[system].process)
            self._each(lambda measured: measured.load())
            self._each(lambda measured: measured.checked.update(measured.ask("check")))
            self._compare()
            for number in range(warm + steps):
                self._each(
                    lambda measured, number=number: self._turn(measured, number, number >= warm)
                )
                if number + 1 == warm:
                    self._compare()
            self._each(lambda measured: measured.about.update(measured.ask("memory")))
        return [self._row(system, measured) for system, measured in self._systems.items()]

    def _each(self, action: Callable[[Measured], None]) -> None:
        for system, measured in list(self._systems.items()):
            try:
                action(measured)
            except SystemFailed as error:
                self.leave_out(system, str(error))

    def _turn(self, measured: Measured, number: int, timed: bool) -> None:
        if self._settings.threads > 1:
            time.sleep(_PAUSE_S)
        done = measured.ask("run", number)
        if "loss" in done:
            measured.losses.append(done["loss"])
        if timed:
            measured.runs.append(done)

    def _compare(self) -> None:
        """Compare with transformers, and leave out what should agree and does not."""
        reference = self._systems.get(REFERENCE)
        for system, measured in list(self._systems.items()):
            if reference is not None and system != REFERENCE:
                measured.about |= compare(system, measured, reference)
                if reason := disagreement(system, measured.about, self._least):
                    self.leave_out(system, reason)

    def _row(self, system: str, measured: Measured) -> dict[str, Any]:
        settings, first = self._settings, measured.runs[0]
        p20, p50, p80 = harness.percentiles([run["seconds"] for run in measured.runs])
        minimum_s = settings.minimum_s(system)
        note = "weights rounded to 8 bits" if system.endswith("int8") else ""
        if not minimum_s:
            note = "hears no silence: losses and tokens differ from transformers' by definition"
        existing = measured.about | {
            name: x for name, x in measured.checked.items() if name in COLUMNS
        }
        return {
            **{"task": settings.task, "system": system, "model": settings.model},
            **{"minimum_s": minimum_s, "batch": settings.batch, "threads": settings.threads},
            **{"lengths": Path(settings.lengths).stem, "note": note},
            **{name: first[name] for name in ("frames", "tokens") if name in first},
            **{name: _rounded(value) for name, value in existing.items() if name != "tokens"},
            "utterances": round(first["utterances"], 1),
            "audio_s": round(first["audio_s"], 2),
            "audio_s_per_s": round(first["audio_s"] / p50, 2),
            **{"step_s": round(p50, 5), "p20_s": round(p20, 5), "p80_s": round(p80, 5)},
        }


def compare(system: str, measured: Measured, reference: Measured) -> dict[str, float]:
    """Return ``loss_difference``, as a part of the loss, or ``agreement``, the share of tokens.

    The first is the largest of the check and, where both make the same steps, of the steps so far.
    """
    if "tokens" in measured.checked:
        return {"agreement": agreement(measured.checked["tokens"], reference.checked["tokens"])}
    pairs = [(measured.checked["loss"], reference.checked["loss"])]
    if system in SAME:
        pairs += zip(measured.losses, reference.losses, strict=True)
    differences = [abs(ours / theirs - 1) for ours, theirs in pairs]
    # max() may pass over NaN.
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return {"loss_difference": largest}


def disagreement(system: str, about: Mapping[str, Any], least_agreement: float) -> str | None:
    """Return why a system that should agree with transformers is not timed; None if it agrees."""
    if system not in SAME:
        return None
    difference, share = about.get("loss_difference", 0.0), about.get("agreement", 1.0)
    # Not greater, so that NaN does not pass.
    if not difference <= LOSS_TOLERANCE:
        return f"its loss differs from transformers' by {difference:.2g} of it"
    if not share >= least_agreement:
        return f"only {share:.4f} of its tokens are transformers'"
    return None


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _systems(options: argparse.Namespace) -> list[str]:
    """Return the requested systems, in the order of the table; raise for a wrong option."""
    for name in ("batch", "steps", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"`--{name}` must be at least 1, but is {getattr(options, name)}.")
    if options.utterances is not None and options.utterances < options.batch:
        raise ValueError(
            f"`--utterances` must be at least --batch = {options.batch}, but is "
            f"{options.utterances}: raise it."
        )
    known = SYSTEMS[options.task]
    for system in options.systems or ():
        if system not in known:
            raise ValueError(
                f"`--systems` of {options.task} must be among {', '.join(known)}, but has {system}."
            )
    return [system for system in known if options.systems is None or system in options.systems]


def _described(row: dict[str, Any]) -> str:
    compared = [
        f"{name.replace('_', ' ')} {row[name]:.4g}"
        for name in ("loss", "loss_difference", "agreement")
        if name in row
    ]
    return (
        f"{row['system']:20} {row['audio_s_per_s']:8.2f} audio s/s  {row['step_s']:8.3f} s for "
        f"{row['audio_s']:.1f} s  peak {row['peak_bytes'] / 1e9:.2f} GB, "
        f"{row['base_bytes'] / 1e9:.2f} GB before the model  {'  '.join(compared)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser("whisper", __doc__)
    add = parser.add_argument
    add("task", choices=list(SYSTEMS))
    add("--model", choices=list(SIZES), default="tiny")
    add("--systems", nargs="+", metavar="SYSTEM", help="all of the task by default")
    add("--batch", type=int, default=8, help="utterances of a padded batch")
    add("--steps", type=int, default=20, help="timed steps or passes of each")
    add("--utterances", type=int, help="4000 to train on; 64 to transcribe")
    add("--lengths", type=Path, default=LISTED, help="durations: .txt, .tsv, .jsonl")
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    add("--threads", type=int, default=threads, help="of each system")
    add("--agreement", type=float, default=0.9, help="share of tokens that agree")
    add("--dry-run", action="store_true", help="a very small model, 2 steps")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 1 if a requested system is missing."""
    options = _parser().parse_args(arguments)
    if options.dry_run:
        options.model, options.batch, options.steps, options.utterances = "dry_run", 2, 2, 12
    try:
        systems = _systems(options)
        read_durations(options.lengths)
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(
                task=options.task,
                model=options.model,
                folder=folder,
                lengths=str(options.lengths),
                utterances=options.utterances or (4000 if options.task == "finetune" else 64),
                batch=options.batch,
                threads=options.threads,
            )
            benchmark = Benchmark(settings, options.agreement)
            if importlib.util.find_spec("ctranslate2") is None:
                for system in CTRANSLATE2:
                    benchmark.leave_out(system, "ctranslate2 is not installed: pip install it")
            prepare(settings, systems := [s for s in systems if s not in benchmark.failed])
            # Three steps, or the pass in which tokens are compared, are not counted.
            warm = min(3, options.steps) if options.task == "finetune" else 0
            rows = benchmark.measure(systems, warm, options.steps)
    except (ImportError, ValueError, OSError) as error:
        harness.complain(f"bench whisper: {error}")
        return 2
    table = harness.Table(COLUMNS, options.output, torch.device("cpu"))
    for row in rows:
        table.add(row, _described(row))
    missing = False
    for system, reason in benchmark.failed.items():
        if system in _systems(options):
            harness.complain(f"bench whisper: {system}: left out: {reason}")
            # Where systems are not named, those of an optional package need not be there.
            missing |= options.systems is not None or system not in CTRANSLATE2
    return 1 if missing else 0
