"""The operations as torch's dispatcher sees them: schemas, shapes, gradients and FLOP counts.

Registered with `torch.library`, an operation is one node of a torch.compile graph, works on fake
tensors, and counts its true work under `FlopCounterMode`. A kernel brings its own backward
(`effasr_kernels.runtime.autograd`), and what that needs travels through the graph as further
results. Of a reference the registered backward runs the forward again, with autograd, and
differentiates that. A plain eager call goes past all this, straight to the implementation.
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

from effasr_kernels.packed import OffsetsOnDemand, PackedLayout
from effasr_kernels.runtime import inplace_grad
from effasr_kernels.runtime.autograd import Kernel
from effasr_kernels.runtime.dispatch import Backend, Op

NAMESPACE = "effasr"
"""Of the operations in `torch.ops`."""


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


def _flatten_layout(layout: PackedLayout) -> tuple[Tensor, int, int | None]:
    max_seqlen = layout.static_max_seqlen
    if max_seqlen is None and not layout.cu_seqlens.is_cpu:
        # Kernels size buffers by it. On a CPU it would only have the compiler trace every length.
        max_seqlen = layout.max_seqlen_bound
    return layout.cu_seqlens, layout.rows, max_seqlen


def _restore_layout(cu_seqlens: Tensor, rows: int, max_seqlen: int | None) -> PackedLayout:
    # Fake tensors hold no lengths, and shapes do not depend on them.
    host = () if is_fake(cu_seqlens) else OffsetsOnDemand(cu_seqlens)
    return PackedLayout(cu_seqlens, host, rows, max_seqlen)


def _flatten_seed(seed: int | Tensor | None) -> tuple[Tensor | None]:
    return (torch.tensor(seed) if isinstance(seed, int) else seed,)


TENSOR = plain("Tensor")
OPTIONAL_TENSOR = plain("Tensor?")
INT = plain("int")
FLOAT = plain("float")
BOOL = plain("bool")
STRING = plain("str")
OPTIONAL_INTS = Kind(
    ("int[]? {}",),
    lambda values: (None if values is None else list(values),),
    lambda values: None if values is None else tuple(values),
)
NAMES = Kind(
    ("str {}",), lambda names: (",".join(names),), lambda text: tuple(text.split(",")) * bool(text)
)
"""A tuple of names. Not a list, as torch takes an empty one for a list of tensors."""
LAYOUT = Kind(
    ("Tensor {}", "SymInt {}_rows", "SymInt? {}_max_seqlen"),
    _flatten_layout,
    _restore_layout,
)
SEED = Kind(("Tensor? {}",), _flatten_seed, lambda seed: seed)
"""An int, or an int64 tensor (); see `effasr_kernels.shared.dropout`."""


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
        overwritable: Sequence[str] = (),
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
            returns: ``"Tensor"``, or ``"(Tensor, Tensor)"`` and so on for several results.
            overwritable: Tensors that the argument ``overwritten`` may name, of which kind it is
                `NAMES`. The backward is then ``effasr::NAME_backward_over``, which writes their
                gradients over them (`effasr_kernels.runtime.inplace_grad`), and returns the others.
        """
        self.op = op
        self.arguments = dict(arguments)
        self.parts = [part.format(n) for n, kind in arguments.items() for part in kind.schema]
        self.names = [part.split()[-1] for part in self.parts]
        self._outputs = outputs
        self._flops = flops
        self._single = returns == "Tensor"
        self._results = returns.count("Tensor")
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        schema = ", ".join([*self.parts, "str backend"])
        backward = f"{op.name}_backward"
        given = "Tensor[] grads, Tensor[] outputs, bool[] wanted"
        self._library.define(f"{op.name}({schema}) -> Tensor[]")
        self._library.define(f"{backward}({given}, {schema}) -> Tensor[]")
        self._register(op.name, self._run, self._fake)
        self._register(backward, self._run_backward, self._fake_backward)
        self._forward = getattr(getattr(torch.ops, NAMESPACE), op.name)
        self._backward = getattr(getattr(torch.ops, NAMESPACE), backward)
        torch.library.register_autograd(
            f"{NAMESPACE}::{op.name}",
            self._differentiate,
            setup_context=self._save,
            lib=self._library,
        )
        register_flop_formula(self._forward, get_raw=True)(self._count)
        register_flop_formula(self._backward, get_raw=True)(self._count_backward)
        if overwritable:
            self._register_over(overwritable)

    def __call__(self, *args: Any, backend: Backend | str | None = None, **kwargs: Any) -> Any:
        """Run the operation, through the dispatcher if torch compiles, fakes or counts."""
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            outputs = self._forward(*self.flatten(*args, backend=backend, **kwargs))
            return outputs[0] if self._single else tuple(outputs[: self._results])
        return self.op(*args, backend=backend, **kwargs)

    def kernel(self, module: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
        """The ``run`` of a kernel's module; see `effasr_kernels.runtime.autograd.Kernel`."""
        return Kernel(self, module, forward, backward)

    def flatten(self, *args: Any, backend: Backend | str | None = None, **kwargs: Any) -> list[Any]:
        """The arguments of ``torch.ops.effasr.NAME`` for this call."""
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        return [*self.flat(given), "" if backend is None else str(backend)]

    def flat(self, given: Mapping[str, Any]) -> list[Any]:
        """The values of the schema's parts, in the order of `names`."""
        return [x for name, kind in self.arguments.items() for x in kind.flatten(given[name])]

    def restore(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, the inverse of `flat`."""
        values = iter(flat)
        return {
            name: kind.restore(*(next(values) for _ in kind.schema))
            for name, kind in self.arguments.items()
        }

    def pack(self, results: tuple[Tensor, ...]) -> Any:
        """What a call returns."""
        return results[0] if self._single else results

    def _register(self, name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=self._library)

    def _register_over(self, overwritable: Sequence[str]) -> None:
        """Define the backward that writes over some of its arguments."""
        name = f"{self.op.name}_backward_over"
        letters = dict(zip(overwritable, "abcdefgh", strict=False))
        parts = [
            f"Tensor({letters[own]}!) {own}" if own in letters else part
            for own, part in zip(self.names, self.parts, strict=True)
        ]
        given = "Tensor[] grads, Tensor[] outputs, bool[] wanted"
        self._library.define(f"{name}({given}, {', '.join(parts)}, str backend) -> Tensor[]")
        self._register(name, self._run_backward_over, self._fake_backward_over)
        self._backward_over = getattr(getattr(torch.ops, NAMESPACE), name)
        register_flop_formula(self._backward_over, get_raw=True)(self._count_backward)

    def _overwritten(self, flat: Sequence[Any]) -> Sequence[str]:
        """Which arguments of a call are written over by its backward."""
        if "overwritten" not in self.arguments:
            return ()
        return self.arguments["overwritten"].restore(flat[self.names.index("overwritten")])

    def _select(self, arguments: dict[str, Any], backend: str) -> Callable[..., Any]:
        return self.op.select(**arguments, backend=backend or None)

    def _run(self, *flat: Any) -> list[Tensor]:
        arguments = self.restore(flat[:-1])
        with torch.no_grad(), without_autocast(flat):
            run = self._select(arguments, flat[-1])
            if isinstance(run, Kernel):
                results, saved = run.forward(**arguments)
            else:
                results, saved = run(**arguments), ()
        results = (results,) if isinstance(results, Tensor) else results
        # Strides as `_fake` promises them; the compiler relies on it.
        return [part.contiguous() for part in (*results, *saved)]

    def _fake(self, *flat: Any) -> list[Tensor]:
        arguments = self.restore(flat[:-1])
        results = self._outputs(**arguments)
        results = (results,) if isinstance(results, Tensor) else results
        run = self._select(arguments, flat[-1])
        saved = run.saved_like(**arguments) if isinstance(run, Kernel) else ()
        return [*results, *saved]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.rest = [None if isinstance(value, Tensor) else value for value in inputs]
        given = [value for value in inputs if isinstance(value, Tensor)]
        saved = output[self._results :]
        # A reference needs none of its results again; a kernel that saves nothing, neither.
        kept = output if saved else []
        ctx.given = len(given)
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(*given, *kept)

    def _differentiate(self, ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        overwritten = self._overwritten(ctx.rest)
        inplace_grad.begin(ctx, self.op.name, overwritten)
        # Asked for once: activation checkpointing computes them at that moment.
        saved_tensors = ctx.saved_tensors
        given, kept = saved_tensors[: ctx.given], saved_tensors[ctx.given :]
        tensors = iter(given)
        flat = [
            next(tensors) if is_tensor else value
            for is_tensor, value in zip(ctx.is_tensor, ctx.rest, strict=True)
        ]
        wanted = list(ctx.needs_input_grad)
        upstream = list(grads[: self._results])
        if not overwritten:
            found = iter(self._backward(upstream, list(kept), wanted, *flat))
            return tuple(next(found) if is_wanted else None for is_wanted in wanted)
        found = iter(self._backward_over(upstream, list(kept), wanted, *flat))
        return tuple(
            inplace_grad.finish(value)
            if name in overwritten
            else next(found)
            if is_wanted
            else None
            for name, value, is_wanted in zip([*self.names, "backend"], flat, wanted, strict=True)
        )

    def _run_backward(
        self, grads: list[Tensor], outputs: list[Tensor], wanted: list[bool], *flat: Any
    ) -> list[Tensor]:
        arguments = self.restore(flat[:-1])
        with without_autocast(flat):
            run = self._select(arguments, flat[-1])
            if isinstance(run, Kernel):
                return self._from_kernel(run, grads, outputs, wanted, flat, arguments)
            return self._from_autograd(grads, wanted, flat)

    def _run_backward_over(
        self, grads: list[Tensor], outputs: list[Tensor], wanted: list[bool], *flat: Any
    ) -> list[Tensor]:
        found = self._run_backward(grads, outputs, wanted, *flat)
        return self._not_overwritten(found, wanted, flat)

    def _not_overwritten(
        self, found: list[Tensor], wanted: list[bool], flat: Sequence[Any]
    ) -> list[Tensor]:
        """The gradients that have memory of their own, of all that are wanted."""
        names = [name for name, is_wanted in zip(self.names, wanted[:-1], strict=True) if is_wanted]
        overwritten = self._overwritten(flat)
        return [x for name, x in zip(names, found, strict=True) if name not in overwritten]

    def _from_kernel(
        self,
        kernel: Kernel,
        grads: list[Tensor],
        outputs: list[Tensor],
        wanted: list[bool],
        flat: Sequence[Any],
        arguments: dict[str, Any],
    ) -> list[Tensor]:
        results, saved = tuple(outputs[: self._results]), tuple(outputs[self._results :])
        with torch.no_grad():
            upstream = tuple(gradient.contiguous() for gradient in grads)
            found = kernel.backward(upstream, results, saved, **arguments)
        names = [*self.names, "backend"]
        gradients = []
        for name, value, is_wanted in zip(names, flat, wanted, strict=True):
            if not is_wanted:
                continue
            if name not in found:
                raise RuntimeError(f"{self.op.name}: this backend has no gradient of `{name}`.")
            gradient = found[name]
            if gradient is None:
                gradient = torch.zeros_like(value, memory_format=torch.contiguous_format)
            gradients.append(gradient.contiguous())
        return gradients

    def _from_autograd(
        self, grads: list[Tensor], wanted: list[bool], flat: Sequence[Any]
    ) -> list[Tensor]:
        with recording():
            again = [
                value.detach().requires_grad_() if is_wanted else value
                for is_wanted, value in zip(wanted, flat, strict=True)
            ]
            results = self.op(**self.restore(again[:-1]), backend=again[-1] or None)
            results = [results] if isinstance(results, Tensor) else list(results)
            leaves = [value for is_wanted, value in zip(wanted, again, strict=True) if is_wanted]
            pairs = [(x, dx) for x, dx in zip(results, grads, strict=True) if x.requires_grad]
            found = torch.autograd.grad(
                [x for x, _ in pairs], leaves, [dx for _, dx in pairs], materialize_grads=True
            )
        return [gradient.contiguous() for gradient in found]

    def _fake_backward(
        self, grads: list[Tensor], outputs: list[Tensor], wanted: list[bool], *flat: Any
    ) -> list[Tensor]:
        pairs = zip(wanted, flat, strict=True)
        return [value.new_empty(value.shape) for is_wanted, value in pairs if is_wanted]

    def _fake_backward_over(
        self, grads: list[Tensor], outputs: list[Tensor], wanted: list[bool], *flat: Any
    ) -> list[Tensor]:
        found = self._fake_backward(grads, outputs, wanted, *flat)
        return self._not_overwritten(found, wanted, flat)

    def _count(self, *flat: Any, out_val: Any = None) -> int:
        return self._flops(**self.restore(flat[:-1]))

    def _count_backward(
        self, grads: Any, outputs: Any, wanted: Any, *flat: Any, out_val: Any = None
    ) -> int:
        return 2 * self._count(*flat)


def without_autocast(flat: Sequence[Any]) -> Any:
    """A context without autocast on the device of the first tensor."""
    kind = next(value for value in flat if isinstance(value, Tensor)).device.type
    return torch.autocast(kind, enabled=False)


_AUTOGRAD = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.ADInplaceOrView,
)


@contextmanager
def recording() -> Iterator[None]:
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
