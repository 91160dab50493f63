"""One trial: a few training steps in a separate process, which may run out of memory.

``python -m effasr.training.calibration.trial PARENT`` reads a pickled request from standard input
and writes the measurement to standard output, as JSON. It ends with the process of id PARENT.
"""

import json
import math
import os
import pickle
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from effasr import config as configuration
from effasr.data.worker_processes import signal_at_death_of_parent
from effasr.distributed.process_group import DistributedContext
from effasr.training import build
from effasr.training.calibration.workload import Workload, batch_of, text_batch_of
from effasr.training.config import TrainConfig
from effasr.training.fault_tolerance.oom_recovery import Failure, OutOfMemory, attempt
from effasr.training.step import TrainState, train_step
from effasr_kernels import allow_reference_on_gpu


@dataclass(frozen=True, slots=True)
class Request:
    config: Mapping[str, Any]  # Resolved configuration, as a mapping
    vocab_size: int  # Vocabulary of the tokenizer
    device: str  # Device, such as ``cuda:0``
    limit_bytes: int  # Largest memory of the process, or of everything on the GPU
    # Micro-batches of a step: with two, the gradients of the first are held during the second
    micro_batches: int
    workload: Workload  # The batches
    # Steps before the timed ones, which allocate moments and choose algorithms
    warmup: int = 1
    most_s: float = math.inf  # Time after which no further step is timed but the second


@dataclass(frozen=True, slots=True)
class Measurement:
    fits: bool  # Whether there was enough memory
    peak_bytes: int = 0  # Peak memory, as ``limit_bytes`` counts it; 0 if it did not fit
    # Shortest time of a micro-batch, its share of the update included; 0 if it did not fit
    seconds: float = 0.0
    audio_seconds: float = 0.0  # Mean duration of a timed micro-batch
    # Useful audio seconds per second of each timed step
    speeds: tuple[float, ...] = ()
    reason: str = ""  # Why it did not fit
    # Shortest time of a text-only micro-batch, as ``seconds``; 0 without such
    text_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Useful audio seconds per second."""
        return self.audio_seconds / self.seconds if self.seconds else 0.0


def main() -> int:
    signal_at_death_of_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this trial has ended")
    request: Request = pickle.load(sys.stdin.buffer)
    # Libraries may write to standard output, which is reserved for the result.
    out = os.dup(1)
    os.dup2(2, 1)
    result = attempt(lambda: run(request))
    if isinstance(result, Failure):
        result = Measurement(fits=False, reason=result.reason)
    os.write(out, (json.dumps(asdict(result)) + "\n").encode())
    return 0


def run(request: Request) -> Measurement:
    device = torch.device(request.device)
    config = configuration.from_mapping(TrainConfig, request.config)
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    allow_reference_on_gpu()
    _limit(device, request.limit_bytes)
    model = build.build_model(config, request.vocab_size, None, device)
    train_state = build.build_train_state(config, model, DistributedContext(0, 1, device))
    work = request.workload
    seconds, audio = [], []
    warmup = [work.timed[n % len(work.timed)] for n in range(request.warmup)]
    for step, lengths in enumerate([*warmup, *work.timed, work.extreme]):
        is_timed = 0 <= step - request.warmup < len(work.timed)
        if is_timed and len(seconds) > 1 and sum(seconds) * request.micro_batches > request.most_s:
            continue
        batch = batch_of(lengths, work.shape, request.vocab_size, step, work.clips)
        batches = [batch] * request.micro_batches
        used = _timed_step(train_state, batches, step, device)
        if is_timed:
            seconds.append(used / len(batches))
            audio.append(batch.audio_seconds)
    text_seconds = 0.0
    if work.text is not None:
        batches = [text_batch_of(work.text, request.vocab_size)] * request.micro_batches
        used = (_timed_step(train_state, batches, step, device) for step in range(2))
        text_seconds = min(used) / len(batches)
    return Measurement(
        fits=True,
        text_seconds=text_seconds,
        peak_bytes=_peak(device),
        seconds=min(seconds),
        audio_seconds=statistics.mean(audio),
        speeds=tuple(length / used for length, used in zip(audio, seconds, strict=True)),
    )


def _timed_step(train_state: TrainState, batches: list, step: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    splits = train_step(train_state, batches, step).read()["splits"]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if splits:
        raise OutOfMemory("a micro-batch had to be split")
    return time.perf_counter() - started


def _limit(device: torch.device, limit: int) -> None:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        other_items = total - free
        share = max(min((limit - other_items) / total, 1.0), 1e-6)
        torch.cuda.set_per_process_memory_fraction(share, device)
        return
    # The kernel limits the address space that a process has requested, used or not, except mapped
    # libraries: the limit is set to the present size plus the growth that is allowed.
    size = max(_status("VmData") + limit - _status("VmRSS"), 1)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


def _peak(device: torch.device) -> int:
    """Return the peak bytes, on a GPU those of all its processes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + outside
    # Of this process alone, where Linux reports it; elsewhere it may be inherited from the parent.
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int:
    """Return the bytes of a line of /proc/self/status; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


# Runs trials in processes of their own.

_COMMAND = [sys.executable, "-m", "effasr.training.calibration.trial"]

_OF_THE_RUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would make a trial consider itself a rank of the run that started it."""

_KILLED = {-signal.SIGKILL: "the system killed it", -signal.SIGABRT: "it aborted"}
_SIGNS_OF_ABORT = ("bad_alloc", "out of memory", "Cannot allocate memory", "MemoryError")


class TrialFailed(RuntimeError):
    """A trial failed for another reason than a lack of memory."""


def measure(
    request: Request,
    *,
    timeout_s: float = 1800.0,
    alive: Callable[[], None] = lambda: None,
    every_s: float = 10.0,
) -> Measurement:
    """Run a trial and wait for it."""
    process = subprocess.Popen(
        [*_COMMAND, str(os.getpid())],
        env=_environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A new session, so that signals of the terminal reach this process only, which ends the
        # trial.
        start_new_session=True,
    )
    with process:
        try:
            output = _finish(process, request, time.monotonic() + timeout_s, alive, every_s)
        except subprocess.TimeoutExpired:
            raise TrialFailed(
                f"a trial of {request.workload.shape.frame_budget} frames took more than "
                f"{timeout_s:.0f} s, and was stopped."
            ) from None
        finally:
            process.kill()
    return _result(process.returncode, *(text.decode(errors="replace") for text in output))


def _finish(
    process: subprocess.Popen[bytes],
    request: Request,
    deadline: float,
    alive: Callable[[], None],
    every_s: float,
) -> tuple[bytes, bytes]:
    text: bytes | None = pickle.dumps(request)
    while True:
        try:
            return process.communicate(text, timeout=every_s)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise
        # The next call continues with unwritten input and unread output.
        text = None
        alive()


def _result(code: int, out: str, error: str) -> Measurement:
    if code == 0:
        return Measurement(**json.loads(out.splitlines()[-1]))
    if code == -signal.SIGKILL or any(sign in error for sign in _SIGNS_OF_ABORT):
        return Measurement(fits=False, reason=_KILLED.get(code, f"it ended with {code}"))
    lines = [line for line in error.splitlines() if line.strip()]
    last = lines[-1] if lines else "it wrote nothing"
    raise TrialFailed(f"a trial ended with {code}: {last}")


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a rank, and with this import path."""
    selected = {
        name: value
        for name, value in own.items()
        if name not in _OF_THE_RUN and not name.startswith("TORCHELASTIC_")
    }
    return selected | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


if __name__ == "__main__":
    sys.exit(main())
