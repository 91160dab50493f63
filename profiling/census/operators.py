"""Cost of one PyTorch operator on a GPU: kernels, bytes of memory traffic and FLOPs.

Bytes count each element that the operator must read or write once. Caches that hold a tensor
between two operators, and kernels that read a tensor twice, are not considered.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ALLOCATIONS = {
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "detach_", "lift_fresh", "_reshape_alias", "resize_", "set_", "squeeze_"),
    *("unsqueeze_", "t_", "transpose_", "as_strided_", "_local_scalar_dense"),
}
"""Operators without a kernel, besides views. The last is a copy that the host waits for."""

_TWO = (
    *("native_layer_norm_backward", "constant_pad_nd", "slice_backward", "select_backward"),
    *("masked_fill", "index_fill", "index_put", "index_add", "cumsum"),
)
_SEVERAL = dict.fromkeys(_TWO, 2) | {"sort": 4, "embedding_dense_backward": 8}
"""Kernels of operators with more than one, as counted in PyTorch's CUDA sources. Operators that
call a CUB sort depend on sizes; their numbers are typical values."""

_READS_ROWS = {"embedding", "index", "index_select", "gather"}
"""Operators that read only the returned elements of their first tensor."""

_OVERWRITES = {  # operators that change their first argument without reading it
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"),
    *("_foreach_copy_", "_foreach_zero_"),
}

_CATEGORIES = {
    "gemm": {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm"},
    "norm": {"native_layer_norm", "native_layer_norm_backward"},
    "dropout": {"native_dropout", "native_dropout_backward"},
    "copy": {"clone", "cat", "stack"},
    "reduction": {"sum", "mean", "_foreach_norm", "amax", "linalg_vector_norm"},
}

# From PyTorch's MultiTensorApply.cuh: tensors of a launch by the number of lists, blocks, elements.
# Builds for CUDA 13 have 32 KiB for the arguments of a kernel, those for CUDA 12 only 4 KiB.
_TENSORS_OF_LAUNCH = (770, 448, 336, 252, 210)
_BLOCKS_OF_LAUNCH = 2_240
_ELEMENTS_OF_BLOCK = 65_536


def name_of(func: Any) -> str:
    return func._schema.name.split("::")[1]


def tensors_of(*values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def device_of(x: Tensor) -> str:
    """Return the device type of a tensor; querying a fake one directly is a slow operator call."""
    return x.fake_device.type if isinstance(x, FakeTensor) else x.device.type


def waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host waits for all that it has queued: for a copy from or to it, or a number."""
    if func is torch.ops.aten._local_scalar_dense.default:
        return device_of(args[0]) != "cpu"
    if func is torch.ops.aten.scalar_tensor.default:
        # Of an assignment such as ``x[0] = 1``, which on CUDA copies the number from the host.
        return torch.device(kwargs.get("device") or "cpu").type != "cpu"
    if func is torch.ops.aten.copy_.default:
        target, source, *rest = args
        places, non_blocking = {device_of(target), device_of(source)}, any(rest)
    elif func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
        places = {device_of(args[0]), torch.device(kwargs["device"]).type}
        non_blocking = False
    else:
        return False
    return len(places) > 1 and not (non_blocking or kwargs.get("non_blocking", False))


def launches(func: Any, args: Sequence[Any]) -> int:
    name = name_of(func)
    if func.is_view or name in _ALLOCATIONS or func.namespace == "prim":
        return 0
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
    if lists and (name.startswith("_foreach_") or name.startswith("_fused_")):
        # A list of steps has no elements to divide into blocks.
        deep = [x for x in lists if any(y.ndim for y in x)] or lists
        count = multi_tensor_launches([x.numel() for x in deep[0]], len(deep))
        return count + (name == "_foreach_norm")
    if name == "convolution_backward":
        return sum(args[-1])
    return _SEVERAL.get(name, 1)


def multi_tensor_launches(elements: Iterable[int], lists: int) -> int:
    """Return the number of launches of a multi-tensor kernel, divided as PyTorch does."""
    most = _TENSORS_OF_LAUNCH[min(lists, len(_TENSORS_OF_LAUNCH)) - 1]
    made = tensors = blocks = 0
    for count in elements:
        if not count:
            continue
        remaining, tensors = math.ceil(count / _ELEMENTS_OF_BLOCK), tensors + 1
        while remaining:
            blocks_taken = min(remaining, _BLOCKS_OF_LAUNCH - blocks)
            remaining, blocks = remaining - blocks_taken, blocks + blocks_taken
            if blocks == _BLOCKS_OF_LAUNCH or (not remaining and tensors == most):
                made, blocks, tensors = made + 1, 0, int(remaining > 0)
    return made + (blocks > 0)


def bytes_moved(func: Any, args: Any, kwargs: Any, out: Any, device: str) -> int:
    name = name_of(func)
    inputs = [x for x in tensors_of(args, kwargs) if device_of(x) == device]
    outputs = [x for x in tensors_of(out) if device_of(x) == device]
    input_ids = {id(x) for x in inputs}
    changed = list(_changed(func, args, kwargs))
    written = [x for x in outputs if id(x) not in input_ids] + [
        x for x in changed if device_of(x) == device
    ]
    skipped = {id(x) for x in changed} if name in _OVERWRITES or _writes_out(func) else set()
    # Such as the sum that `addmm` adds to in place.
    skipped -= {id(x) for x in args} if _writes_out(func) else set()
    read = [x for x in inputs if id(x) not in skipped]
    if name in _READS_ROWS and read:
        return sum(size(x) for x in unique(read[1:])) + 2 * sum(size(x) for x in unique(written))
    return sum(size(x) for x in unique(read)) + sum(size(x) for x in unique(written))


def _writes_out(func: Any) -> bool:
    return any(x.is_out for x in func._schema.arguments)


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        # Fused optimizers store the gradients only where they divide them by a scale.
        is_fused = name_of(func).startswith("_fused_")
        if is_fused and argument.name == "grads" and kwargs.get("grad_scale") is None:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        yield from tensors_of(value)


def unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


def size(x: Tensor) -> int:
    """Return the size of a tensor in bytes; repeated elements of an expanded one count once."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return math.prod(n for n, stride in pairs if stride or not n) * x.element_size()


def flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def category(func: Any, args: Any, out: Any) -> str:
    name = name_of(func)
    if "convolution" in name:
        return "convolution"
    if name.startswith("_fused_"):
        return "optimizer"
    if name == "_foreach_copy_":
        return "cast" if len({x.dtype for x in tensors_of(args[:2])}) > 1 else "copy"
    if name in ("_to_copy", "copy_"):
        ends = tensors_of(args)[-1:] + tensors_of(out)
        if len({device_of(x) for x in ends}) > 1:
            return "transfer"
        return "cast" if len({x.dtype for x in ends}) > 1 else "copy"
    if func._schema.name.startswith("aten::_fft"):
        return "fft"
    return next((kind for kind, names in _CATEGORIES.items() if name in names), "elementwise")
