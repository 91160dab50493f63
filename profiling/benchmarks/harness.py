"""What all benchmarks share: rows of a table, clocks, turns of systems, processes with a limit."""

import argparse
import csv
import datetime
import hashlib
import inspect
import io
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import effasr_kernels

PROFILING = Path(__file__).parents[1]
Row = Mapping[str, Any]
VERSIONS = ("device", "torch", "triton", "git", "date")
# The checkout that the kernels are of, which PYTHONPATH may name: not always that of the script.
SOURCES = Path(effasr_kernels.__file__).parents[2]
LEFT_OUT = 3  # exit code of a benchmark that cannot run here, for a reason that it wrote


# --- tables ---------------------------------------------------------------------------------------


def append(path: Path, columns: Sequence[str], row: Row) -> None:
    """Append a row, after a header where the file is new, in one write: no row is torn."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.writeheader()
    elif (present := header(path)) != list(columns):
        difference = ", ".join(sorted(set(present) ^ set(columns))) or "their order"
        raise ValueError(
            f"{path} must have the columns of this version to be appended to, but differs in "
            f"{difference}: name another file, or move this one away."
        )
    elif not path.read_bytes().endswith(b"\n"):
        text.write("\n")  # a full disk has cut the last row, to which this one would be added
    writer.writerow({name: _cell(value) for name, value in row.items()})
    with path.open("ab") as file:
        file.write(text.getvalue().encode())


def header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def read(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a file; none where there is no file."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield {name: _original(value) for name, value in row.items()}


_FORMULA = ("=", "+", "-", "@", "\t")  # beginnings that a spreadsheet may take for a formula


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    # csv does not quote a carriage return, which ends the row for some readers.
    text = value.replace("\r", " ")
    is_formula = text.lstrip("'").startswith(_FORMULA) and not _is_number(text)
    return f"'{text}" if is_formula else text


def _original(cell: Any) -> Any:
    is_quoted = isinstance(cell, str) and cell.startswith("'")
    return cell[1:] if is_quoted and cell.lstrip("'").startswith(_FORMULA) else cell


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


class Table:
    """Rows as they come: each is shown at once, and appended to a file if there is one."""

    def __init__(self, columns: Sequence[str], output: Path | None, device: torch.device) -> None:
        self.rows: list[dict[str, Any]] = []
        self._columns, self._output = columns, output
        versions = provenance(device) if VERSIONS[0] in columns else {}
        self._common = dict.fromkeys(columns, "") | versions

    def add(self, row: Row, line: str) -> None:
        full = self._common | row
        self.rows.append(full)
        if self._output is not None:
            append(self._output, self._columns, full)
        show(line)


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """Say on stderr why something has no row."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def parser(name: str, text: str | None, *, has_rows: bool = True) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        f"bench.py {name}",
        description=inspect.cleandoc(text or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if has_rows:
        made.add_argument("--output", type=Path, help="CSV file to append rows to")
    return made


# --- provenance -----------------------------------------------------------------------------------


def provenance(device: torch.device) -> dict[str, object]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"cpu {platform.machine()}"
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    values = (name, torch.__version__, triton_version, revision(), date)
    return dict(zip(VERSIONS, values, strict=True))


def revision(root: Path = SOURCES) -> str:
    """Return the commit, with ``-dirty`` if files differ; without a repository, a fingerprint."""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--match=none"]
    try:
        head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        head = ""
    return head or f"sources-{fingerprint(root)}"


def fingerprint(root: Path = SOURCES) -> str:
    """Return 12 digits that change with any line of the trainer, the kernels and their tests."""
    digest = hashlib.sha256()
    for folder in ("csrc", "effasr", "kernels", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".py", ".cpp", ".h"} and path.is_file():
                digest.update(f"{path.relative_to(root)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# --- clocks ---------------------------------------------------------------------------------------


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    if len(times) == 1:
        return times[0], times[0], times[0]
    p20, _, _, p80 = statistics.quantiles(times, n=5, method="inclusive")
    return p20, statistics.median(times), p80


def now(device: torch.device) -> float:
    """Return the time at which the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Turn(NamedTuple):
    system: int
    number: int
    seconds: float
    peak_bytes: int | None  # most memory that a GPU held; None on a CPU


def in_turns(
    systems: Sequence[Callable[[int], object]], turns: int, device: torch.device
) -> Iterator[Turn]:
    """Yield the time of each system in each turn.

    The load of a machine changes over minutes; in turns, all systems see the same.
    """
    gpu = device.type == "cuda"
    for number in range(turns):
        for index, system in enumerate(systems):
            if gpu:
                torch.cuda.reset_peak_memory_stats(device)
            begin = now(device)
            system(number)
            seconds = now(device) - begin
            peak = torch.cuda.max_memory_allocated(device) if gpu else None
            yield Turn(index, number, seconds, peak)


def in_sequence(
    step: Callable[[int], object], steps: int, device: torch.device
) -> tuple[list[float], int | None]:
    """Return the time of each of some steps that follow each other as in training, and the peak.

    The host of a GPU goes on before a step ends, so the time is that from the end of a step to the
    end of the next; the first step has none.
    """
    if device.type != "cuda":
        return [turn.seconds for turn in in_turns([step], steps, device)][1:], None
    torch.cuda.reset_peak_memory_stats(device)
    ends = []
    for number in range(steps):
        step(number)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    torch.cuda.synchronize(device)
    seconds = [1e-3 * a.elapsed_time(b) for a, b in pairwise(ends)]
    return seconds, torch.cuda.max_memory_allocated(device)


class PartClock:
    """Adds up the time of parts of a pass; on a GPU that of the device's work, by events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self._marks.append((name, begin, self._mark()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; the device must have finished."""
        seconds: dict[str, float] = {}
        for name, begin, end in self._marks:
            on_gpu = self._device.type == "cuda"
            passed = begin.elapsed_time(end) / 1e3 if on_gpu else end - begin
            seconds[name] = seconds.get(name, 0.0) + passed
        self._marks.clear()
        return seconds

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class OutOfTime(BaseException):
    """A case took longer than it may. No `Exception`, which a compiler might swallow."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block after so long; in the main thread of a POSIX system alone.

    What waits inside C code is interrupted when it returns.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise OutOfTime(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Timing:
    p20: float  # milliseconds
    p50: float
    p80: float
    host: float  # median until the host has launched everything; on a CPU as p50
    peak_bytes: int | None  # most memory during a call beyond what was there; None on a CPU


_FLUSHED_BYTES = 256 * 2**20
_LONGEST_SLEEP_S, _SLEEP_CYCLES_PER_S = 0.02, 2e9


def measure(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    warmup: int = 3,
    seconds: float = 2.0,
    least: int = 3,
) -> Timing:
    """Time a call: warm up, then repeat it `repeats` times, or at least `least`, until time is up.

    On a GPU each repeat finds the L2 cache full of something else. The GPU first sleeps while the
    host launches, so that gaps between launches do not count: a training step runs in a CUDA graph,
    which has none. The host's own time is a separate figure.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return _measure_cpu(call, repeats, seconds, least)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    call()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    flush = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
    sleep = round(min(1.5 * host, _LONGEST_SLEEP_S) * _SLEEP_CYCLES_PER_S)
    hosts, events = [], []
    deadline = time.perf_counter() + seconds
    while len(events) < least or (len(events) < repeats and time.perf_counter() < deadline):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(sleep)
        begin = time.perf_counter()
        start.record()
        call()
        end.record()
        hosts.append(1e3 * (time.perf_counter() - begin))
        # Before the next one, so that the allocator gives the same blocks again.
        end.synchronize()
        events.append(start.elapsed_time(end))
    return Timing(*percentiles(events), statistics.median(hosts), peak)


def _measure_cpu(call: Callable[[], object], repeats: int, seconds: float, least: int) -> Timing:
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < least or (len(times) < repeats and time.perf_counter() < deadline):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    p20, p50, p80 = percentiles(times)
    return Timing(p20, p50, p80, p50, None)
