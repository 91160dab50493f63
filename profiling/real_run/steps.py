"""The steps of ``profiling/train_on_gpu.py`` in order: each runs `effasr` and checks the result.

A step returns the text for its row. It raises `Failed` if a result is wrong, and `LeftOut` if the
step cannot run here.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import processes

from effasr import config as configuration
from effasr.training.run_dir.run_directory import METRICS, VALIDATION, read_lines
from real_run import compare, corpus, settings

ROOT = Path(__file__).parents[2]
STRAIGHT, QUIET = "straight", "quiet"
_TRAIN = [sys.executable, str(ROOT / "effasr" / "train.py")]
_WRAPPED = [sys.executable, str(Path(__file__).with_name("one_process.py"))]
_LOSS_TOLERANCE = 0.01
"""Between two ways to compute the same step: of the loss of each of the first steps, relative."""
_COMPARED_STEPS = 8
_KILL_POLL_S = 0.01


class Failed(Exception):
    """Something is not as it must be."""


class LeftOut(Exception):
    """This cannot be done here."""


@dataclass
class Context:
    """State shared by the steps.

    Attributes:
        output: Folder of logs and of the runs' reports.
        work: Folder of corpus, runs and checkpoints; not kept.
        size: Size of the runs.
        dry: Whether the run is on the CPU.
        prepared: A given corpus, or None.
        environment: Environment of the commands.
        limit_s: Limit in seconds of the step that runs.
        step: Name of the running step.
        corpus: Corpus, once it exists.
        calibration: Calibration, once it was computed.
    """

    output: Path
    work: Path
    size: settings.Size
    dry: bool
    prepared: Path | None = None
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    limit_s: float = 600.0
    step: str = ""
    corpus: corpus.Corpus | None = None
    calibration: dict[str, Any] | None = None

    @property
    def runs(self) -> Path:
        """Folder of the runs."""
        return self.work / "runs"

    def recipe(self, *, quiet: bool = False) -> Path:
        """Return the file of a recipe.

        Raises:
            LeftOut: There is no corpus.
        """
        if self.corpus is None:
            raise LeftOut("the step `corpus` has failed")
        device = "cpu" if self.dry else "cuda"
        config = settings.train_config(self.size, self.corpus, self.runs, device=device)
        if quiet:
            config = settings.without_chance(config)
        path = self.work / ("quiet.yaml" if quiet else "recipe.yaml")
        path.write_text(configuration.dump(config), encoding="utf-8")
        return path

    def call(
        self,
        command: Sequence[str],
        seconds: float,
        watch: Callable[[subprocess.Popen[str]], object] | None = None,
    ) -> processes.Ended:
        """Run a command; its output is added to the step's log."""
        path = self.output / "logs" / f"train_on_gpu_{self.step}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()

            def echo(line: str) -> None:
                log.write(line)
                log.flush()

            return processes.run(
                command,
                seconds=seconds,
                environment=self.environment,
                directory=self.work,
                echo=echo,
                watch=watch,
            )

    def train(self, name: str, *overrides: str, quiet: bool = False, wrapped: bool = False) -> Path:
        """Train a run to its end; returns its directory.

        Raises:
            Failed: It did not end well.
        """
        program = _WRAPPED if wrapped else _TRAIN
        command = [*program, str(self.recipe(quiet=quiet)), f"name={name}", *overrides]
        ended = self.call(command, self.limit_s)
        self.keep(name)
        if ended.code != 0:
            raise Failed(ended.reason)
        return self.runs / name

    def keep(self, name: str) -> None:
        """Copy what a run tells of itself; its checkpoints are not kept."""
        folder = self.output / "train_on_gpu"
        folder.mkdir(parents=True, exist_ok=True)
        for file in (METRICS, VALIDATION):
            source = self.runs / name / file
            if source.is_file():
                shutil.copy(source, folder / f"{name}_{file}")


def described(run: Path, steps: int, first: int = 1) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of metrics.jsonl, and what they say in words.

    Raises:
        Failed: A step is missing, or a loss is not finite.
    """
    lines = read_lines(run / METRICS)
    if [line["step"] for line in lines] != list(range(first, steps + 1)):
        raise Failed(
            f"metrics.jsonl must have steps {first} to {steps}, but has {len(lines)} lines"
        )
    losses = [float(line["loss"]) for line in lines]
    if not all(map(math.isfinite, losses)):
        raise Failed("a loss is not finite")
    settled = lines[len(lines) // 2 :]
    step_s = statistics.median(line["step_s"] for line in settled)
    wait_s = statistics.median(line["data_wait_s"] for line in settled)
    audio = statistics.median(line["audio_seconds"] for line in settled)
    peak = max(line["peak_memory_bytes"] for line in lines)
    said = (
        f"{steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, {1e3 * step_s:.1f} ms a step of "
        f"{audio:.0f} s of audio, of which {1e3 * wait_s:.1f} ms wait for data, "
        f"peak {peak / 1e9:.3f} GB"
    )
    return lines, said


def make_corpus(context: Context) -> str:
    """Bring the corpus into place."""
    context.corpus = corpus.find_or_make(
        context.prepared, context.work / "corpus", utterances=context.size.utterances
    )
    found = context.corpus
    return f"{found.kind}: {found.utterances} utterances, {found.seconds / 60:.1f} min"


def train(context: Context) -> str:
    """Run the whole loop: pinned loader, asynchronous checkpoints, validation, weight average."""
    size = context.size
    run = context.train(STRAIGHT)
    lines, said = described(run, size.steps)
    if lines[-1]["loss"] >= lines[0]["loss"]:
        raise Failed(f"the loss did not fall: {said}")
    validated = [line["step"] for line in read_lines(run / VALIDATION)]
    if validated != [size.steps // 2, size.steps]:
        raise Failed(f"validations were due at half and at the end, but are at {validated}")
    saved = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
    due = {f"step_{step:08d}" for step in range(size.checkpoint_every, size.steps + 1,
                                                size.checkpoint_every)}  # fmt: skip
    if missing := due - set(saved):
        raise Failed(f"checkpoints are missing: {', '.join(sorted(missing))}")
    return f"{said}; {len(saved)} checkpoints, {len(validated)} validations"


def kill_and_resume(context: Context) -> str:
    """SIGKILL in the middle; the run that goes on ends as the one that was left alone."""
    size = context.size
    if not (context.runs / STRAIGHT / "checkpoints" / f"step_{size.steps:08d}").is_dir():
        raise LeftOut("the step `train`, with whose weights to compare, has failed")
    name, began = "killed", time.monotonic()
    run = context.runs / name
    until = began + 0.6 * context.limit_s

    def kill(process: subprocess.Popen[str]) -> None:
        while process.poll() is None and time.monotonic() < until:
            if any(line["step"] >= size.killed_after for line in read_lines(run / METRICS)):
                # The data workers with it: all that the run has started.
                os.killpg(process.pid, signal.SIGKILL)
                return
            time.sleep(_KILL_POLL_S)

    command = [*_TRAIN, str(context.recipe()), f"name={name}"]
    ended = context.call(command, 0.6 * context.limit_s, watch=kill)
    if ended.code != -signal.SIGKILL:
        raise Failed(f"the run was to be killed after step {size.killed_after}: {ended.reason}")
    reached = read_lines(run / METRICS)[-1]["step"]
    if reached >= size.steps:
        raise Failed("the run had ended before it was killed")
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    if not checkpoints:
        raise Failed(f"killed after step {reached}, but there is no checkpoint to go on from")
    context.limit_s -= time.monotonic() - began
    context.train(name)
    differing = compare.differing(context.runs / STRAIGHT, run, size.steps)
    if differing:
        raise Failed(f"{len(differing)} tensors differ in the end: {', '.join(differing[:3])}")
    if compare.metrics(context.runs / STRAIGHT) != compare.metrics(run):
        raise Failed("weights are equal, but metrics.jsonl differs")
    start = int(checkpoints[-1].name.removeprefix("step_"))
    return (
        f"killed after step {reached}, went on from step {start}; weights, moments and metrics of "
        f"step {size.steps} are the same to the bit"
    )


def quiet(context: Context) -> str:
    """Train the baseline of the following steps: no dropout, no SpecAugment, no CUDA graph."""
    run = context.train(QUIET, *_quiet_overrides(context), quiet=True)
    return described(run, context.size.quiet_steps)[1]


def _quiet_overrides(context: Context) -> list[str]:
    steps = context.size.quiet_steps
    return [
        # The default of a GPU is a graph: the step `cuda_graph` would compare it with itself, and
        # `nccl` would record the wrapper, which `effasr train` never does.
        "training.cuda_graph=false",
        f"training.max_steps={steps}",
        f"training.checkpoint_every={steps}",
        "data.validation=[]",
    ]


def _compared(context: Context, name: str, *overrides: str, wrapped: bool = False) -> str:
    """Train the quiet run in another way, and compare its losses."""
    steps = context.size.quiet_steps
    expected = read_lines(context.runs / QUIET / METRICS)
    if len(expected) != steps:
        raise LeftOut(f"the step `{QUIET}`, with whose losses to compare, has failed")
    given = [*_quiet_overrides(context), *overrides]
    run = context.train(name, *given, quiet=True, wrapped=wrapped)
    lines, said = described(run, steps)
    apart = [
        abs(ours["loss"] / theirs["loss"] - 1) for ours, theirs in zip(lines, expected, strict=True)
    ]
    first = max(apart[:_COMPARED_STEPS])
    if not first <= _LOSS_TOLERANCE:
        raise Failed(f"losses of the first steps are {first:.2%} from those of `{QUIET}`: {said}")
    differing = compare.differing(context.runs / QUIET, run, steps)
    same = "the same to the bit" if not differing else f"{len(differing)} tensors differ in bits"
    return f"{said}; losses within {max(apart):.2e} of `{QUIET}`, weights in the end: {same}"


def cuda_graph(context: Context) -> str:
    """Micro-batches as a CUDA graph, in the real loop."""
    if context.dry:
        raise LeftOut("`training.cuda_graph` needs a GPU, and this is a dry run on the CPU")
    return _compared(context, "graph", "training.cuda_graph=true")


def compile_model(context: Context) -> str:
    """torch.compile, in the real loop."""
    return _compared(context, "compile", "training.compile=true")


def one_process(context: Context) -> str:
    """DistributedDataParallel over NCCL with one process."""
    return _wrapped(context, "ddp", "DistributedDataParallel")


def fsdp2(context: Context) -> str:
    """FSDP2 over NCCL with one process, and its sharded checkpoint."""
    # By default one process has copies of its weights, since `effasr train` shards none for it.
    return _wrapped(context, "fsdp2", "FSDPModule", "training.bfloat16_weights=false")


def _wrapped(context: Context, strategy: str, kind: str, *overrides: str) -> str:
    """Train with a process group of one, and see that the model was wrapped for it."""
    given = f"training.strategy={strategy}", *overrides
    said = _compared(context, strategy, *given, wrapped=True)
    log = context.output / "logs" / f"train_on_gpu_{context.step}.log"
    mark = "one_process: "
    text = log.read_text(encoding="utf-8")
    marks = [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]
    if not marks or not marks[-1].startswith(kind):
        raise Failed(f"the model must be wrapped as {kind}, but the log says {marks}")
    return f"{marks[-1]}; {said}"


def calibrate(context: Context) -> str:
    """Return the largest budget for a memory that is given."""
    command = [sys.executable, "-m", "effasr.cli", "calibrate", str(context.recipe())]
    command += [*context.size.calibration, "data.validation=[]", "--json"]
    ended = context.call(command, context.limit_s)
    if ended.code != 0:
        raise Failed(ended.reason)
    lines = list(ended.lines)
    begin = lines.index("{")
    found = json.loads("\n".join(lines[begin : lines.index("}", begin) + 1]))
    context.calibration = found
    return (
        f"frame budget {found['frame_budget']} (limited by {found['limited_by']}) for "
        f"{found['target_bytes'] / 1e9:.3f} GB; replay {found['measured_bytes'] / 1e9:.3f} GB, "
        f"predicted {found['predicted_bytes'] / 1e9:.3f} GB "
        f"({100 * found['prediction_error']:+.1f} %); {len(found['trials'])} trials in "
        f"{found['seconds']:.0f} s"
    )


def calibrated_run(context: Context) -> str:
    """Training at the calibrated budget stays within the memory that was given."""
    found, steps = context.calibration, context.size.calibrated_steps
    if found is None:
        raise LeftOut("the step `calibrate` has failed")
    budgets = [f"data.{name}={found[name]}" for name in ("frame_budget", "token_budget")]
    run = context.train(
        "calibrated",
        *budgets,
        f"data.max_sequences={found['max_sequences']}",
        f"training.max_steps={steps}",
        f"training.checkpoint_every={steps}",
        f"training.validate_every={steps}",
        "training.keep=1",
    )
    lines, said = described(run, steps)
    peak = max(line["peak_memory_bytes"] for line in lines)
    ratio = peak / found["predicted_bytes"] - 1
    told = f"{said}; {100 * ratio:+.1f} % of what was predicted"
    # A process on the CPU is measured as a whole, with whatever else it has loaded.
    if not context.dry and peak > found["target_bytes"]:
        raise Failed(f"more than the {found['target_bytes'] / 1e9:.3f} GB that were given: {told}")
    splits = sum(line["oom_splits"] for line in lines)
    if splits:
        raise Failed(f"{splits} micro-batches did not fit in memory: {told}")
    return told


@dataclass(frozen=True)
class RunStep:
    """One of them.

    Attributes:
        name: Name of its row and log.
        do: Function that runs the step.
        least_s: Least seconds left for starting it on a GPU, where kernels are compiled.
        dry_s: Least seconds left for starting it in a dry run.
    """

    name: str
    do: Callable[[Context], str]
    least_s: float
    dry_s: float


STEPS = (
    RunStep("corpus", make_corpus, 10, 2),
    RunStep("train", train, 40, 15),
    RunStep("kill_and_resume", kill_and_resume, 60, 25),
    RunStep("quiet", quiet, 30, 10),
    RunStep("cuda_graph", cuda_graph, 30, 1),
    RunStep("nccl", one_process, 30, 15),
    RunStep("fsdp2", fsdp2, 30, 15),
    RunStep("calibrate", calibrate, 90, 30),
    RunStep("calibrated_run", calibrated_run, 60, 15),
    RunStep("compile", compile_model, 90, 40),
)
"""Steps in order: those that others depend on first, those that compile for minutes last."""
