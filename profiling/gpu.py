"""Everything that needs a GPU, in order of worth: tests first, then steps, kernels, real runs.

    python profiling/gpu.py [--minutes 9] [--output DIR] [--archive DIR] [--continue-from ARCHIVE]
        [--only PART ...] [--skip PART ...] [--whisper FOLDER] [--untested]
    python profiling/gpu.py --dry-run

Needs torch, triton and this repository; what needs more, and is not installed, is left out with its
reason. The parts, each with the most seconds that it may take:

PARTS
A call ends in time, and the next one goes on with what is left: what has been done on the same
sources, device and versions (DIR/parts.jsonl, DIR/tests.jsonl) is not done again. Nothing is
measured of what uses an operation of which a test has failed, or none has passed. A part that
fails or hangs is ended with all that it has started, and stops no other; a GPU that answers no
more ends the call.

Rows are appended to DIR/*.csv as they come; logs are in DIR/logs. While a part runs and after it,
DIR/summary.md is written, and all of DIR is packed into gpu.tar.gz (at most 15 MiB) in the
folder of --archive, or in another one where that is full: a call that is killed loses little, and
--continue-from goes on from that file elsewhere. Exit code 0: all went well; 1: a part failed;
2: no GPU, or a wrong argument.

A dry run does all of it on the CPU at tiny size, in a temporary folder: it shows that the commands
work, and measures nothing.
"""

import argparse
import csv
import datetime
import importlib.util
import io
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_processes
import yaml
from gpu_tests import (
    ADAPTERS,
    GROUPS,
    MODEL,
    OPERATIONS,
    POISONED,
    ROOT,
    gpu_test_files,
    groups_in,
    read_outcomes,
)

RESULTS = ROOT / "profiling" / "results"
DATA_PACKAGES = ("lhotse", "sentencepiece", "soundfile", "soxr")
LEFT_OUT = 3  # exit code of a benchmark that can measure nothing here
HANGING_S = 150  # of a test; a process that compiles beside eleven others is slow
KEY = ("fingerprint", "device", "torch", "triton")
PROGRAMS = {
    "bench": [str(ROOT / "profiling" / "bench.py")],
    "effasr": ["-m", "effasr.cli"],
    # A bare machine lacks the plugins that some options are of.
    "pytest": [
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::UserWarning"),
    ],
}
TABLE = yaml.safe_load((ROOT / "profiling" / "gpu.yaml").read_text(encoding="utf-8"))
Row = Mapping[str, str]
Rows = Mapping[str, Sequence[Row]]
FILES = ("ops", "training", "encoder", "inference", "matmul_peak", "memory")
LESS_IS_BETTER = {"p50_ms", "step_s", "peak_bytes", "padding_frames", "padding_tokens"}
WARM = 5  # steps of a real training whose peak of memory the later ones must not exceed


@dataclass(frozen=True)
class Part:
    """A part as profiling/gpu.yaml describes it; two commands are separated by &&."""

    name: str
    seconds: float
    command: str
    dry: str = ""
    uses: Sequence[str] = ()
    needs: Sequence[str] = ()
    budget: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def load_parts() -> tuple[Part, ...]:
    parts = []
    groups = {
        group: tuple(x for name in names for x in ([name] if isinstance(name, str) else name))
        for group, names in TABLE["uses"].items()
    }
    for row in TABLE["parts"]:
        for each in row.get("each", [""]):
            fill = lambda text, each=each: text.replace("{each}", str(each))
            fields = {name: fill(x) if isinstance(x, str) else x for name, x in row.items()}
            fields.pop("each", None)
            uses = fields.pop("uses", "")
            parts.append(Part(**fields, uses=groups.get(uses, (uses,) if uses else ())))
    return tuple(parts)


PARTS = load_parts()


@dataclass(frozen=True)
class Result:
    name: str
    status: str  # ok, failed, out of time, interrupted or left out
    seconds: float = 0.0
    details: str = ""
    is_done: bool = True  # not to be run again on the same sources, device and versions

    @property
    def line(self) -> str:
        details = f": {self.details}" if self.details else ""
        return f"{self.name:28} {self.status:11} {self.seconds:6.1f} s{details}"


def missing(needs: Sequence[str]) -> str:
    lacking = []
    for need in needs:
        name, _, least = need.partition(">=")
        try:
            installed = version(name)
        except PackageNotFoundError:
            lacking.append(f"needs {need}, which is not installed")
            continue
        numbers = [
            [int(x) for x in text.split(".")[:2] if x.isdigit()] for text in (installed, least)
        ]
        if least and numbers[0] < numbers[1]:
            lacking.append(f"needs {need}, but {installed} is installed")
    return "; ".join(lacking)


def find_tool(name: str) -> str | None:
    homes = [os.environ[x] for x in ("CUDA_HOME", "CUDA_PATH") if x in os.environ]
    places = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes), "/usr/local/cuda/bin"]
    return shutil.which(name, path=os.pathsep.join(places))


def expanded(command: str) -> list[str]:
    """Return the words of a command; raises LookupError for a tool that is not there."""
    words: list[str] = []
    for word in shlex.split(command):
        if word in ("compute-sanitizer", "ncu"):
            tool = find_tool(word)
            if tool is None:
                raise LookupError(f"no {word} found")
            words.append(tool)
        elif word.endswith(".py") and "/" not in word:
            words += [sys.executable, str(ROOT / "profiling" / word)]
        else:
            words += [sys.executable, *PROGRAMS[word]] if word in PROGRAMS else [word]
    return words


class Call:
    def __init__(self, options: argparse.Namespace, output: Path) -> None:
        self.dry, self.output = options.dry_run, output
        self.archive = output if options.archive is None else options.archive.resolve()
        self.whisper = options.whisper
        # A file, as rows stay in the folder.
        self.untested, self.marker = options.untested, output / "untested.txt"
        names = {part.name for part in PARTS if part.name != "whisper" or options.whisper}
        chosen = (names & set(options.only) if options.only else names) - set(options.skip)
        has_command = lambda part: bool(part.dry if self.dry else part.command)
        self.parts = [
            part
            for part in PARTS
            if part.name in chosen and (has_command(part) or part.name == "tests")
        ]
        self.deadline = time.monotonic() + 60 * options.minutes
        self.began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.results: list[Result] = []
        self.where: dict[str, Any] = {}
        self.running = ""
        self.complaints: set[str] = set()
        self.token = gpu_processes.new_token()
        call = {gpu_processes.CALL: self.token}
        self.environment = gpu_processes.environment(dry=self.dry, **call)

    @property
    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def key(self) -> dict[str, str]:
        return {name: str(self.where.get(name, "")) for name in KEY}

    def run(self) -> int:
        watcher, code = gpu_processes.Watcher(self.token), None
        try:
            if not self._describe():
                code = 2
            else:
                self._run_parts()
        except KeyboardInterrupt as error:
            details = str(error) or "ctrl-C"
            self._record(Result(self.running or "call", "interrupted", 0, details, is_done=False))
        finally:
            watcher.close()
        self.running = ""
        place = self.save()
        say(f"\n{self.summary()}\n{self.output / 'summary.md'}\n{place or 'nothing was packed'}")
        if code is None:
            code = int(any(x.status not in ("ok", "left out") for x in self.results))
        return code

    def _describe(self) -> bool:
        """Find out where this is; what was tested elsewhere, or of other sources, is forgotten."""
        path = self.output / "environment.json"
        path.unlink(missing_ok=True)
        command = f"gpu.py --describe {shlex.quote(str(path))}{' --dry-run' * self.dry}"
        result = self._command("environment", 120, command)
        if result.status != "ok":
            self._record(replace(result, is_done=False))
            return False
        self.where = json.loads(path.read_text(encoding="utf-8"))
        key_file = self.output / "tests_key.json"
        if not key_file.exists() or json.loads(key_file.read_text(encoding="utf-8")) != self.key:
            for name in ("tests.jsonl", "tests_poisoned"):
                (self.output / name).unlink(missing_ok=True)
            key_file.write_text(json.dumps(self.key), encoding="utf-8")
        return True

    def _run_parts(self) -> None:
        done = {row["name"]: Result(**row) for row in self._earlier()}
        for part in self.parts:
            if part.name in done:
                earlier = done[part.name]
                details = f"{earlier.status} in an earlier call"
                self._record(Result(part.name, "left out", 0, details, is_done=False))
                continue
            seconds = min(part.seconds * (3 if self.dry else 1), self.remaining - 5)
            if seconds < min(20, part.seconds / 2):
                self._record(Result(part.name, "left out", 0, "no time", is_done=False))
                continue
            result = self._run(part, seconds)
            if result.status == "out of time" and seconds < part.seconds:
                result = replace(result, is_done=False)
            self._record(result)
            self._set_aside()
            if result.status in ("failed", "out of time") and not self.dry:
                path = shlex.quote(str(self.output / "environment_again.json"))
                again = self._command("environment again", 60, f"gpu.py --describe {path}")
                if again.status != "ok":
                    self._record(Result("GPU", "failed", 0, "it answers no more", is_done=False))
                    return

    def _earlier(self) -> list[dict[str, Any]]:
        path = self.output / "parts.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = []
        for text in lines:
            with suppress(ValueError):  # the last one, of a call that was killed while it wrote
                row = json.loads(text)
                if row.pop("key") == self.key and row["is_done"]:
                    rows.append(row)
        return rows

    def _run(self, part: Part, seconds: float) -> Result:
        if reason := missing(part.needs):
            return Result(part.name, "left out", 0, reason, is_done=False)
        if part.name == "tests":
            return self._run_tests(seconds)
        groups = groups_in(read_outcomes(self.output / "tests.jsonl"))
        objections = {x: groups[x].objection for x in part.uses if groups[x].objection}
        details = ""
        if objections:
            first, *more_groups = objections
            more = f"; likewise {', '.join(more_groups)}" if more_groups else ""
            details = f"{first}: {objections[first]}{more}"
            if not self.untested:
                details = f"not measured: {details}"
                return Result(part.name, "left out", 0, details, is_done=False)
            write(self.marker, b"rows of this folder are not to be published\n")
        began = time.monotonic()
        result = Result(part.name, "ok")
        for command in (part.dry if self.dry else part.command).split("&&"):
            remaining = began + seconds - time.monotonic()
            folders = {"out": self.output, "whisper": self.whisper}
            command = command.format(**{k: shlex.quote(str(x)) for k, x in folders.items()})
            if part.budget:
                # Enough before the end for what it measures last to be written.
                told = max(5.0, remaining - 10)
                minutes = part.budget == "--minutes"
                command += (
                    f" {part.budget} {told / 60:.2f}" if minutes else f" --budget-s {told:.0f}"
                )
            result = self._command(part.name, remaining, command, part.variables)
            if result.status != "ok":
                break
        if details:
            told = "; ".join(filter(None, [result.details, f"not to be published: {details}"]))
            result = replace(result, details=told, is_done=False)
        return replace(result, seconds=round(time.monotonic() - began, 1))

    def _command(
        self, name: str, seconds: float, command: str, variables: Mapping[str, str] | None = None
    ) -> Result:
        self.running = name
        path = self.output / "logs" / f"{name.replace(' ', '_').replace('/', '_')}.log"
        try:
            words = expanded(command)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", buffering=1) as log:
                log.write(f"$ {' '.join(words)}\n")
                ended = gpu_processes.run(
                    words,
                    seconds=seconds,
                    environment={**self.environment, **(variables or {})},
                    directory=ROOT,
                    echo=log.write,
                    tick=self.save,
                )
        except LookupError as error:
            return Result(name, "left out", 0, str(error), is_done=False)
        except OSError as error:
            return Result(name, "failed", 0, str(error))
        self.running = ""
        code, spent, lines = ended.code, round(ended.seconds, 1), ended.lines
        if code == 0:
            return Result(name, "ok", spent)
        if code == LEFT_OUT:
            return Result(name, "left out", spent, "".join(lines[-1:]), is_done=False)
        for line in lines[-12:]:
            say(f"    {line}")
        status = "out of time" if code is None else "failed"
        details = "rows until then are kept" if code is None else f"exit code {code}"
        return Result(name, status, spent, f"{details}; {path.relative_to(self.output)}")

    def _run_tests(self, seconds: float) -> Result:
        """Run the tests of what the parts use and no call has tested; green where none failed."""
        used = [x for part in self.parts for x in part.uses]
        # A whole model first: time may run out, and steps rest on its tests.
        groups = dict.fromkeys([MODEL, *used, *GROUPS] if not self.dry else used)
        end, outcomes = time.monotonic() + seconds, self.output / "tests.jsonl"
        groups_so_far = groups_in(read_outcomes(outcomes))
        lacking = [name for name in groups if groups_so_far[name].is_lacking]
        files_of = {"outcomes": "tests.jsonl", "done": "tests_done", "poisoned": "tests_poisoned"}
        command = "pytest -p gpu_tests"
        for name, file in files_of.items():
            command += f" --{name} {shlex.quote(str(self.output / file))}"
        if self.dry:
            files = {x: f"tests/ops/test_{x}.py" for x in OPERATIONS} | TABLE["references_of"]
            existing = [files[name] for name in lacking if (ROOT / files.get(name, "-")).exists()]
            paths = list(dict.fromkeys(existing))
            paths += ["tests/ops/test_contract.py"] * bool(set(lacking) & set(OPERATIONS))
            command += f" -m 'not gpu' -k '{TABLE['references']}'"
        else:
            absent, files = bool(missing(DATA_PACKAGES)), gpu_test_files(lacking)
            paths = [str(x) for x in files if not (absent and x.parent.name == "data")]
            command += " -m gpu --continue-on-collection-errors --durations=10" + _parallel()
        if not paths:
            return Result("tests", "ok", 0, "an earlier call has run them", is_done=False)
        began, result = time.monotonic(), Result("tests", "failed")
        for _ in range(20):  # without xdist a poisoned process is replaced here
            done = [name for name, outcome in read_outcomes(outcomes).items() if outcome]
            (self.output / "tests_done").write_text(json.dumps(done), encoding="utf-8")
            result = self._command("tests", end - time.monotonic(), f"{command} {' '.join(paths)}")
            if f"exit code {POISONED};" not in result.details or end - time.monotonic() < 5:
                break
        if result.details.startswith("exit code 5;"):  # no test is left
            result = Result("tests", "ok")
        # What is done of them is in tests.jsonl.
        return replace(result, seconds=round(time.monotonic() - began, 1), is_done=False)

    def _set_aside(self) -> None:
        """Move rows of other projects' attention whose own tests are not green to unproven.csv."""
        path = self.output / "ops.csv"
        groups = groups_in(read_outcomes(self.output / "tests.jsonl"))
        unproven = {backend for group, backend in ADAPTERS.items() if groups[group].objection}
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        moved = [x for x in lines if x.startswith("attention,") and x.split(",")[2] in unproven]
        if moved:
            with (self.output / "unproven.csv").open("a", encoding="utf-8") as file:
                file.writelines(moved)
            write(path, "".join(x for x in lines if x not in moved).encode())

    def _record(self, result: Result) -> None:
        self.results.append(result)
        say(result.line)
        with suppress(OSError), (self.output / "parts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**vars(result), "key": self.key}) + "\n")
        self.save()

    def summary(self) -> str:
        names = ("torch", "triton", "git", "date")
        where = ", ".join(f"{name} {self.where[name]}" for name in names if name in self.where)
        title = "# GPU" + (", dry run: no figure below is one of a GPU" if self.dry else "")
        if self.marker.exists():
            title += ", with --untested: rows of what tests object to are not to be published"
        lines = [title, "", f"{self.where.get('device', 'unknown device')}, {where}", ""]
        lines += [f"running: {self.running}", ""] if self.running else []
        cells = [(x.name, x.status, f"{x.seconds:.0f}", x.details) for x in self.results]
        lines += table(("part", "how it went", "s", ""), cells)
        rows = read_rows(self.output)
        lines += table(("what", "target", "measured", "verdict"), target_lines(rows, dry=self.dry))
        variants = variant_lines(rows, dry=self.dry)
        lines += table(("a GPU decides", "field", "of", "measured", "decides"), variants)
        useful = "tflops_useful"
        steps = [
            (x["model"], x["mode"], x["system"], f"{1e3 * float(x['step_s']):.1f}", x[useful])
            for x in rows["training"]
            if x["step_s"]
        ]
        lines += table(("model", "mode", "system", "ms a step", "useful TFLOP/s"), steps)
        groups = groups_in(read_outcomes(self.output / "tests.jsonl"))
        lines += table(("tests of", "outcome"), [(name, x.text) for name, x in groups.items()])
        return "\n".join(lines)

    def save(self) -> Path | None:
        try:
            text = self.summary()
        except (KeyError, ValueError) as error:
            text = f"rows cannot be summed up: {type(error).__name__}: {error}\n"
        with suppress(OSError):
            write(self.output / "summary.md", text.encode())
        data = packed(self.output)
        for folder in dict.fromkeys([self.archive, self.output, Path(tempfile.gettempdir())]):
            try:
                return write(folder / "gpu.tar.gz", data)
            except OSError as error:
                if str(folder) not in self.complaints:
                    self.complaints.add(str(folder))
                    say(f"{folder} takes no archive: {error.strerror or error}")
        return None


# Figures to reach, as gpu.yaml lists them.


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """Return the whole rows of the tables; a process may have been killed while it wrote one."""
    rows: dict[str, list[Row]] = {name: [] for name in FILES}
    for name in FILES:
        path = folder / f"{name}.csv"
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                whole = lambda row: None not in row and None not in row.values()
                rows[name] = [row for row in csv.DictReader(file) if whole(row)]
    metrics = folder / "real_training" / "runs" / "quiet_metrics.jsonl"
    if metrics.exists():
        lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        names = ("step", "peak_memory_bytes")
        rows["memory"] = [{name: str(line[name]) for name in names} for line in lines]
    return rows


def _matches(row: Row, field: str, wanted: str | list[str]) -> bool:
    options = [wanted] if isinstance(wanted, str) else wanted
    if field == "shape":
        return any(set(words.split()) <= set(row["shape"].split()) for words in options)
    return row[field] in options


def _best(rows: Rows, target: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[tuple, float]:
    """Return the best figure of the chosen rows for each key."""
    fields = dict(chosen)
    table, column = fields.pop("table"), fields.pop("column", target["column"])
    better = min if column in LESS_IS_BETTER else max
    best: dict[tuple, float] = {}
    for row in rows[table]:
        if row[column] and all(_matches(row, *field) for field in fields.items()):
            if (per := target.get("per")) and not row[per]:
                continue
            value = float(row[column]) / (float(row[per]) if per else 1.0)
            # The figures that ours are compared with may be the same for all keys.
            key = tuple(row[name] for name in target.get("key", ()) if name in row)
            best[key] = better(best.get(key, value), value)
    return best


def measure(rows: Rows, target: Mapping[str, Any]) -> float | None:
    figures = _best(rows, target, target["ours"])
    at_most = "at_most" in target
    if "against" in target:
        others = _best(rows, target, target["against"])
        pairs = {key: (x, others.get(key, others.get(()))) for key, x in figures.items()}
        # How many times as fast: of times the others' by ours.
        by_others = at_most or target["column"] not in LESS_IS_BETTER
        figures = {key: x / y if by_others else y / x for key, (x, y) in pairs.items() if x and y}
    worst = max if at_most else min
    return worst((x * target.get("scale", 1) for x in figures.values()), default=None)


def _growth(memory: Sequence[Row]) -> list[Row]:
    peaks = [int(row["peak_memory_bytes"]) for row in memory]
    grown = max(peaks[WARM:], default=0) - max(peaks[:WARM], default=0)
    return [{"growth": str(grown)}] if len(peaks) > WARM else []


def target_lines(rows: Rows, *, dry: bool) -> list[tuple[str, str, str, str]]:
    rows = {**rows, "memory": _growth(rows["memory"])}
    lines = []
    for target in TABLE["targets"]:
        value, unit = measure(rows, target), f" {target['unit']}".rstrip()
        at_most = "at_most" in target
        bound = target["at_most"] if at_most else target["at_least"]
        measured = "-" if value is None else f"{value:.3g}{unit}"
        verdict = "not measured" if value is None else "dry run"
        if value is not None and not dry:
            verdict = "met" if (value <= bound if at_most else value >= bound) else "missed"
        lines.append(
            (target["what"], f"{'<=' if at_most else '>='} {bound:g}{unit}", measured, verdict)
        )
    return lines


def variant_lines(rows: Rows, *, dry: bool) -> list[tuple[str, ...]]:
    """Return the choices of each variant with the least time of its rows, for each of its keys."""
    lines = []
    for variant in TABLE["variants"]:
        figures = {name: _best(rows, variant, x) for name, x in variant["choices"].items()}
        for key in dict.fromkeys(key for best in figures.values() for key in best) or [()]:
            times = {name: best[key] for name, best in figures.items() if key in best}
            texts = (f"{name} {times[name]:.3g}" if name in times else name for name in figures)
            fastest = min(times, key=lambda name: times[name]) if len(times) > 1 else "not measured"
            verdict = "dry run" if dry and times else fastest
            lines.append(
                (variant["what"], variant["field"], " ".join(key), ", ".join(texts), verdict)
            )
    return lines


def _parallel() -> str:
    """Return options for several processes, since compilation takes most of the time."""
    options = ""
    if importlib.util.find_spec("xdist") is not None:
        count = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
        # In small portions, so that what is first in the order is also run first.
        options += f" -n {count} --dist load --max-worker-restart 200"
    if importlib.util.find_spec("pytest_timeout") is not None:
        options += f" --timeout={HANGING_S} --timeout-method=thread"
    return options


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Markdown that is aligned, so that it can be read on a screen, too."""
    widths = [max(len(line[n]) for line in [titles, *lines]) for n in range(len(titles))]
    texts = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in [titles, *lines]]
    return [texts[0], "|" + "|".join(["---"] * len(titles)) + "|", *texts[1:], ""] if lines else []


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write(path: Path, data: bytes) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        return partial.replace(path)
    except OSError:
        with suppress(OSError):  # it takes the space that others need
            partial.unlink(missing_ok=True)
        raise


ORDER = (".md", ".csv", ".json", ".jsonl", ".log", ".html")
MOST_BYTES = 15 * 2**20  # a little below what machines of this kind let through
_sizes: dict[tuple[str, int, int], int] = {}


def packed(folder: Path, most: int = MOST_BYTES) -> bytes:
    """Return an archive of a folder, small results first; what is too large is named in it."""

    def order(path: Path) -> tuple[int, int, str]:
        kind = ORDER.index(path.suffix) if path.suffix in ORDER else len(ORDER)
        return kind, path.stat().st_size if path.exists() else 0, str(path)

    buffer, used, omitted = io.BytesIO(), 0, []
    paths = [x for x in folder.rglob("*") if not x.name.startswith(".") and x.suffix != ".gz"]
    paths += folder.glob("profile/**/*.json.gz")
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for path in sorted((path for path in paths if path.is_file()), key=order):
            try:
                # Commands are at work there: files grow and go.
                data, status = path.read_bytes(), path.stat()
            except OSError:
                continue
            key = str(path), len(data), status.st_mtime_ns
            if key not in _sizes:
                _sizes[key] = len(zlib.compress(data, 6)) + 1024
            if used + _sizes[key] > most:
                omitted.append(f"{path.relative_to(folder)}: {len(data)} bytes\n")
                continue
            used += _sizes[key]
            _add(archive, str(path.relative_to(folder)), data)
        if omitted:
            _add(archive, "left_out.txt", "".join(omitted).encode())
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(data), int(time.time())
    archive.addfile(entry, io.BytesIO(data))


def describe(path: Path, *, dry: bool) -> int:
    import torch
    from benchmarks.harness import fingerprint, provenance

    if not dry and not torch.cuda.is_available():
        say("gpu: needs an NVIDIA GPU, and torch sees none.")
        return 2
    device = torch.device("cpu" if dry else "cuda")
    facts = provenance(device) | {"fingerprint": fingerprint(), "python": platform.python_version()}
    facts |= {"system": platform.platform(), "cuda": torch.version.cuda or ""}
    if not dry:
        torch.ones(1, device=device).add_(1).item()
        facts["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        queries = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        with suppress(OSError, subprocess.TimeoutExpired):
            command = ["nvidia-smi", f"--query-gpu={queries}", "--format=csv"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
            facts["smi"] = done.stdout.strip()
    write(path, json.dumps(facts, indent=1).encode())
    say(f"{facts['device']}, torch {facts['torch']}, {facts['git']}")
    return 0


def matmul_peak(path: Path, *, dry: bool) -> int:
    """Measure what products of large matrices reach, which steps are compared with."""
    import torch
    from benchmarks.harness import append, measure, provenance

    device = torch.device("cpu" if dry else "cuda")
    for size in (64,) if dry else (4096, 8192):
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        timing = measure(lambda a=a: a @ a, device, repeats=50, seconds=5.0)
        row = {"size": size, "p50_ms": round(timing.p50, 4)}
        row |= {"tflop_per_s": round(2e-9 * size**3 / timing.p50, 3), **provenance(device)}
        append(path, list(row), row)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    about = "\n".join(f"    {part.name:24} {part.seconds:4.0f} s" for part in PARTS)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("PARTS", f"{about}\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, help="of this call (default: 9)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART")
    parser.add_argument("--skip", nargs="+", choices=names, metavar="PART", default=[])
    parser.add_argument("--output", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--archive", type=Path, metavar="DIR", help="default: that of --output")
    parser.add_argument("--continue-from", type=Path, metavar="ARCHIVE", help="unpacked first")
    parser.add_argument("--whisper", type=Path, metavar="FOLDER", help="weights, and test.jsonl")
    text = "measure also what tests object to; rows of it are not to be published"
    parser.add_argument("--untested", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--describe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--matmul-peak", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.describe or options.matmul_peak:
        do = describe if options.describe else matmul_peak
        return do(options.describe or options.matmul_peak, dry=options.dry_run)
    options.minutes = options.minutes or (30.0 if options.dry_run else 9.0)
    output = options.output or (tempfile.mkdtemp(prefix="gpu_dry_") if options.dry_run else RESULTS)
    output = Path(output).resolve()
    if options.dry_run and (output == RESULTS or RESULTS in output.parents):
        parser.error(f"--output of a dry run must not be {RESULTS.relative_to(ROOT)}")
    output.mkdir(parents=True, exist_ok=True)
    if options.continue_from is not None:
        try:
            with tarfile.open(options.continue_from) as archive:
                # Python before 3.11.4 has no filters.
                has_filters = hasattr(tarfile, "data_filter")
                archive.extractall(output, **({"filter": "data"} if has_filters else {}))
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            reason = f"{options.continue_from} cannot be unpacked: {error}"
            parser.error(f"--continue-from must name the archive of an earlier call, but {reason}")

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # there is no time for a second one
        raise KeyboardInterrupt(signal.Signals(number).name)

    # Under nohup, SIGHUP stays ignored.
    signals = [x for x in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(x) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        return Call(options, output).run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
