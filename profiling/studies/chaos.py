"""Kills processes of a training run at random, and checks that nothing comes of it.

    python profiling/studies/chaos.py [--seconds 120] [--seed 0] [--ranks 2]

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from real_run import compare
from straggler.corpus import write_corpus

from effasr import config as configuration
from effasr.data.config import DataConfig
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.run_dir.run_directory import read_lines

_PACE_S = 0.05
_EVERY = 5
_GOOD = "the same weights, moments and metrics, to the last bit, from the same utterances"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run with faults.

    Attributes:
        kills: Processes killed, by kind.
        attempts: Number of times that torchrun started the ranks.
        steps: Steps of the run.
        repeated: Steps that were repeated after a restart.
        faults: Violated expectations; empty if there are none.
    """

    kills: dict[str, int]
    attempts: int
    steps: int
    repeated: int
    faults: list[str]


def chaos(folder: Path, *, seconds: float, steps: int, seed: int, ranks: int = 2) -> Outcome:
    """Train twice, once while processes are killed.

    Args:
        folder: Empty folder for data and runs.
        seconds: Duration of the killing, in seconds.
        steps: Steps of a run.
        seed: Seed of the choice of processes and times.
        ranks: Number of training processes.
    """
    write_corpus(folder, utterances=40, held_out=0)
    with _torchrun(folder, "straight", steps, ranks) as process:
        _finished(process, folder)
    draw, kills = random.Random(seed), {"rank": 0, "data worker": 0}
    with _torchrun(folder, "killed", steps, ranks) as process:
        until = time.monotonic() + seconds
        while time.monotonic() < until and process.poll() is None:
            # Now and then while processes begin, mostly while they train.
            if draw.random() < 0.75:
                _wait_for_a_step(folder, process, until)
            time.sleep(draw.uniform(0.0, 4.0))
            if victim := _victim(process.pid, draw):
                kind, identity = victim
                kills[kind] += _kill(identity)
        _finished(process, folder)
    return _compare(folder, kills, steps)


def _wait_for_a_step(folder: Path, process: subprocess.Popen[bytes], until: float) -> None:
    """Wait until the ranks that train now have made one."""
    files = set(folder.glob("killed.seen.*"))
    while process.poll() is None and time.monotonic() < until:
        if not files >= set(folder.glob("killed.seen.*")):
            return
        time.sleep(0.05)


def _config(folder: Path, name: str, steps: int, ranks: int) -> TrainConfig:
    width: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16}
    return TrainConfig(
        name=name,
        output=str(folder),
        model=ModelConfig(
            encoder=FastConformerConfig(subsampling_channels=4, residual_dropout=0.1, **width),
            decoder=DecoderConfig(residual_dropout=0.1, **width),
            ctc=True,
        ),
        data=DataConfig(
            train=str(folder / "train.jsonl"),
            tokenizer=str(folder / "tokenizer"),
            frame_budget=60,
            micro_batches=ranks,
            workers=1,
        ),
        training=LoopConfig(
            max_steps=steps,
            log_every=1,
            checkpoint_every=_EVERY,
            ema_decay=0.9,
            device="cpu",
            tensorboard=False,
            timeout_s=60.0,
            threads=1,
        ),
    )


class _torchrun:
    """A run under torchrun, which does not outlive the block."""

    def __init__(self, folder: Path, name: str, steps: int, ranks: int) -> None:
        recipe = folder / f"{name}.yaml"
        recipe.write_text(configuration.dump(_config(folder, name, steps, ranks)))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000",
            "--monitor-interval=0.1", f"--nproc-per-node={ranks}", str(Path(__file__).resolve()),
            "--train", str(recipe), "--seen", str(folder / f"{name}.seen"),
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # torchrun ends its processes on this one.
            self.process.terminate()
            self.process.wait()


def _finished(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait():
        raise RuntimeError(f"torchrun failed:\n{(folder / 'log.txt').read_text()[-4000:]}")


def _victim(agent: int, draw: random.Random) -> tuple[str, int] | None:
    """Return a rank, or a data worker, which is a child of a rank."""
    ranks = sorted(_children(agent))
    workers = sorted(child for rank in ranks for child in _children(rank))
    everyone = [("rank", rank) for rank in ranks] + [("data worker", one) for one in workers]
    return draw.choice(everyone) if everyone else None


def _children(parent: int) -> Iterator[int]:
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            yield from map(int, task.read_text().split())
        except OSError:
            continue


def _kill(process: int) -> bool:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _compare(folder: Path, kills: dict[str, int], steps: int) -> Outcome:
    faults = []
    killed, straight = folder / "killed", folder / "straight"
    if differing := compare.differing(killed, straight, steps):
        faults.append(f"{len(differing)} tensors differ: {differing[:3]}")
    if compare.metrics(killed) != compare.metrics(straight):
        faults.append("metrics.jsonl differs")
    seen, expected = (_seen(folder / f"{name}.seen") for name in ("killed", "straight"))
    last: dict[int, set[str]] = {}
    for attempt in sorted(seen):
        begin = min(seen[attempt])
        if begin != 1 and (begin - 1) % _EVERY:
            faults.append(f"attempt {attempt} began with step {begin}, not after a checkpoint")
        if begin > max(last, default=0) + 1:
            faults.append(f"attempt {attempt} left out steps before {begin}")
        last |= seen[attempt]
    (undisturbed,) = expected.values()
    for step, utterances in undisturbed.items():
        if last.get(step) != utterances:
            faults.append(f"step {step} was trained on {last.get(step)}, not on {utterances}")
    made = sum(map(len, seen.values()))
    return Outcome(kills, max(seen) + 1, steps, made - len(last), faults)


def _seen(path: Path) -> dict[int, dict[int, set[str]]]:
    """Return the trained utterances by attempt and step."""
    found: dict[int, dict[int, set[str]]] = {}
    for file in path.parent.glob(f"{path.name}.*"):
        # The last line of a process that was killed may be cut short.
        for line in read_lines(file):
            utterances = found.setdefault(line["attempt"], {}).setdefault(line["step"], set())
            utterances |= set(line["utterances"])
    return found


def _train(recipe: str, seen: str) -> int:
    """Run one rank: train, and record the utterances."""
    from effasr.cli.main import main
    from effasr.training import trainer

    train_step = trainer.train_step
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    path = Path(f"{seen}.{attempt}.{os.environ['RANK']}")

    def noted(train_state: Any, batches: Any, step: int, **options: Any) -> Any:
        time.sleep(_PACE_S)
        report = train_step(train_state, batches, step, **options)
        names = [name for batch in batches for name in batch.ids]
        with path.open("a") as file:
            line = {"attempt": attempt, "step": step + 1, "utterances": names}
            file.write(json.dumps(line) + "\n")
        return report

    trainer.train_step = noted
    return main(["train", recipe])


def main() -> int:
    """Run from a shell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="for how long to kill")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="empty; kept, with log.txt")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--seen", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return _train(options.train, options.seen)
    with tempfile.TemporaryDirectory() as folder:
        outcome = chaos(
            options.folder or Path(folder),
            seconds=options.seconds,
            steps=options.steps,
            seed=options.seed,
            ranks=options.ranks,
        )
    killed = ", ".join(f"{count} {kind}s" for kind, count in outcome.kills.items())
    sys.stdout.write(
        f"killed {killed}; {outcome.attempts} attempts; {outcome.steps} steps, "
        f"{outcome.repeated} of them made again\n{'; '.join(outcome.faults) or _GOOD}\n"
    )
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())
