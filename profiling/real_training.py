"""A real `effasr train` on a GPU: what no test of a part and no benchmark of a step runs.

    python profiling/real_training.py --output DIR [--minutes 8] [--corpus DIR] [--only STEP ...]
    python profiling/real_training.py --dry-run [--output DIR]

Trains small models on a small corpus, by the command and in processes of their own, and checks what
comes of it:

STEPS
Each has a limit by the time that is left and a log in DIR/logs; its row in DIR/real_training.csv is
written when it ends, and metrics of its run are kept in DIR/runs. One that fails stops none that
does not need it; one for which there is no time is left out. Exit code 1: one failed; 2: no GPU,
and no dry run.

The corpus is tones, or a folder with train.jsonl, dev.jsonl and tokenizer, as `effasr demo-data`
and `effasr tokenizer` make them. A dry run does all of it on the CPU at tiny size, by gloo in place
of NCCL and without CUDA graphs: it shows that the commands work, and measures nothing.
"""

import argparse
import copy
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_processes
import torch
import torch.distributed as dist
import yaml
from benchmarks import harness
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
COLUMNS = ("step", "status", "seconds", "details", "device", "torch", "triton", "git", "date")
MEASURED = {
    *("data_wait_s", "step_s", "mfu", "mfu_with_padding", "hfu", "useful_tflops"),
    *("peak_memory_bytes", "slowest_rank", "rank_wait_s"),
}  # fields of metrics.jsonl that differ from run to run
LOSS_TOLERANCE = 0.01  # of each of the first steps, relative, between two ways to compute it
COMPARED_STEPS = 8
SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


class Failed(Exception):
    pass


class LeftOut(Exception):
    pass


def lines_of(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    from effasr.training.run_dir.run_directory import read_lines

    return read_lines(run / file)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in line.keys() - MEASURED} for line in lines_of(run)]


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def differing_tensors(run: Path, other: Path, step: int) -> list[str]:
    """Return the weights, moments and averages in two runs' checkpoints that differ in any bit."""
    ours, theirs = _state(run, step), _state(other, step)
    names = sorted(ours.keys() | theirs.keys())
    same = lambda name: name in ours and name in theirs and torch.equal(ours[name], theirs[name])
    return [name for name in names if not same(name)]


def _state(run: Path, step: int) -> dict[str, Tensor]:
    from effasr.checkpoint import load_model
    from effasr.distributed.tensor_files import read_whole
    from effasr.training.checkpointing.run_checkpoints import TENSORS

    path = checkpoint(run, step)
    return load_model(path).model.state_dict() | read_whole(path / TENSORS)


def described(run: Path, steps: int) -> tuple[list[dict[str, Any]], str]:
    lines = lines_of(run)
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        raise Failed(f"metrics.jsonl must have steps 1 to {steps}, but has {len(lines)} lines")
    losses = [float(line["loss"]) for line in lines]
    if not all(map(math.isfinite, losses)):
        raise Failed("a loss is not finite")
    median = lambda name: statistics.median(line[name] for line in lines[len(lines) // 2 :])
    peak = max(line["peak_memory_bytes"] for line in lines)
    return lines, (
        f"{steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, "
        f"{1e3 * median('step_s'):.1f} ms a step of {median('audio_seconds'):.0f} s of audio, of "
        f"which {1e3 * median('data_wait_s'):.1f} ms wait for data, peak {peak / 1e9:.3f} GB"
    )


class Training:
    """Runs on one corpus. A method that is a step returns the text of its row."""

    def __init__(self, output: Path, work: Path, *, dry: bool, corpus: Path | None = None) -> None:
        self.output, self.work, self.dry = output, work, dry
        self.runs, self.corpus = work / "runs", corpus or work / "corpus"
        self.size: dict[str, Any] = SETTINGS["dry" if dry else "gpu"]
        self.loop = self.size["recipe"]["training"]
        self.name, self.limit_s = "", 600.0  # of the step that runs
        self.calibration: dict[str, Any] | None = None
        cache = {"XDG_CACHE_HOME": str(work / "cache")}
        self.environment = gpu_processes.environment(dry=dry, **cache)

    def recipe(self) -> Path:
        if not (self.corpus / "train.jsonl").is_file():
            raise LeftOut("the step `corpus` has failed")
        paths = {"train": "train.jsonl", "validation": "dev.jsonl", "tokenizer": "tokenizer"}
        data = {name: str(self.corpus / file) for name, file in paths.items()}
        recipe = {**self.size["recipe"], "output": str(self.runs)}
        path = self.work / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe | {"data": recipe["data"] | data}))
        return path

    def call(
        self, command: Sequence[str], seconds: float, watch: Any = lambda process: None
    ) -> gpu_processes.Ended:
        path = self.output / "logs" / f"{self.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", buffering=1) as log:
            log.write(f"$ {' '.join(command)}\n")
            return gpu_processes.run(
                command,
                seconds=seconds,
                environment=self.environment,
                directory=self.work,
                echo=log.write,
                watch=watch,
            )

    def train(self, name: str, *overrides: str, wrapped: bool = False) -> Path:
        program = [__file__, "--wrapped"] if wrapped else [str(ROOT / "effasr" / "train.py")]
        words = [sys.executable, *program, str(self.recipe()), f"name={name}", *overrides]
        ended = self.call(words, self.limit_s)
        folder = self.output / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("metrics.jsonl", "validation.jsonl"):
            if (self.runs / name / file).is_file():
                shutil.copy(self.runs / name / file, folder / f"{name}_{file}")
        if ended.code != 0:
            raise Failed(ended.reason)
        return self.runs / name

    def make_corpus(self) -> str:
        from tones import write_corpus

        count = self.size["utterances"]
        if not (self.corpus / "train.jsonl").is_file():
            write_corpus(self.corpus, train=count, dev=max(2, count // 10), longest=15)
        return str(self.corpus)

    def straight(self) -> str:
        """Run the whole loop: pinned loader, asynchronous checkpoints, validation, average."""
        steps, interval = self.loop["max_steps"], self.loop["checkpoint_every"]
        run = self.train("straight")
        lines, text = described(run, steps)
        if lines[-1]["loss"] >= lines[0]["loss"]:
            raise Failed(f"the loss did not fall: {text}")
        validated = [line["step"] for line in lines_of(run, "validation.jsonl")]
        if validated != [steps // 2, steps]:
            raise Failed(f"validations were due at half and at the end, but are at {validated}")
        due = [step for step in range(interval, steps + 1, interval)]
        if missing := [step for step in due if not checkpoint(run, step).is_dir()]:
            raise Failed(f"checkpoints of steps {missing} are missing")
        return f"{text}; checkpoints of {due}, {len(validated)} validations"

    def kill_and_resume(self) -> str:
        """SIGKILL in the middle; the run that goes on ends as the one that was left alone."""
        steps, after = self.loop["max_steps"], self.size["killed_after"]
        straight, run = self.runs / "straight", self.runs / "killed"
        if not checkpoint(straight, steps).is_dir():
            raise LeftOut("the step `train`, with whose weights to compare, has failed")
        began = time.monotonic()

        def kill(process: subprocess.Popen[str]) -> None:
            while process.poll() is None and time.monotonic() < began + 0.6 * self.limit_s:
                if any(line["step"] >= after for line in lines_of(run)):
                    # The data workers with it: all that the run has started.
                    os.killpg(process.pid, signal.SIGKILL)
                    return
                time.sleep(0.01)

        program = [sys.executable, str(ROOT / "effasr" / "train.py"), str(self.recipe())]
        ended = self.call([*program, "name=killed"], 0.6 * self.limit_s, watch=kill)
        if ended.code != -signal.SIGKILL:
            raise Failed(f"the run was to be killed after step {after}: {ended.reason}")
        reached = lines_of(run)[-1]["step"]
        checkpoints = sorted((run / "checkpoints").glob("step_*"))
        if reached >= steps or not checkpoints:
            raise Failed(f"killed after step {reached}, with {len(checkpoints)} checkpoints")
        self.limit_s -= time.monotonic() - began
        self.train("killed")
        if names := differing_tensors(straight, run, steps):
            raise Failed(f"{len(names)} tensors differ in the end: {', '.join(names[:3])}")
        if metrics_of(straight) != metrics_of(run):
            raise Failed("weights are equal, but metrics.jsonl differs")
        start = int(checkpoints[-1].name.removeprefix("step_"))
        return (
            f"killed after step {reached}, went on from step {start}; weights, moments and metrics "
            f"of step {steps} are the same to the bit"
        )

    def quiet(self) -> str:
        return described(self.train("quiet", *self._quiet()), self.size["quiet_steps"])[1]

    def _quiet(self) -> list[str]:
        steps = self.size["quiet_steps"]
        return [
            *SETTINGS["quiet"],
            f"training.max_steps={steps}",
            f"training.checkpoint_every={steps}",
        ]

    def variant(self, name: str, overrides: Sequence[str] = (), kind: str = "") -> str:
        """Train the quiet run in another way, and compare its losses.

        With a kind a process group of one is made, and the model must be wrapped as of this kind.
        """
        steps, expected = self.size["quiet_steps"], lines_of(self.runs / "quiet")
        if len(expected) != steps:
            raise LeftOut("the step `quiet`, with whose losses to compare, has failed")
        run = self.train(name, *self._quiet(), *overrides, wrapped=bool(kind))
        lines, text = described(run, steps)
        pairs = zip(lines, expected, strict=True)
        apart = [abs(ours["loss"] / theirs["loss"] - 1) for ours, theirs in pairs]
        first = max(apart[:COMPARED_STEPS])
        if not first <= LOSS_TOLERANCE:
            raise Failed(f"losses of the first steps are {first:.2%} from those of `quiet`: {text}")
        names = differing_tensors(self.runs / "quiet", run, steps)
        same = "the same to the bit" if not names else f"{len(names)} tensors differ in bits"
        text = f"{text}; losses within {max(apart):.2e} of `quiet`, weights in the end: {same}"
        if not kind:
            return text
        log = (self.output / "logs" / f"{self.name}.log").read_text(encoding="utf-8")
        marks = [x.removeprefix(MARK) for x in log.splitlines() if x.startswith(MARK)]
        if not marks or not marks[-1].startswith(kind):
            raise Failed(f"the model must be wrapped as {kind}, but the log says {marks}")
        return f"{marks[-1]}; {text}"

    def cuda_graph(self) -> str:
        if self.dry:
            raise LeftOut("`training.cuda_graph` needs a GPU, and this is a dry run on the CPU")
        return self.variant("graph", ["training.cuda_graph=true"])

    def calibrate(self) -> str:
        command = [sys.executable, "-m", "effasr.cli", "calibrate", str(self.recipe()), "--json"]
        settings = ["calibration.objective=memory", self.size["calibration"], "data.validation=[]"]
        ended = self.call([*command, *settings], self.limit_s)
        if ended.code != 0:
            raise Failed(ended.reason)
        begin = list(ended.lines).index("{")
        made, _ = json.JSONDecoder().raw_decode("\n".join(list(ended.lines)[begin:]))
        self.calibration = made
        return (
            f"frame budget {made['frame_budget']} (limited by {made['limited_by']}) for "
            f"{made['target_bytes'] / 1e9:.3f} GB; replay {made['measured_bytes'] / 1e9:.3f} GB, "
            f"predicted {made['predicted_bytes'] / 1e9:.3f} GB "
            f"({100 * made['prediction_error']:+.1f} %); {len(made['trials'])} trials in "
            f"{made['seconds']:.0f} s"
        )

    def calibrated_run(self) -> str:
        made, steps = self.calibration, self.size["calibrated_steps"]
        if made is None:
            raise LeftOut("the step `calibrate` has failed")
        budgets = ("frame_budget", "token_budget", "max_sequences")
        loop = ("max_steps", "checkpoint_every", "validate_every")
        run = self.train(
            "calibrated",
            *(f"data.{name}={made[name]}" for name in budgets),
            *(f"training.{name}={steps}" for name in loop),
            "training.keep=1",
        )
        lines, text = described(run, steps)
        peak = max(line["peak_memory_bytes"] for line in lines)
        text = f"{text}; {100 * (peak / made['predicted_bytes'] - 1):+.1f} % of what was predicted"
        # A process on the CPU is measured as a whole, with whatever else it has loaded.
        if not self.dry and peak > made["target_bytes"]:
            limit = f"{made['target_bytes'] / 1e9:.3f} GB"
            raise Failed(f"more than the {limit} that were given: {text}")
        if splits := sum(line["oom_splits"] for line in lines):
            raise Failed(f"{splits} micro-batches did not fit in memory: {text}")
        return text


MARK = "wrapped: "


class Step(NamedTuple):
    about: str
    do: Callable[[Training], str]
    least_s: Sequence[float]  # that must be left to start it on a GPU, and in a dry run
    needs: Sequence[str] = ()


def _steps() -> dict[str, Step]:
    steps = {}
    for name, row in SETTINGS["steps"].items():
        do = getattr(Training, row["do"])
        do = partial(do, **row["with"]) if "with" in row else do
        steps[name] = Step(row["about"], do, row["least_s"], row.get("needs", ()))
    return steps


STEPS = _steps()


def run_steps(training: Training, only: Sequence[str] | None, seconds: float) -> int:
    needed = {need for name in only or () for need in STEPS[name].needs}
    chosen = [x for x in STEPS if only is None or x in {"corpus", *only, *needed}]
    where = harness.provenance(torch.device("cpu" if training.dry else "cuda"))
    deadline = time.monotonic() + seconds
    least = [STEPS[name].least_s[training.dry] for name in chosen]
    statuses = []
    for number, name in enumerate(chosen):
        began = time.monotonic()
        remaining = deadline - began
        # Most steps leave some of what they may take to the others.
        share = 2 * least[number] / sum(least[number:])
        training.name = name
        training.limit_s = min(remaining, max(2 * least[number], share * remaining))
        try:
            if remaining < least[number]:
                raise LeftOut(f"{max(0.0, remaining):.0f} s are left, and it needs more")
            status, details = "ok", STEPS[name].do(training)
        except LeftOut as reason:
            status, details = "left out", str(reason)
        except Failed as reason:
            status, details = "failed", str(reason)
        except Exception as error:
            status, details = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
        spent = time.monotonic() - began
        row = {"step": name, "status": status, "seconds": round(spent, 2), "details": details}
        harness.append(training.output / "real_training.csv", COLUMNS, row | where)
        sys.stdout.write(f"{name:16} {status:9} {spent:6.1f} s  {details}\n")
        sys.stdout.flush()
        statuses.append(status)
    return 1 if "failed" in statuses else 0


def train_wrapped(arguments: Sequence[str]) -> int:
    """Train in one process whose model is wrapped as one of several is: by NCCL, or by gloo.

    A run with one process exchanges nothing, so that on a machine with one GPU nothing of what
    several need would run.
    """
    from effasr.cli.main import main as effasr
    from effasr.distributed.ddp import replicate
    from effasr.distributed.fsdp import shard
    from effasr.distributed.process_group import NCCL
    from effasr.training import build
    from effasr.training.strategies.parallelism import is_bfloat16

    def wrap(config: Any, model: nn.Module, context: Any) -> nn.Module:
        if config.training.strategy == "fsdp2":
            trained = copy.deepcopy(model)
            model.cpu()
            in_bfloat16 = is_bfloat16(config.training.precision, context.device)
            wrapped = shard(trained, context, torch.bfloat16 if in_bfloat16 else None)
        else:
            # Any size but one; the group decides among how many gradients are averaged.
            wrapped = replicate(model, replace(context, size=0))
        kinds = " ".join(kind.__name__ for kind in type(wrapped).__mro__)
        kind = "FSDPModule" if "FSDPModule" in kinds else type(wrapped).__name__
        sys.stdout.write(f"{MARK}{kind} by {dist.get_backend_config()}\n")
        return wrapped

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = NCCL if on_gpu else "gloo"
    dist.init_process_group(backend, **group, device_id=device if on_gpu else None)
    numbers = torch.arange(5.0, device=device)
    summed = numbers.clone()
    dist.all_reduce(summed)
    dist.broadcast(summed, src=0)
    gathered: list[object] = [None]
    dist.all_gather_object(gathered, {"rank": 0})
    if not torch.equal(summed, numbers) or gathered != [{"rank": 0}]:
        raise RuntimeError(f"collective calls gave {summed} and {gathered}")
    build.distribute = wrap
    code = effasr(["train", *arguments])
    dist.barrier()
    dist.destroy_process_group()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    about = "".join(f"    {name:16} {step.about}\n" for name, step in STEPS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("STEPS\n", f"{about}\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--output", type=Path, help="of rows and logs; a dry run makes its own")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--corpus", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP")
    parser.add_argument("--wrapped", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.wrapped:
        return train_wrapped(options.wrapped)
    if options.minutes <= 0:
        parser.error(f"--minutes must be positive, but is {options.minutes:g}")
    if options.output is None and not options.dry_run:
        parser.error("--output is needed")
    if not options.dry_run and not torch.cuda.is_available():
        sys.stderr.write("real_training: there is no GPU: use --dry-run\n")
        return 2
    output = options.output or Path(tempfile.mkdtemp(prefix="real_training_dry_run_"))
    with tempfile.TemporaryDirectory(prefix="real_training_") as work:
        corpus = None if options.corpus is None else options.corpus.resolve()
        training = Training(output.resolve(), Path(work), dry=options.dry_run, corpus=corpus)
        with gpu_processes.sigterm_as_exit():
            return run_steps(training, options.only, 60 * options.minutes)


if __name__ == "__main__":
    sys.exit(main())
