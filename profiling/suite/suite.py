"""Runs the parts of a call, each within its time, and keeps what they found safe while they do."""

from __future__ import annotations

import csv
import datetime
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from suite import archive, orphans, summary
from suite.gate import Gate, is_of
from suite.parts import ROOT, Part, Setting, missing
from suite.steps import POISONED, LeftOut, Result, Running, Step, limits

_KEY = ("fingerprint", "device", "torch", "triton")
"""Fields that earlier test results must share with this run."""
_PROBE_BYTES = 256 * 1024
"""Bytes that must be free in an output folder: rows and logs of a part."""


def base_environment(*, dry: bool = False) -> dict[str, str]:
    """Return the environment of the commands: this checkout first, kernels on the GPU or none."""
    variables = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    ours = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "profiling")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*ours, variables.get("PYTHONPATH")]))
    if dry:
        variables |= {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
    return variables


def _installed(step: Step | LeftOut) -> Step | LeftOut:
    """Return the step, if what it needs is installed; what is left out has no share of the time."""
    reason = missing(step.needs) if isinstance(step, Step) else ""
    return LeftOut(step.name, reason) if reason else step


class Suite:
    """A run of some parts.

    Args:
        setting: Setting of the run.
        parts: Parts to run.
        minutes: Minutes for all of them.
        call: Number of the call; None for all.
        archive: Folder of the packed results; by default that of the rows.
    """

    def __init__(
        self,
        setting: Setting,
        parts: Sequence[Part],
        minutes: float,
        *,
        call: int | None = None,
        archive: Path | None = None,
    ) -> None:
        self.setting = setting
        self.results: list[Result] = []
        self.where: dict[str, str] = {}
        self._parts = parts
        self._call = call
        self._archive = archive or setting.output
        self._deadline = time.monotonic() + 60 * minutes
        self._token = orphans.new_token()
        self._base = base_environment(dry=setting.dry) | {orphans.VARIABLE: self._token}
        self._gate = Gate()
        self._began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._now = ""
        self._complaints: set[str] = set()

    def run(self) -> int:
        """Run the parts; returns the exit code."""
        watcher = orphans.Watcher(self._token)
        shares = [self._share(part) for part in self._parts]
        self._show_plan(limits(shares, self._left()))
        code = None
        try:
            for number, part in enumerate(self._parts):
                self._run(part, limits(shares[number:], self._left())[0])
                if part.name == "environment" and not self.where:
                    code = 2
                    break
        except KeyboardInterrupt as error:
            said = str(error) or "ctrl-C"
            self._note(Result("interrupted", "failed", details=said, well=False))
        finally:
            watcher.close()
        self._now = ""
        place = self.save()
        sys.stdout.write(f"\n{self._text()}\n{self.setting.output / 'summary.md'}\n")
        sys.stdout.write(f"{place}\n" if place else "no folder took the archive\n")
        if code is not None:
            return code
        return 0 if all(result.well for result in self.results) else 1

    def _share(self, part: Part) -> tuple[float, float]:
        """Floor and weight, in this call; of all calls the largest; none of what is left out."""
        if missing(part.needs):
            return 0.0, 0.0
        chosen = part.calls if self._call is None else {self._call: part.calls[self._call]}
        return max(floor for floor, _ in chosen.values()), max(w for _, w in chosen.values())

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _show_plan(self, seconds: Sequence[float]) -> None:
        call = "all calls" if self._call is None else f"call {self._call}"
        sys.stdout.write(f"{call}, {self._left():.0f} s; a part has at least, and about:\n")
        for part, about in zip(self._parts, seconds, strict=True):
            floor, _ = self._share(part)
            sys.stdout.write(f"    {part.name:14} {floor:4.0f} s {about:5.0f} s   {part.about}\n")
        sys.stdout.flush()

    def _run(self, part: Part, seconds: float) -> None:
        self._ensure_output()
        end = time.monotonic() + seconds
        try:
            steps = [_installed(step) for step in part.steps(self.setting, self._gate)]
            self._run_steps(steps, end)
            self._learn(part)
        except Exception as error:
            # Of a folder that takes no more, say: the next part goes on in another one.
            details = f"{type(error).__name__}: {error}"
            self._note(Result(part.name, "failed", details=details, well=False))

    def _run_steps(self, steps: Sequence[Step | LeftOut], end: float) -> None:
        running: list[Running] = []
        try:
            for number, step in enumerate(steps):
                if isinstance(step, LeftOut):
                    self._note(Result(step.name, "left out", details=step.reason, well=step.well))
                    continue
                following = [x for x in steps[number:] if isinstance(x, Step) and not x.beside]
                shares = [(x.floor, x.weight) for x in following]
                left = end - time.monotonic()
                self._run_step(step, left if step.beside else limits(shares, left)[0], running)
            while running:
                self._finish(running.pop(0))
        except KeyboardInterrupt:
            for one in running:
                one.end(at_once=True)
                self._note(one.interrupted())
            raise

    def _learn(self, part: Part) -> None:
        """Take note of what a part has found, and later ones rest on."""
        if part.name == "environment":
            self._see_where()
        elif part.name == "tests":
            self._gate = Gate.read([self.setting.outcomes])
            self._gate.save(self.setting.output / "tests.json", self._key())
        else:
            summary.set_aside(self.setting.output, self._gate, self._began)

    def _run_step(self, step: Step, seconds: float, running: list[Running]) -> None:
        """Start a step and, unless it runs beside others, wait for it."""
        end = time.monotonic() + seconds
        for attempt in range(step.again + 1):
            try:
                one = Running(
                    step, end - time.monotonic(), self.setting.output / "logs", ROOT, self._base
                )
            except OSError as error:
                self._note(Result(step.name, "failed", details=str(error), well=False))
                return
            if step.beside:
                running.append(one)
                return
            poisoned = self._finish(one).code == POISONED
            if not poisoned or attempt == step.again or end - time.monotonic() < 5:
                return

    def _finish(self, one: Running) -> Result:
        self._now = one.step.name
        try:
            result = one.finish(self.save)
        except KeyboardInterrupt:
            self._note(one.interrupted())
            raise
        self._note(result)
        return result

    def _see_where(self) -> None:
        """Read what the first part wrote, and what tests have shown on the same before."""
        if not self.results or not self.results[-1].well:
            return
        output = self.setting.output
        self.where = json.loads((output / "environment.json").read_text(encoding="utf-8"))
        if not is_of(output / "tests.json", self._key()):
            for path in (self.setting.outcomes, self.setting.poisoned):
                path.unlink(missing_ok=True)
        self._gate = Gate.read([self.setting.outcomes])
        self._gate.save(output / "tests.json", self._key())

    def _key(self) -> Mapping[str, str]:
        return {name: str(self.where.get(name, "")) for name in _KEY}

    def _note(self, result: Result) -> None:
        self.results.append(result)
        self._now = ""
        sys.stdout.write(f"{result.line()}\n")
        for line in result.tail if not result.well else ():
            sys.stdout.write(f"    {line}\n")
        sys.stdout.flush()
        self.save()

    def _text(self) -> str:
        """Return the summary so far; where the rows cannot be read, it says so in their place."""
        said = {"dry": self.setting.dry, "gate": self._gate, "call": self._call}
        state = f"running: {self._now}" if self._now else ""
        try:
            rows = summary.recent(self.setting.output, self._began)
            return summary.markdown(self.results, rows, self.where, **said, state=state)
        except (OSError, KeyError, ValueError, csv.Error) as error:
            reason = f"rows cannot be summed up: {type(error).__name__}: {error}"
            self._complain(reason)
            nothing: dict[str, list[summary.Row]] = {name: [] for name in summary.FILES}
            state = "; ".join(filter(None, [state, reason]))
            return summary.markdown(self.results, nothing, self.where, **said, state=state)

    def save(self) -> Path | None:
        """Write the summary and the archive; returns where the latter is."""
        kind = "" if self._call is None else f"_call{self._call}"
        output = self.setting.output
        text = self._text().encode()
        self._keep([output], "summary.md", text)
        try:
            data = archive.packed(output)
        except OSError as error:
            self._complain(f"nothing was packed: {error}")
            return None
        folders = list(dict.fromkeys([self._archive, output, Path(tempfile.gettempdir())]))
        place = self._keep(folders, f"gpu_suite{kind}.tar.gz", data)
        if place is not None and place.parent != output:
            self._keep([place.parent], f"summary{kind}.md", text)
        return place

    def _keep(self, folders: Sequence[Path], name: str, data: bytes) -> Path | None:
        place, reason = archive.write_somewhere(folders, name, data)
        if reason:
            self._complain(f"{reason}: {'not kept' if place is None else f'kept as {place}'}")
        return place

    def _complain(self, what: str) -> None:
        """Once of each, on the screen."""
        if what not in self._complaints:
            self._complaints.add(what)
            sys.stdout.write(f"gpu_suite: {what}\n")
            sys.stdout.flush()

    def _ensure_output(self) -> None:
        """Go on in another folder where that of the rows takes no more."""
        old = self.setting.output
        try:
            archive.write(old / ".probe", b"\0" * _PROBE_BYTES)
            (old / ".probe").unlink()
        except OSError as error:
            new = Path(tempfile.mkdtemp(prefix="gpu_suite_"))
            # What is there travels along as far as it can be read.
            with suppress(OSError):
                shutil.copytree(old, new, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            self.setting = replace(self.setting, output=new)
            details = f"{old} takes no more ({error.strerror or error}): goes on in {new}"
            self._note(Result("output folder", "moved", details=details, well=False))
