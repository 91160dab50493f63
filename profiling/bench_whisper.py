"""Whisper on a CPU: fine-tuning against transformers, transcribing also against CTranslate2.

    python profiling/bench_whisper.py finetune|transcribe [--model tiny|base|small] [--batch 8]
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
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench import rows
from bench.provenance import provenance
from bench.workload import LISTED, read_durations
from bench_inference import agreement
from whisper_bench.checkpoint import prepare
from whisper_bench.processes import SystemFailed, SystemProcess
from whisper_bench.settings import CTRANSLATE2, SIZES, SYSTEMS, Settings

COLUMNS = (
    *("task", "system", "model", "minimum_s", "batch", "lengths", "utterances", "audio_s"),
    *("frames", "tokens", "audio_s_per_s", "step_s", "p20_s", "p80_s", "peak_bytes", "base_bytes"),
    *("loss", "loss_difference", "agreement", "note", "threads", "version"),
    *("device", "torch", "triton", "git", "date"),
)
REFERENCE = "transformers"
SAME = "effasr_silence", "ctranslate2_float32"
"""Systems that compute what transformers computes."""
LOSS_TOLERANCE = 1e-3
_PAUSE_S = 0.3
"""Idle threads of a system may spin for so long after its turn."""


@dataclass
class Measured:
    """Results of a system so far.

    Attributes:
        process: Process of the system.
        about: Its reply after loading, and the result of the check.
        checked: Its reply to the check.
        losses: Losses of each step.
        runs: Its replies to the timed runs.
    """

    process: SystemProcess
    about: dict[str, Any]
    checked: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)


class Benchmark:
    """The systems of one task, those that failed left out.

    Attributes:
        failed: Systems that were left out, with the reason.
    """

    def __init__(self, settings: Settings, least_agreement: float) -> None:
        """Measure nothing yet."""
        self.failed: dict[str, str] = {}
        self._settings, self._least = settings, least_agreement
        self._systems: dict[str, Measured] = {}

    def leave_out(self, systems: Sequence[str], reason: str) -> None:
        """Do not measure these."""
        for system in systems:
            self._systems.pop(system, None)
            self.failed[system] = reason

    def measure(self, systems: Sequence[str], warm: int, steps: int) -> list[dict[str, Any]]:
        """Load, compare and time systems; returns a row for each that did not fail."""
        with ExitStack() as stack:
            started = [
                stack.enter_context(SystemProcess(self._settings, system)) for system in systems
            ]
            for process in started:
                self._attempt(process.system, lambda one=process: self._load(one))
            for system in list(self._systems):
                self._attempt(system, lambda one=system: self._check(one))
            self._compare()
            for number in range(warm + steps):
                for system in list(self._systems):
                    timed = number >= warm
                    self._attempt(system, lambda n=number, s=system, t=timed: self._run(s, n, t))
                if number + 1 == warm:
                    self._compare()
            for system in list(self._systems):
                self._attempt(system, lambda one=system: self._remember_memory(one))
        return [self._row(system) for system in self._systems]

    def _attempt(self, system: str, call: Callable[[], None]) -> None:
        try:
            call()
        except SystemFailed as error:
            self.leave_out([system], str(error))

    def _load(self, process: SystemProcess) -> None:
        self._systems[process.system] = Measured(process, process.loaded())

    def _check(self, system: str) -> None:
        one = self._systems[system]
        one.checked = one.process.ask("check")

    def _run(self, system: str, number: int, timed: bool) -> None:
        if self._settings.threads > 1:
            time.sleep(_PAUSE_S)
        one = self._systems[system]
        done = one.process.ask("run", number)
        if "loss" in done:
            one.losses.append(done["loss"])
        if timed:
            one.runs.append(done)

    def _remember_memory(self, system: str) -> None:
        one = self._systems[system]
        one.about |= one.process.ask("memory")

    def _compare(self) -> None:
        """Compare with transformers what there is, and leave out what should agree and does not."""
        reference = self._systems.get(REFERENCE)
        for system, one in list(self._systems.items()):
            if reference is not None and system != REFERENCE:
                one.about |= compare(system, one, reference)
                if reason := disagreement(system, one.about, self._least):
                    self.leave_out([system], reason)

    def _row(self, system: str) -> dict[str, Any]:
        one, settings = self._systems[system], self._settings
        seconds = [run["seconds"] for run in one.runs]
        low, high = seconds[0], seconds[0]
        if len(seconds) > 1:
            low, *_, high = statistics.quantiles(seconds, n=5, method="inclusive")
        minimum_s = settings.minimum_s(system)
        usual, audio = statistics.median(seconds), one.runs[0]["audio_s"]
        about = {name: value for name, value in one.about.items() if name in COLUMNS}
        return dict.fromkeys(COLUMNS, "") | {
            "task": settings.task,
            "system": system,
            "model": settings.model,
            "minimum_s": minimum_s,
            "batch": settings.batch,
            "lengths": Path(settings.lengths).stem,
            "utterances": round(one.runs[0]["utterances"], 1),
            "audio_s": round(audio, 2),
            "frames": one.runs[0].get("frames", ""),
            "tokens": one.runs[0].get("tokens", ""),
            "audio_s_per_s": round(audio / usual, 2),
            "step_s": round(usual, 5),
            "p20_s": round(low, 5),
            "p80_s": round(high, 5),
            "loss": _rounded(one.checked.get("loss", "")),
            "note": _note(system, minimum_s),
            "threads": settings.threads,
            **{name: _rounded(value) for name, value in about.items()},
            **provenance(torch.device("cpu")),
        }


def compare(system: str, one: Measured, reference: Measured) -> dict[str, float]:
    """Return how far a system is from transformers.

    Returns:
        ``loss_difference``, the largest of the check and, where both make the same steps, of the
        steps so far, as a part of the loss; or ``agreement``, the share of tokens.
    """
    if "tokens" in one.checked:
        return {"agreement": agreement(one.checked["tokens"], reference.checked["tokens"])}
    pairs = [(one.checked["loss"], reference.checked["loss"])]
    if system in SAME:
        pairs += zip(one.losses, reference.losses, strict=True)
    differences = [abs(ours / theirs - 1) for ours, theirs in pairs]
    # max() may pass over NaN.
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return {"loss_difference": largest}


def disagreement(system: str, found: Mapping[str, Any], least_agreement: float) -> str | None:
    """Return why a system that should agree with transformers is not timed; None if it agrees."""
    if system not in SAME:
        return None
    difference, share = found.get("loss_difference", 0.0), found.get("agreement", 1.0)
    # Not greater, so that NaN does not pass.
    if not difference <= LOSS_TOLERANCE:
        return f"its loss differs from transformers' by {difference:.2g} of it"
    if not share >= least_agreement:
        return f"only {share:.4f} of its tokens are transformers'"
    return None


def _note(system: str, minimum_s: int) -> str:
    if not minimum_s:
        return "hears no silence: losses and tokens differ from transformers' by definition"
    return "weights rounded to 8 bits" if system.endswith("int8") else ""


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


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
                benchmark.leave_out(CTRANSLATE2, "ctranslate2 is not installed: pip install it")
            prepare(settings, systems := [s for s in systems if s not in benchmark.failed])
            # Three steps, or the pass in which tokens are compared, are not counted.
            warm = min(3, options.steps) if options.task == "finetune" else 0
            found = benchmark.measure(systems, warm, options.steps)
    except (ImportError, ValueError, OSError) as error:
        sys.stderr.write(f"bench_whisper: {error}\n")
        return 2
    for one in found:
        _show(one)
        if options.output is not None:
            rows.append(options.output, COLUMNS, one)
    missing = False
    for system, reason in benchmark.failed.items():
        if system in _systems(options):
            sys.stderr.write(f"bench_whisper: {system}: left out: {reason}\n")
            # Where systems are not named, those of an optional package need not be there.
            missing |= options.systems is not None or system not in CTRANSLATE2
    return 1 if missing else 0


def _systems(options: argparse.Namespace) -> list[str]:
    """Return the requested systems, in the order of the table.

    Raises:
        ValueError: One is unknown, or a number is out of range.
    """
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=list(SYSTEMS))
    parser.add_argument("--model", choices=list(SIZES), default="tiny")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="all of the task by default")
    parser.add_argument("--batch", type=int, default=8, help="utterances of a padded batch")
    parser.add_argument("--steps", type=int, default=20, help="timed steps or passes of each")
    parser.add_argument("--utterances", type=int, help="4000 to train on; 64 to transcribe")
    parser.add_argument(
        "--lengths", type=Path, default=LISTED, help="durations: .txt, .tsv, .jsonl"
    )
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    parser.add_argument("--threads", type=int, default=threads, help="of each system")
    parser.add_argument("--agreement", type=float, default=0.9, help="share of tokens that agree")
    parser.add_argument("--dry-run", action="store_true", help="a very small model, 2 steps")
    parser.add_argument("--output", type=Path, help="CSV to append to")
    return parser


def _show(one: dict[str, Any]) -> None:
    compared = [
        f"{name.replace('_', ' ')} {one[name]:.4g}"
        for name in ("loss", "loss_difference", "agreement")
        if one[name] != ""
    ]
    sys.stdout.write(
        f"{one['system']:20} {one['audio_s_per_s']:8.2f} audio s/s  {one['step_s']:8.3f} s for "
        f"{one['audio_s']:.1f} s  peak {one['peak_bytes'] / 1e9:.2f} GB, "
        f"{one['base_bytes'] / 1e9:.2f} GB before the model  {'  '.join(compared)}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
