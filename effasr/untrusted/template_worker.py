"""Renders chat templates in a process of its own, with limits: see `chat_template`.

    python template_worker.py CPU_SECONDS MEMORY_BYTES MOST_CHARACTERS

It is run by its path, as it imports nothing of effasr. Each line of standard input is a JSON object
with ``template`` and ``variables``; each line of standard output is one with ``text`` or ``error``.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
import time
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LEAST_VERSION = 3, 1, 6
"""Older ones have known ways out of the sandbox."""

_TODAY = datetime(2024, 7, 26)
"""What a template is told of the date: what Llama's templates take where they are told none. Rows
that depended on the day of tokenization would be other ones when a run continues."""


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the turns of the assistant: its content is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(content, lineno=line)


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(value: Any, **options: Any) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(template)


def _limit_time(seconds: int) -> None:
    """Let the kernel end the process after so many seconds more of its processor time."""
    due = math.ceil(time.process_time()) + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (_within(due, hard), hard))


def _limit_memory(size: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    limit = _within(limit, resource.getrlimit(resource.RLIMIT_AS)[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _within(limit: int, hard: int) -> int:
    """A limit that a process may set: only the administrator may raise a hard limit."""
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _answer(request: dict[str, Any], memory: int, characters: int) -> dict[str, str]:
    try:
        text = _compiled(request["template"]).render(**request["variables"])
    except MemoryError:
        return {"error": f"it takes more than {memory >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it is nested too deep"}
    except Exception as error:  # A template raises whatever its expressions do.
        return {"error": " ".join(str(error).split())[:200] or type(error).__name__}
    if len(text) > characters:
        return {"error": f"it writes more than {characters} characters"}
    return {"text": text}


def main(seconds: int, memory: int, characters: int) -> None:
    # Of ctrl-C, which the terminal sends to this process as well, the parent takes care.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3])
    if version < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        sys.exit(f"chat templates need jinja2>={least}, but {jinja2.__version__} is installed")
    if sys.platform == "linux":
        _limit_memory(memory)
    # Bytes that are no UTF-8, lone surrogates in Python, pass as JSON escapes in both directions.
    for line in sys.stdin.buffer:
        _limit_time(seconds)
        answer = json.dumps(_answer(json.loads(line), memory, characters))
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
