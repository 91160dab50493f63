"""Feeds every reader with mutated inputs, and counts what becomes of them.

    python -m tests.security.fuzz 1000 [READER ...]

Each input is read in a child process, which has limits of memory and of time for each, and is
started again when it dies. An input must be read, or be refused with an error that the command line
shows as one line; a crash, a hang, another error, too much memory, or another file in its folder or
beside it is a failure.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.security.mutations import OUTSIDE, mutate
from tests.security.readers import READERS

INPUT_SECONDS, START_SECONDS = 20.0, 240.0
"""Of processor time; what waits for something else ends after `_WAITING` times as long."""
_WAITING = 15
SECRET = "a text that no reader may change"


@dataclass
class Count:
    """What became of the inputs of a reader; failures have the number of the input."""

    tried: int = 0
    refused: int = 0
    read: int = 0
    seconds: float = 0.0
    honest_bytes: int = 0
    most_bytes: int = 0
    failures: list[str] = field(default_factory=list)


class Worker:
    """The process that reads; see `tests.security.worker`."""

    def __init__(self, log):
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request):
        """Return an outcome, its detail, and the growth of resident memory in bytes.

        Ends the process where it does not answer in time.
        """
        fresh = self._process is None
        if self._process is None:
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.security.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
                )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        limit = START_SECONDS if fresh or request.get("make") else INPUT_SECONDS
        if _is_ready(process, limit):
            line = process.stdout.readline()
            if line:
                outcome, detail, grown = json.loads(line)
                # The first input takes what is imported and kept.
                return outcome, detail, 0 if fresh and not request.get("make") else grown
            # Its output has ended, and so will it.
            process.wait(10)
        self.close()
        reason = "hung" if process.returncode == -9 else f"died with {process.returncode}"
        return "failed", reason, 0

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def _is_ready(process, seconds):
    """Wait for an answer; return whether it comes before the limit of processor time."""
    begun, used = time.monotonic(), _processor_seconds(process.pid)
    while not select.select([process.stdout], [], [], 1.0)[0]:
        waited = time.monotonic() - begun
        if waited < seconds:
            continue
        if waited > _WAITING * seconds or _processor_seconds(process.pid) - used > seconds:
            return False
    return True


def _processor_seconds(parent):
    """Return the processor time of a process and of its children."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, remainder = path.read_text().rpartition(")")
        except OSError:
            # It has ended meanwhile.
            continue
        fields = remainder.split()
        if parent in (int(name.split()[0]), int(fields[1])):
            # Its own, and those of children that have ended.
            ticks += sum(
                map(int, fields[11:15] if name.startswith(f"{parent} ") else fields[11:13])
            )
    return ticks / os.sysconf("SC_CLK_TCK")


def fuzz(names, inputs, root):
    """Try so many inputs of each reader; its name and a number make an input."""
    worker = Worker(root / "log")
    try:
        for name in names:
            yield name, _fuzz_one(worker, name, READERS[name], range(inputs), root / name)
    finally:
        worker.close()


def _fuzz_one(worker, name, reader, numbers, root):
    seed, outside, case = root / "seed", root / OUTSIDE, root / "case"
    seed.mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    request = {"reader": name, "folder": str(seed), "make": True}
    outcome, detail, honest = worker.ask(request)
    if outcome != "read":
        log = (root.parent / "log").read_text()[-2000:]
        raise RuntimeError(f"{name}: the valid input is {outcome}: {detail}\n{log}")
    count = Count(honest_bytes=honest)
    begun = time.monotonic()
    for number in numbers:
        shutil.copytree(seed, case)
        done = mutate(case, Random(f"{name} {number}"))
        size = sum(map(_size, case.rglob("*")))
        before = _listing(root, case, writes=reader.writes)
        outcome, detail, grown = worker.ask({"reader": name, "folder": str(case)})
        count.most_bytes = max(count.most_bytes, grown)
        if outcome != "failed" and grown > 2 * (size + honest) + reader.slack:
            outcome, detail = "failed", f"{grown >> 20} MiB for a file of {size} bytes"
        if after := _listing(root, case, writes=reader.writes) ^ before:
            outcome, detail = "failed", f"wrote {', '.join(sorted(name for name, *_ in after))}"
            shutil.rmtree(outside)
            outside.mkdir()
            (outside / "secret").write_text(SECRET)
        count.tried += 1
        count.read += outcome == "read"
        count.refused += outcome == "refused"
        if outcome == "failed":
            count.failures.append(f"{name} {number} ({done}): {detail}")
        shutil.rmtree(case)
    count.seconds = time.monotonic() - begun
    return count


def _size(path):
    """Return the bytes of a file; a hole takes none."""
    if not path.is_file():
        return 0
    result = path.stat()
    return min(result.st_size, 512 * result.st_blocks)


def _listing(root, case, *, writes):
    """Return names, kinds and sizes of all files, and the text of the secret.

    Args:
        root: Folder of the reader.
        case: Folder of the input.
        writes: Whether the reader may write into ``case``.
    """
    result = set()
    for path in root.rglob("*"):
        if not writes or case not in path.parents:
            state = path.lstat()
            text = path.read_text() if path == root / OUTSIDE / "secret" else ""
            size = 0 if path.is_dir() else state.st_size
            result.add((str(path.relative_to(root)), state.st_mode, size, text))
    return result


def table(counts):
    """Return a table of readers and outcomes."""
    lines = [
        "| reader | tried | refused | read | failed | MiB, valid | MiB, most | s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, count in counts.items():
        row = (
            name,
            count.tried,
            count.refused,
            count.read,
            len(count.failures),
            f"{count.honest_bytes / 2**20:.1f}",
            f"{count.most_bytes / 2**20:.1f}",
            f"{count.seconds:.0f}",
        )
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def main(arguments):
    inputs, *names = arguments
    with tempfile.TemporaryDirectory(prefix="effasr_fuzz_") as folder:
        counts = {}
        for name, count in fuzz(names or READERS, int(inputs), Path(folder)):
            counts[name] = count
            sys.stdout.write("\n".join([table({name: count}), *count.failures]) + "\n")
            sys.stdout.flush()
    sys.stdout.write(table(counts) + "\n")
    failed = [failure for count in counts.values() for failure in count.failures]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
