"""A fake GPU device: tensors without values on which PyTorch and the operations behave as on CUDA.

The device is not named cuda, because autograd needs a CUDA build of torch for that name.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library, fallthrough_kernel
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from effasr.data.batch import Batch
from effasr.training import step
from effasr_kernels import PackedLayout, PackedSequence
from effasr_kernels.runtime import counters, torch_op

NAME = "fakegpu"

_AUTOCAST = "AutocastPrivateUse1"
_NARROW = (
    *("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "einsum"),
    *("conv1d", "conv2d", "conv3d", "convolution", "prelu"),
)
_WIDE = (
    *("layer_norm", "native_layer_norm", "group_norm", "softplus", "exp", "log", "log2", "log10"),
    *("log1p", "expm1", "rsqrt", "reciprocal", "norm.Scalar", "logsumexp", "pow.Tensor_Scalar"),
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "nll_loss"),
)
"""Operators that autocast runs in the lower precision, and in float32: those from PyTorch's CUDA
lists in autocast_mode.h that a speech model can call. Other devices have no such list."""

_KERNELS_OF_CUDA = ("silu_backward",)
"""Operators that are one kernel on CUDA, and that torch decomposes for other devices."""

_LIBRARIES: list[Library] = []
"""References that keep the libraries alive: a collected library removes its registrations."""


@cache
def register() -> torch.device:
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    fallthrough, rules = Library("_", "IMPL"), Library("aten", "IMPL")
    fallthrough.fallback(fallthrough_kernel, _AUTOCAST)
    for names, is_narrow in ((_NARROW, True), (_WIDE, False)):
        for name in names:
            rules.impl(name, _autocast_rule(name, is_narrow=is_narrow), _AUTOCAST)
    for name in _KERNELS_OF_CUDA:
        rules.impl(name, _unreachable, "PrivateUse1")
    _LIBRARIES.extend([fallthrough, rules])
    return torch.device(NAME)


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("tensors of this device are fake: it computes nothing")


def _autocast_rule(name: str, *, is_narrow: bool) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _AUTOCAST))

    def rule(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if is_narrow else torch.float32

        def cast(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
                return x
            return x.to(dtype)

        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return rule


@contextmanager
def fake_gpu() -> Iterator[torch.device]:
    """Create fake tensors inside the context; those of the device behave as tensors of a GPU."""
    device = register()
    with ExitStack() as stack:
        enter = stack.enter_context
        # Operations call their implementation, whose launches are recorded, as without a mode.
        enter(patch.object(torch_op, "is_in_torch_dispatch_mode", lambda: False))
        is_cuda = property(lambda self: self.fake_device.type == NAME)
        enter(patch.object(FakeTensor, "is_cuda", is_cuda, create=True))
        types = [*_foreach_utils._foreach_supported_types, FakeTensor]
        enter(patch.object(_foreach_utils, "_foreach_supported_types", types))
        # On CUDA dropout is one kernel; torch decomposes it for devices that it does not know.
        enter(patch.object(nn.functional, "dropout", _dropout))
        enter(patch.object(step, "HostCopy", _HostCopy))
        # On CUDA a stream keeps them, so that no launch sets them to zero.
        enter(patch.object(counters, "_zeros", _kept_counters))
        # The constructor fills a tensor on the host and copies it, below any dispatch mode.
        enter(patch.object(torch, "tensor", _tensor_on_host_first(torch.tensor)))
        # Operations check the alignment of pointers, and a fake tensor has the address 0.
        enter(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        yield device


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not p or not input.numel():
        return input
    if inplace:
        raise NotImplementedError("the census has no dropout in place, as CUDA's is another kernel")
    return torch.native_dropout(input, p, training)[0]


def _kept_counters(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, device=device)


def _tensor_on_host_first(construct: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = construct(data, **options)
        # Fake tensors keep the values of constants, which no kernel of the device could copy.
        return torch.empty(made.shape, dtype=made.dtype).to(device or "cpu")

    return tensor


class _HostCopy:
    """Replaces `effasr.training.step_stats.HostCopy`, which needs CUDA events."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)


def fake_batch(batch: Batch) -> Batch:
    """Return the batch with fake tensors on the host; must be called within `fake_gpu`."""
    mode = active_fake_mode()
    assert mode is not None

    def fake(part: Any) -> Any:
        if isinstance(part, Tensor):
            return mode.from_tensor(part)
        if isinstance(part, PackedLayout):
            return replace(part, cu_seqlens=fake(part.cu_seqlens))
        if isinstance(part, PackedSequence):
            return PackedSequence(fake(part.values), fake(part.layout))
        return part

    names = [field.name for field in fields(batch) if field.init]
    return replace(batch, **{name: fake(getattr(batch, name)) for name in names})


def materialize(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, x in list(module.named_parameters(recurse=False)):
            values = torch.empty(x.shape, dtype=x.dtype, device=device)
            setattr(module, name, nn.Parameter(values, requires_grad=x.requires_grad))
        for name, x in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(x.shape, dtype=x.dtype, device=device))
