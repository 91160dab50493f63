"""Renders chat templates of models, which are programs: Jinja's loops, calls and arithmetic.

Jinja's sandbox keeps a template from files and from other objects, but bounds neither time nor
memory. Therefore another process renders, `template_worker`, which the kernel ends at its limits.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CPU_SECONDS = 5
MEMORY_BYTES = 512 << 20
MOST_CHARACTERS = 4 << 20
"""Limits of rendering one text."""

_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateError(ValueError):
    """A chat template cannot be rendered, or refuses a conversation."""


class _Renderer:
    """The process that renders; started when it is needed, and again after it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        request = json.dumps({"template": template, "variables": dict(variables)}).encode() + b"\n"
        with self._lock:
            process = self._process = self._process or _start()
            try:
                line = _ask(process, request)
            except BaseException:
                # Its answer would be taken for that of the next request.
                self._end()
                raise
            if not line.endswith(b"\n"):
                raise TemplateError(
                    f"the chat template cannot be rendered: {_reason(self._end())}."
                )
        answer = json.loads(line)
        if "error" in answer:
            raise TemplateError(f"the chat template cannot be rendered: {answer['error']}")
        return answer["text"]

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        _close_pipes(process)
        # It ends with its standard input, but may be in the midst of a template.
        process.terminate()
        return process.wait()

    def end(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end()

    def forget(self) -> None:
        """Leave the process to the parent: this one is a fork."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        if process is not None:
            _close_pipes(process)
            process.returncode = 0


def _start() -> subprocess.Popen[bytes]:
    limits = map(str, (CPU_SECONDS, MEMORY_BYTES, MOST_CHARACTERS))
    return subprocess.Popen(
        # Without its folder on the path, whose modules have nothing to do with it.
        [sys.executable, "-P", str(_WORKER), *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A fork has nothing to flush when it closes its copies.
        bufsize=0,
    )


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """The answer, which ends with a line feed; a part of it where the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    unsent, parts = memoryview(request), []
    try:
        while unsent:
            unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
    except BrokenPipeError:
        return b""
    while part := os.read(process.stdout.fileno(), 1 << 16):
        parts.append(part)
        if part.endswith(b"\n"):
            break
    return b"".join(parts)


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _reason(code: int) -> str:
    if code == -signal.SIGXCPU:
        return f"it takes more than {CPU_SECONDS} s of processor time"
    return f"its process ended with exit code {code}"


_renderer = _Renderer()
atexit.register(_renderer.end)
os.register_at_fork(after_in_child=_renderer.forget)


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template in Jinja's sandbox, in another process; raises `TemplateError`.

    The template has what transformers provides: ``raise_exception``, ``tojson``, ``strftime_now``,
    ``generation`` blocks, ``break`` and ``continue``. The date is always 26 July 2024, so that the
    text of a conversation does not depend on the day.
    """
    return _renderer.render(template, variables)
