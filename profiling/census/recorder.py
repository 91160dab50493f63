"""Records the launches of a training step: PyTorch operators, custom kernels and their modules."""

import bisect
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from census import operators
from effasr import ranges
from effasr_kernels.runtime.cuda import CudaLaunch
from effasr_kernels.runtime.dispatch import Dispatcher
from effasr_kernels.runtime.launch import Launch, diverted
from effasr_kernels.runtime.tiles import Programs

_LARGEST_SEQUENCE_NUMBER = 2**63
"""Sequence numbers of nodes that accumulate gradients are larger; they have no forward module."""


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    category: str
    pass_: str
    place: str
    by_frame: bool
    launches: int
    bytes: int
    flops: int
    is_half: bool
    call: int
    programs: int = 0
    live: int = 0


class Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, device: str, frames: int) -> None:
        """Record tensors of a device type; ``frames`` is the number of encoder frames (rows)."""
        super().__init__()
        self.entries: list[Entry] = []
        self.waits: list[str] = []  # where the host waits for the device
        self._device, self._frames = device, frames
        self._names = {module: name for name, module in model.named_modules()}
        self._modules: list[str] = []
        self._ranges: list[str] = []
        # Module paths with the sequence number of the first autograd node created there, in order.
        self._numbers: list[int] = []
        self._places: list[str] = []
        self._operation: str | None = None
        self._numbers_of_calls = itertools.count()
        self._call = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        select = Dispatcher.select

        def observed(op: Dispatcher, arguments: Any, backend: Any = None) -> Any:
            return _Observed(self, op, select(op, arguments, backend))

        try:
            with (
                patch.object(ranges, "_make", lambda name, number: self._within(name)),
                patch.object(Dispatcher, "select", observed),
                diverted(self._take),
                self,
            ):
                yield
        finally:
            before.remove()
            after.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operators.waits(func, args, kwargs):
            self.waits.append(f"{operators.name_of(func)} in {(self._ranges or ['the step'])[-1]}")
        out = func(*args, **kwargs)
        tensors = operators.tensors_of(args, kwargs, out)
        on_device = [x for x in tensors if operators.device_of(x) == self._device]
        made = operators.tensors_of(out)
        # PyTorch launches nothing for an empty result.
        is_empty = bool(made) and not any(x.numel() for x in made)
        count = operators.launches(func, args) if on_device and not is_empty else 0
        if not count:
            return out
        self.add(
            operators.name_of(func),
            operators.category(func, args, out),
            on_device,
            count,
            operators.bytes_moved(func, args, kwargs, out, self._device),
            operators.flops(func, args, kwargs, out) if self._operation is None else 0,
        )
        return out

    def _take(self, launch: Launch | CudaLaunch) -> None:
        if 0 in launch.grid:
            return
        if isinstance(launch, CudaLaunch):
            name, values, reached = launch.kernel, tuple(launch.tensors.values()), []
        else:
            name, values = launch.kernel.fn.__name__, launch.values
            reached = [*launch.read, *launch.written]
        tensors, by_frame = operators.unique(operators.tensors_of(values)), []
        if self._operation is None:
            # Kernels that no operation launches itself: the optimizer's, and that which adds the
            # partial sums of a layer, whose number is bounded, and tensors with a row for each
            # frame.
            by_frame = [x for x in tensors if self._frames in x.shape]
            tensors = [x for x in tensors if self._frames not in x.shape]
        category = "optimizer" if reached else "reduction"
        size = sum(map(operators.size, [*tensors, *reached]))
        # Of an axis of tiles, those with rows; of others all.
        live = [x.live() if isinstance(x, Programs) else x for x in launch.grid]
        programs = math.prod(launch.grid), math.prod(live)
        self.add(name, category, [*tensors, *reached], 1, size, programs=programs)
        if by_frame:
            self.add(name, "reduction", by_frame, 0, sum(map(operators.size, by_frame)))

    @contextmanager
    def within_operation(self, name: str) -> Iterator[None]:
        before = self._operation, self._call
        self._operation, self._call = name, next(self._numbers_of_calls)
        try:
            yield
        finally:
            self._operation, self._call = before

    def add(
        self,
        name: str,
        category: str,
        tensors: list[Tensor],
        launches: int,
        size: int,
        flops: int = 0,
        programs: tuple[int, int] = (0, 0),
    ) -> None:
        is_alone = self._operation is None
        call = next(self._numbers_of_calls) if is_alone else self._call
        by_frame = any(self._frames in x.shape for x in tensors)
        # The dtype of the products is that of the first floating tensor.
        dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
        place = self._operation or category, *self._where(), by_frame
        work = launches, size, flops, dtype.itemsize == 2, call
        self.entries.append(Entry(name, *place, *work, *programs))

    def _where(self) -> tuple[str, str]:
        if "backward" in self._ranges:
            node = torch._C._current_autograd_node()
            number = _LARGEST_SEQUENCE_NUMBER if node is None else node._sequence_nr()
            if number >= _LARGEST_SEQUENCE_NUMBER:
                return "backward", "gradients"
            index = bisect.bisect_right(self._numbers, number) - 1
            return "backward", self._places[index] if index >= 0 else "losses"
        if "forward" in self._ranges:
            return "forward", self._place
        return "update", self._ranges[-1] if self._ranges else "step"

    @property
    def _place(self) -> str:
        """Return the innermost module, or in the model itself the innermost range."""
        if self._modules and self._modules[-1]:
            return self._modules[-1]
        inner = self._ranges[-1] if self._ranges else ""
        return "losses" if inner in ("", "forward") else inner

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._modules.append(self._names.get(module, ""))
        self._mark()

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._modules.pop()
        self._mark()

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self._ranges.append(name)
        self._mark()
        try:
            yield
        finally:
            self._ranges.pop()
            self._mark()

    def _mark(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._places.append(self._place)


class _Observed:
    """Wraps an implementation of an operation to record its work under the operation's name."""

    def __init__(self, recorder: Recorder, op: Any, implementation: Any) -> None:
        self._recorder, self._op, self._implementation = recorder, op, implementation

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._implementation, name)
        factor = {"forward": 1, "run": 1, "backward": 2}.get(name)
        return attribute if factor is None else partial(self._call, attribute, factor)

    def _call(self, function: Any, factor: int, arguments: Any, *others: Any) -> Any:
        with self._recorder.within_operation(self._op.name):
            tensors = [x for x in self._op.schema.tensors(arguments) if x is not None]
            flops = factor * self._op._flops(arguments)
            self._recorder.add(self._op.name, self._op.name, tensors, 0, 0, flops)
            return function(arguments, *others)
