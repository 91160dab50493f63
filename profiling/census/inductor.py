"""The kernels that torch.compile would make for a GPU, counted without one.

The graphs are traced on the CPU, by the tracing and partitioning of `torch.compile`, and moved to a
GPU's device with fake tensors. TorchInductor lowers them and decides which operators it fuses, and
stops before it writes code: a kernel is one of its scheduled nodes. It is given the properties of
an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch
from torch._inductor import compile_fx, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

_DEVICE = torch.device("cuda", 0)
_CAPABILITY = (9, 0)
_SIZES = {
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65_536,
    "max_threads_per_multi_processor": 2_048,
    "warp_size": 32,
}
"""Of an H200."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of TorchInductor."""

    is_backward: bool
    bytes: int


def inductor_kernels(run: Callable[[Callable[..., Any]], object]) -> list[Kernel]:
    """Return the kernels of functions that are compiled, forward and backward."""
    found: list[Kernel] = []

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        is_backward = bool(options.get("is_backward"))
        results = [
            x.meta["val"] if isinstance(x, fx.Node) else x
            for x in graph.graph.output_node().args[0]
        ]
        found.extend(Kernel(is_backward, size) for size in _scheduled(graph, inputs))
        return _undefined(results)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(
            function,
            backend=lambda graph, inputs: compile_fx.compile_fx(graph, inputs, inner_compile=inner),
            dynamic=False,
            fullgraph=True,
        )

    torch._dynamo.reset()
    with _as_on_gpu():
        run(compiled)
    torch._dynamo.reset()
    return found


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    major, minor = _CAPABILITY
    properties = SimpleNamespace(major=major, minor=minor, **_SIZES)
    hints = DeviceProperties("cuda", 0, cc=10 * major + minor, major=major, **_SIZES)
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "get_device_capability", lambda *_: _CAPABILITY),
            (DeviceProperties, "create", lambda *_: hints),
            (scheduler, "has_triton", lambda *_: True),
        ):
            stack.enter_context(patch.object(owner, name, value))
        # A cached graph would not reach the lowering.
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        yield


def _scheduled(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Return the bytes of each kernel that a graph becomes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def moved(x: Any) -> Any:
        if isinstance(x, torch.device):
            return _DEVICE
        if not isinstance(x, Tensor) or x.device.type != "cpu":
            return x
        with mode:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_DEVICE)

    for node in graph.graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(x, moved) for x in (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
    graph.recompile()
    given = [moved(x) for x in inputs]
    # The passes that `compile_fx_inner` runs.
    compile_fx.view_to_reshape(graph)
    with V.set_fake_mode(mode):
        compile_fx.record_original_output_strides(graph)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=given)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*given)
            lowering._update_scheduler()
            return [node.get_read_write_buffers_sizes() for node in lowering.scheduler.nodes]


def _undefined(results: Sequence[Any]) -> Callable[..., Any]:
    def compute(inputs: list[Any]) -> list[Any]:
        inputs.clear()
        return [
            torch.empty_strided(x.size(), x.stride(), dtype=x.dtype) if isinstance(x, Tensor) else x
            for x in results
        ]

    # The caller hands over its inputs in one list.
    compute._boxed_call = True  # type: ignore[attr-defined]
    return compute
