"""Training throughput: packed against padded batches, and against transformers' Canary.

    python profiling/bench_training.py [--model small canary_180m_flash canary_1b_flash ...]
        [--systems packed_static packed random ...] [--modes eager graph compile graph_compile]
        [--frame-budget N] [--steps 20] [--categories] [--output CSV]

Audio is noise and texts are random tokens, but durations are those of a list of real ones; no
system computes more frames a step than the budget, padding included. ``packed_static`` fills a
static shape, ``packed`` is the same without the tails; ``random``, ``bucketed``, ``sync_bucketed``
and ``sync_bucketed_2d`` are the batches of other toolkits, computed padded; ``transformers`` trains
Hugging Face's Canary with the same weights, the batches of ``random``, the same loss and the same
optimizer, or its Whisper on windows of 30 s (our systems compute no silence); its features are made
before the clock starts. That both models give the same loss is checked first. On a CPU systems take
turns, a step each. ``--modes`` is for ``packed_static``: a CUDA graph replays its micro-batches,
torch.compile makes the model's kernels, or both. On a GPU, and with several models or modes, each
is timed in a process of its own, so that an error, or running out of memory, ends no other. What
cannot be measured here is left out with its reason. Exit code 1: something failed; 3: nothing could
be measured here. The steps of a row are spread over an epoch by the length of their utterances, so
that all systems train on the same ones: its throughput is that of all of them together, its time
the median of a step. With --categories some more steps are recorded
after those that are timed, and their time by category of kernel goes to NAME_categories.csv beside
the table. With --profile DIR the steps are not timed but recorded, in DIR/SYSTEM/rank0.json.gz, for
``profiling/report.py``. Needs torch and triton alone, but for the bucketed systems, which are
lhotse's, and transformers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from bench import rows
from bench.provenance import provenance
from bench.training import jobs as training_jobs
from bench.training import step_categories
from bench.training.corpus import Workload, batches_of
from bench.training.cpu_models import CPU_MODELS
from bench.training.jobs import MODES, STATIC, Job, Verdict
from bench.training.systems import (
    Effasr,
    Step,
    Timed,
    Transformers,
    loss_difference,
    time_in_turns,
)

from effasr.data.batch import Batch, StaticShape
from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import LoopConfig, TrainConfig, resolve_losses
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.flops import peak_flops, work_of

PADDED = ("random", "bucketed", "sync_bucketed", "sync_bucketed_2d")
SYSTEMS = (STATIC, "packed", *PADDED, "transformers")
COLUMNS = (
    *("system", "model", "mode", "precision", "threads", "frame_budget", "utterances", "audio_s"),
    *(
        "step_s",
        "p20_s",
        "p80_s",
        "audio_s_per_s",
        "padding_frames",
        "padding_tokens",
        "peak_bytes",
        "mfu",
    ),
    *("tflops_useful", "loss_difference", "graph", "compile", "device", "torch", "triton", "git"),
    "date",
)


@dataclass(frozen=True)
class Setup:
    """The benchmarked model, corpus and device.

    Attributes:
        config: Configuration of the run.
        classes: Vocabulary size.
        workload: The corpus.
        shape: The static shape of its batches.
        device: Device to train on.
    """

    config: TrainConfig
    classes: int
    workload: Workload
    shape: StaticShape
    device: torch.device

    @classmethod
    def of(cls, options: argparse.Namespace, model: str | None = None) -> Setup:
        """Create the setup from the command line; see `add_options`.

        Args:
            options: Parsed options; ``model`` is not read if the argument is given.
            model: Name of the model.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = device.type == "cuda"
        given = model if isinstance(options.model, list) else options.model
        name = given or ("canary_180m_flash" if on_gpu else "small")
        if name in CPU_MODELS:
            model_config, classes = CPU_MODELS[name]()
        else:
            model_config, classes = PRESETS[name], PRESET_VOCABULARIES[name]
        budget = options.frame_budget or (12_000 if on_gpu else 400)
        framing = model_config.features.framing
        # Half a second short, since frames are rounded up.
        longest = min(options.longest, framing.seconds * budget - 0.5)
        workload = Workload.of(options.utterances, classes, longest, framing)
        config = TrainConfig(
            name=name,
            model=model_config,
            loss=resolve_losses(TrainConfig().loss, model_config),
            optimizer=OptimizerConfig(lr=1e-5),
            training=LoopConfig(
                precision=options.precision or ("bfloat16" if on_gpu else "float32"),
                ema_decay=None,
            ),
        )
        return cls(config, classes, workload, workload.shape(budget), device)

    @cached_property
    def model(self) -> ASRModel:
        """On the host, with the weights that training begins with."""
        torch.manual_seed(0)
        # Drawn by the device: a host takes a quarter minute for a billion of them.
        with torch.device("meta"):
            model = ASRModel(self.config.model, self.classes)
        model.to_empty(device=self.device)
        model.reset_parameters()
        return model.cpu()

    def with_mode(self, mode: str) -> Setup:
        """Return the same, whose micro-batches are a CUDA graph, compiled, both, or neither."""
        training = replace(
            self.config.training, cuda_graph="graph" in mode, compile="compile" in mode
        )
        if training == self.config.training:
            return self
        return replace(self, config=replace(self.config, training=training))

    def batches(self, system: str, count: int) -> list[Batch]:
        """Return micro-batches that stand for an epoch, where the trainer's loader leaves them."""
        made = batches_of(system, self.workload, self.shape, count)
        return [batch.pin_memory() if self.device.type == "cuda" else batch for batch in made]

    def copy(self) -> ASRModel:
        """Return a model with these weights, on the device."""
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        model = ASRModel.from_state_dict(self.model.config, self.model.vocab_size, state)
        return model.to(self.device).train()


@dataclass(frozen=True)
class Measured:
    """Result of a job.

    Attributes:
        row: Row of the table.
        categories: Rows of the table of categories; empty unless requested.
    """

    row: dict[str, Any]
    categories: list[dict[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """A system that is ready to be timed.

    Attributes:
        system: Name of the system.
        setup: Model, corpus and device.
        batches: Batch of each step, with those before the clock starts.
        step: Makes the update of a batch.
        ours: Our trainer; None for transformers.
        fields: Known fields of its row.
    """

    system: str
    setup: Setup
    batches: list[Batch]
    step: Step
    ours: Effasr | None
    fields: dict[str, Any]

    @classmethod
    def of(cls, system: str, setup: Setup, steps: int, warm: int) -> Prepared:
        """Build the model and the batches.

        Args:
            system: Name of the system.
            setup: Model, corpus and device.
            steps: Steps to be timed.
            warm: Steps before them, on the last of their batches; at most as many.

        Raises:
            ValueError: The losses of the two models differ.
            ImportError: What the system needs is not installed.
        """
        config, device, workload = setup.config, setup.device, setup.workload
        timed = setup.batches(system, steps)
        batches = timed[steps - warm :] + timed
        model = setup.copy()
        fields: dict[str, Any] = {"frame_budget": setup.shape.frame_budget}
        if system != "transformers":
            trainer = Effasr(config, model, device)
            return cls(system, setup, batches, trainer.steps(batches), trainer, fields)
        fields["loss_difference"] = loss_difference(config, model, workload, device)
        if fields["loss_difference"] > 1e-3:
            raise ValueError(f"the losses differ by {fields['loss_difference']:.2g}: not timed")
        peer = Transformers(config, model, device)
        examples = [[workload.example(int(name)) for name in batch.ids] for batch in batches]
        step = peer.steps([peer.inputs(chosen) for chosen in examples])
        return cls(system, setup, batches, step, None, fields)

    def measured(self, timed: Timed, recorded: int) -> Measured:
        """Make the rows, after more steps are recorded for the categories of their time."""
        warm = len(self.batches) - len(timed.seconds)
        one = row(self.system, self.setup, self.batches[warm:], timed) | self.fields
        if self.ours is None or not recorded:
            return Measured(one, [])
        # The first of them starts the profiler's own threads.
        again = [self.batches[number % len(self.batches)] for number in range(recorded + 1)]
        with tempfile.TemporaryDirectory() as folder:
            trace = self.ours.record(again, 1, Path(folder))
            categories = list(step_categories.of_trace(trace))
        shared = {name: one[name] for name in step_categories.COLUMNS if name in one}
        return Measured(one, [shared | found for found in categories])


def run_systems(prepared: Sequence[Prepared], steps: int, recorded: int = 0) -> list[Measured]:
    """Time the steps of systems that take turns.

    Args:
        prepared: The systems, with batches for more steps than are timed.
        steps: Timed steps.
        recorded: Steps that are recorded afterwards, for the categories of their time.
    """
    warm = len(prepared[0].batches) - steps
    turns = [one.step for one in prepared]
    timed = time_in_turns(turns, steps, warm, prepared[0].setup.device)
    return [one.measured(times, recorded) for one, times in zip(prepared, timed, strict=True)]


def record(system: str, setup: Setup, steps: int, folder: Path) -> Path:
    """Record some steps; returns the trace.

    Raises:
        ValueError: The system is not ours.
    """
    if system == "transformers":
        raise ValueError("only our own steps have ranges to be recorded with: leave it out")
    warm = 3
    timed = setup.batches(system, steps)
    batches = [timed[number % steps] for number in range(warm)] + timed
    return Effasr(setup.config, setup.copy(), setup.device).record(batches, warm, folder)


def row(system: str, setup: Setup, batches: Sequence[Batch], timed: Timed) -> dict[str, Any]:
    """Return the measurement as a row of the table."""
    config, device = setup.config, setup.device
    cost = cost_model(config.model, setup.classes)
    audio = statistics.mean(batch.audio_seconds for batch in batches)
    # Of all steps together, as an epoch takes them: long utterances are not as fast as short ones.
    seconds = math.fsum(timed.seconds)
    speed = sum(batch.audio_seconds for batch in batches) / seconds
    useful = work_of(batches, cost)[0] / seconds
    low, high = timed.seconds[0], timed.seconds[-1]
    if len(timed.seconds) > 1:
        low, *_, high = statistics.quantiles(timed.seconds, n=5, method="inclusive")
    peak = peak_flops(device)
    frames = sum(batch.num_frames for batch in batches)
    tokens = sum(batch.num_tokens for batch in batches)
    graph, compiled = config.training.cuda_graph is True, config.training.compile
    return dict.fromkeys(COLUMNS, "") | {
        "system": system,
        "model": config.name,
        "mode": "_".join(["graph"] * graph + ["compile"] * compiled) or "eager",
        "precision": config.training.precision,
        "threads": torch.get_num_threads() if device.type == "cpu" else "",
        "utterances": round(statistics.mean(len(batch.ids) for batch in batches), 1),
        "audio_s": round(audio, 2),
        "step_s": round(statistics.median(timed.seconds), 5),
        "p20_s": round(low, 5),
        "p80_s": round(high, 5),
        "audio_s_per_s": round(speed, 1),
        "padding_frames": round(1 - frames / sum(batch.frames.rows for batch in batches), 4),
        "padding_tokens": round(1 - tokens / sum(b.tokens.layout.rows for b in batches), 4),
        "peak_bytes": "" if timed.peak_bytes is None else timed.peak_bytes,
        "mfu": "" if peak is None else round(useful / peak, 4),
        "tflops_useful": round(useful / 1e12, 4),
        "graph": graph,
        "compile": compiled,
        **provenance(device),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    chosen = training_jobs.jobs(options.model or [None], options.systems, options.modes)
    if not chosen:
        parser.error(f"--modes without eager are for {STATIC} alone: add it to --systems")
    if options.profile is not None and len(options.model or []) > 1:
        parser.error("--profile records one --model at a time")
    on_gpu = torch.cuda.is_available()
    several = len({(job.model, job.mode) for job in chosen}) > 1
    if len(chosen) > 1 and (on_gpu or several):
        verdicts = training_jobs.run_apart(
            chosen,
            lambda job: _command(job, options),
            budget_s=options.budget_s,
            case_s=options.case_s,
        )
    else:
        verdicts = _run_here(chosen, options, on_gpu=on_gpu)
    if len(chosen) > 1:
        sys.stdout.write(f"{training_jobs.summarize(verdicts)}\n")
    statuses = {verdict.status for verdict in verdicts}
    if statuses == {"left out"}:
        return training_jobs.LEFT_OUT
    return 1 if "failed" in statuses else 0


def _run_here(chosen: Sequence[Job], options: argparse.Namespace, *, on_gpu: bool) -> list[Verdict]:
    """Run jobs of one model in this process; on a CPU several systems take turns."""
    verdicts: dict[Job, Verdict] = {}
    ready: dict[Job, Prepared] = {}
    setup = Setup.of(options, chosen[0].model)
    warm = min(3, options.steps)
    for job in chosen:
        reason = training_jobs.unsupported_reason(job, on_gpu=on_gpu)
        if reason is not None:
            verdicts[job] = Verdict(job, "left out", reason)
            continue
        mine = setup.with_mode(job.mode)
        if options.profile is not None:
            verdicts[job] = _attempt(job, lambda job=job, mine=mine: _record(job, mine, options))
            continue

        def prepare(job: Job = job, mine: Setup = mine) -> None:
            ready[job] = Prepared.of(job.system, mine, options.steps, warm)

        verdicts[job] = _attempt(job, prepare)

    def measure() -> None:
        for found in run_systems(list(ready.values()), options.steps, options.categories):
            _show(found)
            _write(found, options.output)

    if ready:
        for job in ready:
            verdicts[job] = Verdict(job, "ok")
        ended = _attempt(next(iter(ready)), measure)
        if ended.status != "ok":
            verdicts |= {job: Verdict(job, ended.status, ended.reason) for job in ready}
    for verdict in verdicts.values():
        if verdict.status != "ok":
            sys.stderr.write(f"{verdict.line()}\n")
    return list(verdicts.values())


def _attempt(job: Job, action: Callable[[], None]) -> Verdict:
    """Do something for a job; an error is its verdict."""
    try:
        action()
    except ImportError as error:
        return Verdict(job, "left out", _reason(error))
    except (ValueError, torch.OutOfMemoryError, OutOfMemory) as error:
        return Verdict(job, "failed", _reason(error))
    except Exception as error:
        traceback.print_exc()
        return Verdict(job, "failed", _reason(error))
    return Verdict(job, "ok")


def _record(job: Job, setup: Setup, options: argparse.Namespace) -> None:
    name = job.system if job.mode == "eager" else f"{job.system}_{job.mode}"
    trace = record(job.system, setup, options.steps, options.profile / name)
    sys.stdout.write(f"{job.system}: {trace}\n")


def _write(found: Measured, output: Path | None) -> None:
    if output is None:
        return
    rows.append(output, COLUMNS, found.row)
    path = output.with_name(f"{output.stem}_categories.csv")
    for one in found.categories:
        rows.append(path, step_categories.COLUMNS, one)


def _reason(error: BaseException, most: int = 400) -> str:
    """Return an error on one line: some begin with an empty one."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:most]}"


def _command(job: Job, options: argparse.Namespace) -> list[str]:
    """Return the command of a process that runs one job."""
    command = [sys.executable, __file__, "--systems", job.system, "--modes", job.mode]
    if job.model is not None:
        command += ["--model", job.model]
    given = (
        "frame_budget",
        "precision",
        "utterances",
        "longest",
        "steps",
        "categories",
        "profile",
        "output",
    )
    for name in given:
        value = getattr(options, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def add_options(parser: argparse.ArgumentParser, *, several_models: bool = False) -> None:
    """Add the options that `Setup.of` reads."""
    count: dict[str, Any] = {"nargs": "+"} if several_models else {}
    parser.add_argument("--model", choices=[*CPU_MODELS, *PRESETS], **count)
    parser.add_argument("--frame-budget", type=int, help="12000 on a GPU, 400 on a CPU")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], help="bfloat16 on a GPU, float32 on a CPU"
    )
    parser.add_argument("--utterances", type=int, default=40_000, help="of the corpus")
    parser.add_argument("--longest", type=float, default=30.0, help="seconds of an utterance")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, several_models=True)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--categories",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="STEPS",
        help="also record 3, or so many, for the time by category of kernel",
    )
    parser.add_argument("--profile", type=Path, metavar="DIR", help="record, instead of timing")
    parser.add_argument("--output", type=Path, help="CSV to append to")
    parser.add_argument("--budget-s", type=float, help="for all, where each has a process")
    parser.add_argument("--case-s", type=float, help="for each of them; else by the budget")
    return parser


def _show(found: Measured) -> None:
    one = found.row
    mfu = f"  MFU {100 * one['mfu']:.1f} %" if one["mfu"] != "" else ""
    peak = f"  {one['peak_bytes'] / 1e9:.1f} GB" if one["peak_bytes"] != "" else ""
    sys.stdout.write(
        f"{one['model']} {one['system']:17} {one['mode']:13} {one['audio_s_per_s']:10.1f} audio "
        f"s/s  {one['step_s']:.4f} s a step  padding {100 * one['padding_frames']:.1f} % of "
        f"frames, {100 * one['padding_tokens']:.1f} % of tokens{peak}{mfu}\n"
    )
    if found.categories:
        sys.stdout.write(f"    {step_categories.text(found.categories)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
