"""Profiles some steps of a run."""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from effasr import ranges
from effasr.checks import check
from effasr.distributed.process_group import DistributedContext

log = logging.getLogger(__name__)

Tool = Literal["none", "nsys", "kineto"]

PROFILE_FOLDER = "profile"

_MEMORY_EVENTS = 1_000_000

_KINETO_SILENT = "6"
"""Above the level of its last kind of message, USDT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Steps to profile, and the tools.

    Attributes:
        tool: ``nsys``: the run was started by ``profiling/nsys_train.sh``, and the steps are its
            capture range. ``kineto``: torch's profiler, which writes ``profile/rankN.json.gz`` to
            the run directory. They cannot be used together.
        first_step: First step to record, when caches should be warm.
        steps: Number of steps to record.
        ranges: Library of the ranges under nsys; see `effasr.ranges.enable`.
        layers: Whether to record the forward operator of each backward kernel. It slows the host.
        memory: Whether to record every allocation of the GPU, up to the last recorded step or the
            first that runs out of memory, to ``profile/rankN_memory.pickle``, for
            https://pytorch.org/memory_viz.
    """

    tool: Tool = "none"
    first_step: int = 20
    steps: int = 5
    ranges: Literal["torch", "nvtx"] = "torch"
    layers: bool = False
    memory: bool = False

    def __post_init__(self) -> None:
        if self.tool not in get_args(Tool):
            raise ValueError(
                f"`tool` must be one of {', '.join(get_args(Tool))}, but is {self.tool!r}."
            )
        check(self.ranges in ("torch", "nvtx"), "ranges", "be torch or nvtx", repr(self.ranges))
        check(self.first_step >= 0, "first_step", "be at least 0", self.first_step)
        check(
            self.steps >= 1, "steps", "be at least 1", self.steps, "tool=none turns profiling off"
        )


def _version_of_nsys() -> tuple[int, int] | None:
    """Year and number of the Nsight Systems on the path, which started this process."""
    tool = shutil.which("nsys")
    if tool is None:
        return None
    printed = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    numbers = re.search(r"(20\d\d)\.(\d+)", printed.stdout)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


class StepProfiler:
    """Switches a profiler on for the configured steps, and off after them."""

    def __init__(self, config: ProfileConfig, context: DistributedContext, folder: Path) -> None:
        self._config = config
        self._context = context
        self._folder = folder
        self._on = ExitStack()
        self._recording = self._is_done = False
        self._last = config.first_step + config.steps - 1
        self._profiler: torch.profiler.profile | None = None
        on_gpu = context.device.type == "cuda"
        rule = "be false without a GPU, whose allocations it records"
        check(not config.memory or on_gpu, "training.profile.memory", rule, "true")
        rule = "be kineto or none without a GPU"
        check(config.tool != "nsys" or on_gpu, "training.profile.tool", rule, "nsys")
        if config.tool == "nsys" and config.ranges == "nvtx":
            # Ranges that would be lost are refused before the first step.
            try:
                self._enable_ranges()
            except RuntimeError as error:
                raise ValueError(
                    f"`training.profile.ranges` must be torch here, but is nvtx: {error}"
                ) from None
            ranges.disable()
        if config.memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS, stacks="python")

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surround a step, given its number from 0; record it if configured."""
        if self._config.tool != "none":
            self._begin(step)
        try:
            yield
        except torch.OutOfMemoryError:
            self._dump_memory()
            raise
        if self._profiler is not None:
            if step < self._config.first_step:
                # What the warm-up has queued is no work of the steps that are recorded.
                self._synchronize()
            self._profiler.step()
        if step == self._last:
            self.close()
            self._dump_memory()

    def close(self) -> None:
        if not self._recording:
            return
        self._recording = False
        # Ranks that synchronize pass the same step twice: the second must not begin another one.
        self._is_done = True
        self._synchronize()
        self._on.close()
        self._profiler = None

    def _begin(self, step: int) -> None:
        config = self._config
        # Kineto's first step is a warm-up and is not written.
        first = config.first_step - (config.tool == "kineto")
        if self._recording or self._is_done or not max(first, 0) <= step <= self._last:
            return
        self._recording = True
        self._synchronize()
        if config.tool == "kineto":
            self._start_kineto(step)
        else:
            self._start_nsys()

    def _enable_ranges(self) -> None:
        is_package = self._config.ranges == "nvtx"
        ranges.enable(self._config.ranges, tool_version=_version_of_nsys() if is_package else None)

    def _start_nsys(self) -> None:
        self._enable_ranges()
        self._on.callback(ranges.disable)
        runtime: Any = torch.cuda.cudart()
        runtime.cudaProfilerStart()
        self._on.callback(runtime.cudaProfilerStop)
        if self._config.layers:
            self._on.enter_context(torch.autograd.profiler.emit_nvtx())

    def _start_kineto(self, step: int) -> None:
        # Kineto reads it when it starts, and otherwise logs the start and stop among our lines.
        os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
        ranges.enable("kineto")
        self._on.callback(ranges.disable)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._context.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=0,
                warmup=1,
                active=self._last - max(step, self._config.first_step) + 1,
                repeat=1,
            ),
            on_trace_ready=self._write,
            record_shapes=self._config.layers,
        )
        self._profiler = self._on.enter_context(profiler)
        if step >= self._config.first_step:
            # No step is left for the warm-up.
            profiler.step()

    def _write(self, profiler: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._context.rank}.json.gz"
        unfinished = path.with_name(f"unfinished_{path.name}")
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
        log.info("profile of %d steps: %s", self._config.steps, path)

    def _dump_memory(self) -> None:
        if not self._config.memory:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._context.rank}_memory.pickle"
        if not path.exists():
            torch.cuda.memory._dump_snapshot(str(path))
            # Each entry costs a stack trace.
            torch.cuda.memory._record_memory_history(enabled=None)

    def _synchronize(self) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
