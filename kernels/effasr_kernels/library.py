"""The operations as torch's dispatcher sees them: schemas, shapes, gradients and FLOP counts.

Registered with `torch.library`, an operation is one node of a torch.compile graph, works on fake
tensors, and counts its true work under `FlopCounterMode`. The registered backward runs the
implementation again, with autograd, and differentiates that: each implementation is written once,
and needs no second gradient for the compiler. The price is a second forward, and lengths that are
read from the device; so a plain eager call goes past all this, straight to the implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from effasr_kernels.dispatch import Backend, Op
from effasr_kernels.packed import PackedLayout

_NAMESPACE = "effasr"


@dataclass(frozen=True, slots=True)
class Kind:
    """How one argument travels through a schema, which knows neither layouts nor dataclasses.

    Attributes:
        schema: The type and name of each part, with ``{}`` for the name of the argument.
        flatten: Turns the argument into as many values.
        restore: Turns the values into the argument.
    """

    schema: tuple[str, ...]
    flatten: Callable[[Any], tuple[Any, ...]]
    restore: Callable[..., Any]


def plain(type_name: str) -> Kind:
    """An argument of a type which schemas know, such as ``Tensor?`` or ``float``."""
    return Kind((type_name + " {}",), lambda value: (value,), lambda value: value)


def _restore_layout(cu_seqlens: Tensor, rows: int) -> PackedLayout:
    # Fake tensors hold no lengths, and shapes do not depend on them.
    host = () if is_fake(cu_seqlens) else tuple(cu_seqlens.tolist())
    return PackedLayout(cu_seqlens, host, rows)


def _flatten_seed(seed: int | Tensor | None) -> tuple[Tensor | None]:
    return (torch.tensor(seed) if isinstance(seed, int) else seed,)


TENSOR = plain("Tensor")
OPTIONAL_TENSOR = plain("Tensor?")
INT = plain("int")
FLOAT = plain("float")
BOOL = plain("bool")
STRING = plain("str")
LAYOUT = Kind(
    ("Tensor {}", "SymInt {}_rows"),
    lambda layout: (layout.cu_seqlens, layout.rows),
    _restore_layout,
)
SEED = Kind(("Tensor? {}",), _flatten_seed, lambda seed: seed)
"""An int, or an int64 tensor () on the host; see `effasr_kernels.dropout`."""


class Registered:
    """An operation whose calls the dispatcher sees wherever somebody is watching."""

    def __init__(
        self,
        op: Op,
        arguments: Mapping[str, Kind],
        *,
        outputs: Callable[..., Tensor | tuple[Tensor, ...]],
        flops: Callable[..., int],
        returns: str = "Tensor",
    ):
        """Register ``effasr::NAME`` and ``effasr::NAME_backward``.

        Args:
            op: The operation.
            arguments: The kind of each argument of its ``run``, in order.
            outputs: Called like ``run``, with fake tensors, and layouts that know no lengths: makes
                empty tensors like the results.
            flops: Called like ``run``: the floating-point operations of the forward, counted
                sequence by sequence. The backward is counted as twice that, as for matrix
                products; what is merely computed again is not counted.
            returns: The schema of the results.
        """
        self.op = op
        self.arguments = dict(arguments)
        self._outputs = outputs
        self._flops = flops
        self._library = torch.library.Library(_NAMESPACE, "FRAGMENT")
        parts = [part.format(n) for n, kind in self.arguments.items() for part in kind.schema]
        schema = ", ".join([*parts, "str backend"])
        backward = f"{op.name}_backward"
        self._library.define(f"{op.name}({schema}) -> {returns}")
        self._library.define(f"{backward}(Tensor[] grads, bool[] wanted, {schema}) -> Tensor[]")
        self._register(op.name, self._run, self._fake)
        self._register(backward, self._run_backward, self._fake_backward)
        self._forward = getattr(getattr(torch.ops, _NAMESPACE), op.name)
        self._backward = getattr(getattr(torch.ops, _NAMESPACE), backward)
        torch.library.register_autograd(
            f"{_NAMESPACE}::{op.name}",
            self._differentiate,
            setup_context=self._save,
            lib=self._library,
        )
        register_flop_formula(self._forward, get_raw=True)(self._count)
        register_flop_formula(self._backward, get_raw=True)(self._count_backward)

    def __call__(self, *args: Any, backend: Backend | str | None = None, **kwargs: Any) -> Any:
        """Run the operation, through the dispatcher if torch compiles, fakes or counts."""
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return self._forward(*self.flatten(*args, backend=backend, **kwargs))
        return self.op(*args, backend=backend, **kwargs)

    def flatten(self, *args: Any, backend: Backend | str | None = None, **kwargs: Any) -> list[Any]:
        """The arguments of ``torch.ops.effasr.NAME`` for this call."""
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        flat = [x for name, kind in self.arguments.items() for x in kind.flatten(given[name])]
        return [*flat, "" if backend is None else str(backend)]

    def _register(self, name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=self._library)

    def _restore(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, of the flat ones without the backend."""
        values = iter(flat)
        return {
            name: kind.restore(*(next(values) for _ in kind.schema))
            for name, kind in self.arguments.items()
        }

    def _run(self, *flat: Any) -> Any:
        with torch.no_grad():
            result = self._call(flat)
        # Strides as `_fake` promises them; the compiler relies on it.
        if isinstance(result, Tensor):
            return result.contiguous()
        return tuple(part.contiguous() for part in result)

    def _call(self, flat: Sequence[Any]) -> Any:
        return self.op(**self._restore(flat[:-1]), backend=flat[-1] or None)

    def _fake(self, *flat: Any) -> Any:
        return self._outputs(**self._restore(flat[:-1]))

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.rest = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))

    def _differentiate(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        flat = [
            next(tensors) if is_tensor else value
            for is_tensor, value in zip(ctx.is_tensor, ctx.rest, strict=True)
        ]
        wanted = list(ctx.needs_input_grad)
        found = iter(self._backward(list(grads), wanted, *flat))
        return tuple(next(found) if is_wanted else None for is_wanted in wanted)

    def _run_backward(self, grads: list[Tensor], wanted: list[bool], *flat: Any) -> list[Tensor]:
        with _recording():
            again = [
                value.detach().requires_grad_() if is_wanted else value
                for is_wanted, value in zip(wanted, flat, strict=True)
            ]
            results = self._call(again)
            results = [results] if isinstance(results, Tensor) else list(results)
            leaves = [value for is_wanted, value in zip(wanted, again, strict=True) if is_wanted]
            found = torch.autograd.grad(results, leaves, grads, materialize_grads=True)
        return [gradient.contiguous() for gradient in found]

    def _fake_backward(self, grads: list[Tensor], wanted: list[bool], *flat: Any) -> list[Tensor]:
        pairs = zip(wanted, flat, strict=True)
        return [value.new_empty(value.shape) for is_wanted, value in pairs if is_wanted]

    def _count(self, *flat: Any, out_val: Any = None) -> int:
        return self._flops(**self._restore(flat[:-1]))

    def _count_backward(self, grads: Any, wanted: Any, *flat: Any, out_val: Any = None) -> int:
        return 2 * self._count(*flat)


_AUTOGRAD = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.ADInplaceOrView,
)


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record inside a kernel, which the dispatcher may have called below autograd.

    That is so under a dispatch mode, such as `FlopCounterMode`; not in compiled code.
    """
    past = [key for key in _AUTOGRAD if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in past:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key in past:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
