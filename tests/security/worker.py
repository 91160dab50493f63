"""Reads one input after another, under a limit of memory; one JSON line of each on standard output.

python -m tests.security.worker [make]
"""

import json
import logging
import os
import resource
import sys
import warnings
from pathlib import Path

from tests.security.readers import READERS

MEMORY_BYTES = 1 << 30
"""Memory that reading one input may take, beside what the process has when all is imported."""


def _reset_peak() -> int:
    """Begin to measure the peak of resident memory; return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"no {field}")


def _outcome(name: str, folder: Path) -> tuple[str, str]:
    from effasr.cli.main import BAD_INPUT, explain

    try:
        READERS[name].read(folder)
    except (*BAD_INPUT, OSError) as error:
        # What the command line shows.
        text = explain(error)
        if not str(error) or "Traceback" in text or "\n" in text:
            return "failed", f"message of {type(error).__name__}: {text[:300]!r}"
        return "refused", text[:300]
    except MemoryError:
        return "failed", "MemoryError"
    except BaseException as error:
        return "failed", f"{type(error).__name__}: {str(error)[:300]}"
    return "read", ""


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    limited = False
    for line in sys.stdin:
        request = json.loads(line)
        name, folder = request["reader"], Path(request["folder"])
        if request.get("make"):
            # What it imports is no memory of the input.
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            READERS[name].make(folder)
            # The first time takes what is imported and kept.
            _outcome(name, folder)
            before = _reset_peak()
            outcome, limited = _outcome(name, folder), False
        else:
            if not limited:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + MEMORY_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
                limited = True
            before = _reset_peak()
            outcome = _outcome(name, folder)
        channel.write(json.dumps([*outcome, _resident("VmHWM") - before]) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
