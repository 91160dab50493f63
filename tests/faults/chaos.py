"""Kills processes of a training run at random, and checks that nothing comes of it.

    python tests/faults/chaos.py [--seconds 120] [--seed 0] [--ranks 2]

torchrun trains a tiny model on the CPU twice: left alone, and while ranks and data workers are
killed (SIGKILL) at random moments and torchrun starts them again. In the end weights, moments and
metrics must be the same to the last bit; each step must have been trained on the same utterances;
and what was trained twice must be what came after a checkpoint. The exit code is 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "profiling"))
from gpu_processes import run
from real_training import differing_tensors, metrics_of
from tones import write_corpus

from effasr.training.run_dir.run_directory import read_lines

PACE_S = 0.05
EVERY = 5
SMALL = {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16, "residual_dropout": 0.1}
LOOP = {"log_every": 1, "checkpoint_every": EVERY, "ema_decay": 0.9, "device": "cpu", "threads": 1}
LOOP |= {"tensorboard": False, "timeout_s": 60.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    kills: dict[str, int]  # by kind of process
    attempts: int  # starts of the ranks by torchrun
    steps: int
    repeated: int  # steps that were made again after a restart
    faults: list[str]


def chaos(folder: Path, *, seconds: float, steps: int, seed: int, ranks: int = 2) -> Outcome:
    """Train twice in an empty folder, the second time while processes are killed."""
    write_corpus(folder, train=40)
    encoder = SMALL | {"subsampling_channels": 4}
    data = {"train": str(folder / "train.jsonl"), "tokenizer": str(folder / "tokenizer")}
    recipe = {
        "model": {"ctc": True, "encoder": encoder, "decoder": SMALL},
        "data": data | {"frame_budget": 60, "micro_batches": ranks, "workers": 1},
        "training": LOOP | {"max_steps": steps},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    _torchrun(folder, "straight", ranks)
    draw, kills = random.Random(seed), {"rank": 0, "data worker": 0}

    def kill(process: subprocess.Popen[str]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and process.poll() is None:
            # Now and then while processes begin, mostly while they train.
            if draw.random() < 0.75:
                _wait_for_a_step(folder, process, until)
            time.sleep(draw.uniform(0.0, 4.0))
            ranks_now = sorted(_children(process.pid))
            workers = sorted(child for rank in ranks_now for child in _children(rank))
            victims = [("rank", x) for x in ranks_now] + [("data worker", x) for x in workers]
            if victims:
                kind, number = draw.choice(victims)
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    kills[kind] += 1

    _torchrun(folder, "killed", ranks, kill)
    return _compare(folder, kills, steps)


def _torchrun(folder: Path, name: str, ranks: int, watch: Any = lambda process: None) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"),
        *("--monitor-interval=0.1", f"--nproc-per-node={ranks}", str(Path(__file__).resolve())),
        *("--train", str(folder / "recipe.yaml"), f"name={name}", f"output={folder}"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("a") as log:
        ended = run(command, environment=environment, echo=log.write, watch=watch)
    if ended.code:
        raise RuntimeError("\n".join(["torchrun failed:", *ended.lines[-50:]]))


def _wait_for_a_step(folder: Path, process: subprocess.Popen[str], until: float) -> None:
    before = set(folder.glob("killed.seen.*"))
    while process.poll() is None and time.monotonic() < until:
        if set(folder.glob("killed.seen.*")) - before:
            return
        time.sleep(0.05)


def _children(parent: int) -> Iterator[int]:
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, task.read_text().split())


def _compare(folder: Path, kills: dict[str, int], steps: int) -> Outcome:
    faults = []
    killed, straight = folder / "killed", folder / "straight"
    if names := differing_tensors(killed, straight, steps):
        faults.append(f"{len(names)} tensors differ: {names[:3]}")
    if metrics_of(killed) != metrics_of(straight):
        faults.append("metrics.jsonl differs")
    seen = _seen(folder, "killed")
    last: dict[int, set[str]] = {}
    for attempt in sorted(seen):
        begin = min(seen[attempt])
        if begin != 1 and (begin - 1) % EVERY:
            faults.append(f"attempt {attempt} began with step {begin}, not after a checkpoint")
        if begin > max(last, default=0) + 1:
            faults.append(f"attempt {attempt} left out steps before {begin}")
        last |= seen[attempt]
    (undisturbed,) = _seen(folder, "straight").values()
    for step, utterances in undisturbed.items():
        if last.get(step) != utterances:
            faults.append(f"step {step} was trained on {last.get(step)}, not on {utterances}")
    made = sum(map(len, seen.values()))
    return Outcome(kills, max(seen) + 1, steps, made - len(last), faults)


def _seen(folder: Path, name: str) -> dict[int, dict[int, set[str]]]:
    seen: dict[int, dict[int, set[str]]] = {}
    for file in folder.glob(f"{name}.seen.*"):
        # The last line of a process that was killed may be cut short.
        for line in read_lines(file):
            utterances = seen.setdefault(line["attempt"], {}).setdefault(line["step"], set())
            utterances |= set(line["utterances"])
    return seen


def train(arguments: list[str]) -> int:
    from effasr.cli.main import main
    from effasr.training import trainer

    train_step = trainer.train_step
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    name, output = (word.partition("=")[2] for word in arguments[1:])
    path = Path(output) / f"{name}.seen.{attempt}.{os.environ['RANK']}"

    def recorded(train_state: Any, batches: Any, step: int, **options: Any) -> Any:
        time.sleep(PACE_S)
        report = train_step(train_state, batches, step, **options)
        names = [name for batch in batches for name in batch.ids]
        line = {"attempt": attempt, "step": step + 1, "utterances": names}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return report

    trainer.train_step = recorded
    return main(["train", *arguments])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="for how long to kill")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="empty; kept, with log.txt")
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.train)
    settings = {name: getattr(options, name) for name in ("seconds", "steps", "seed", "ranks")}
    with tempfile.TemporaryDirectory() as folder:
        outcome = chaos(options.folder or Path(folder), **settings)
    killed = ", ".join(f"{count} {kind}s" for kind, count in outcome.kills.items())
    good = "the same weights, moments and metrics, to the last bit, from the same utterances"
    sys.stdout.write(
        f"killed {killed}; {outcome.attempts} attempts; {outcome.steps} steps, "
        f"{outcome.repeated} of them made again\n{'; '.join(outcome.faults) or good}\n"
    )
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())
