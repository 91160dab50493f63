"""Operations: their definition, the choice of an implementation, and their form in torch.library.

An eager call goes straight to the implementation. Registered with `torch.library`, an operation is
also one node of a torch.compile graph, works on fake tensors, and counts its true work under
`FlopCounterMode`. An implementation that brings its own backward has what that needs travel through
the graph as further results; of one that autograd records, such as a reference, the registered
backward runs the forward again, with autograd, and differentiates that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from effasr_kernels.runtime import inplace_grad
from effasr_kernels.runtime.arguments import ArgumentSchema
from effasr_kernels.runtime.autograd import OwnBackward
from effasr_kernels.runtime.dispatch import Backend, Dispatcher
from effasr_kernels.runtime.example import Example

NAMESPACE = "effasr"
"""Of the operations in `torch.ops`."""

OPERATIONS: dict[str, TorchOp] = {}
"""Every operation by name; a definition enters its own when it is imported."""


class TorchOp(Dispatcher):
    """The definition of an operation; a base of those with and without a backward.

    Attributes:
        schema: How the arguments are flattened.
        examples: Small calls, for tests, ``effasr doctor`` and measurements.
    """

    def __init__(
        self,
        name: str,
        arguments: type,
        backends: Mapping[Backend, str],
        *,
        outputs: Callable[[Any], Tensor | tuple[Tensor, ...] | None],
        flops: Callable[[Any], int],
        examples: Sequence[Example],
        results: int = 1,
        order: Callable[[Any], Sequence[Backend]] | None = None,
    ):
        """Define an operation.

        Args:
            name: Of its folder and of its public function.
            arguments: The frozen dataclass of its arguments; see `ArgumentSchema`.
            backends: Where each implementation is, in order of preference; see `Dispatcher`.
            outputs: Given fake arguments, whose layouts know no lengths: empty tensors like the
                results, if there are any.
            flops: Given arguments: the floating-point operations of the forward, counted sequence
                by sequence. A backward counts as twice that, as for matrix products; what is merely
                computed again is not counted.
            examples: Small calls.
            results: How many tensors a call returns; 0 is None.
            order: See `Dispatcher`.
        """
        super().__init__(name, dict(backends), order)
        self.schema = ArgumentSchema(arguments)
        self.examples = tuple(examples)
        self._outputs, self._flops, self._results = outputs, flops, results
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        OPERATIONS[name] = self

    def __call__(self, arguments: Any, backend: Backend | str | None = None) -> Any:
        """Compute, through the dispatcher if torch compiles, fakes or counts.

        The public functions have cast their arguments as autocast would. What an implementation
        computes in a wider dtype, autocast would narrow again, so it is off here.

        Returns:
            One tensor, a tuple of several, or None, as the operation has results.
        """
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return self._through_library(arguments, backend)
        return self.eager(arguments, backend)

    def eager(self, arguments: Any, backend: Backend | str | None = None) -> Any:
        """Compute past the dispatcher, also under a dispatch mode."""
        implementation = self.select(arguments, backend)
        kind = getattr(arguments, self.schema.tensor_names[0]).device.type
        if not torch.is_autocast_enabled(kind):
            return self._compute(implementation, arguments)
        with torch.autocast(kind, enabled=False):
            return self._compute(implementation, arguments)

    def flatten(self, arguments: Any, backend: Backend | str | None = None) -> list[Any]:
        """The arguments of ``torch.ops.effasr.NAME`` for a call."""
        return [*self.schema.flatten(arguments), "" if backend is None else str(backend)]

    def overwritten(self, arguments: Any) -> tuple[str, ...]:
        """The tensors over which the backward of a call writes their gradients."""
        return ()

    def _compute(self, implementation: Any, arguments: Any) -> Any:
        """Run an implementation, outside the dispatcher."""
        raise NotImplementedError

    def _through_library(self, arguments: Any, backend: Backend | str | None) -> Any:
        raise NotImplementedError

    def _define(
        self,
        name: str,
        parts: str,
        returns: str,
        *,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        count: Callable[..., int],
    ) -> Any:
        """Register ``effasr::NAME``, and return it."""
        self._library.define(f"{name}({parts}, str backend) -> {returns}")
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=self._library)
        operation = getattr(getattr(torch.ops, NAMESPACE), name)
        register_flop_formula(operation, get_raw=True)(count)
        return operation

    def _written(self, names: Sequence[str]) -> str:
        """The parts of the schema where some tensors are written to."""
        letters = dict(zip(names, "abcdefgh", strict=False))
        parts = zip(self.schema.parts, self.schema.names, strict=True)
        return ", ".join(
            part.replace("Tensor", f"Tensor({letters[own]}!)") if own in letters else part
            for part, own in parts
        )

    def _count(self, *flat: Any, out_val: Any = None) -> int:
        return self._flops(self.schema.restore(flat[:-1]))


class DifferentiableOp(TorchOp):
    """An operation with a backward: ``effasr::NAME`` and ``effasr::NAME_backward``."""

    def __init__(self, *definition: Any, overwritable: Sequence[str] = (), **options: Any):
        """Define and register it.

        Args:
            definition: See `TorchOp`.
            overwritable: Tensors that the field ``overwritten``, a tuple of names, may name. The
                backward is then ``effasr::NAME_backward_over``, which writes their gradients over
                them (`effasr_kernels.runtime.inplace_grad`), and returns the others.
            options: See `TorchOp`.
        """
        super().__init__(*definition, **options)
        self._may_overwrite = bool(overwritable)
        parts = ", ".join(self.schema.parts)
        given = "Tensor[] grads, Tensor[] outputs, bool[] wanted"
        self._forward = self._define(
            *(self.name, parts, "Tensor[]"), run=self._run, fake=self._fake, count=self._count
        )
        self._backward = self._define(
            *(f"{self.name}_backward", f"{given}, {parts}", "Tensor[]"),
            run=self._run_backward,
            fake=self._fake_backward,
            count=self._count_backward,
        )
        if overwritable:
            self._backward_over = self._define(
                f"{self.name}_backward_over",
                f"{given}, {self._written(overwritable)}",
                "Tensor[]",
                run=self._run_backward,
                fake=self._fake_backward,
                count=self._count_backward,
            )
        torch.library.register_autograd(
            f"{NAMESPACE}::{self.name}",
            self._differentiate,
            setup_context=self._save,
            lib=self._library,
        )

    def overwritten(self, arguments: Any) -> tuple[str, ...]:
        """The tensors over which the backward of a call writes their gradients."""
        return arguments.overwritten if self._may_overwrite else ()

    def _compute(self, implementation: Any, arguments: Any) -> Any:
        if not hasattr(implementation, "backward"):
            return implementation.run(arguments)
        results: Any = None
        if torch.is_grad_enabled():
            tensors = self.schema.tensors(arguments)
            if any([x is not None and x.requires_grad for x in tensors]):
                results = OwnBackward.apply(self, implementation, arguments, *tensors)
        if results is None:
            results = implementation.forward(arguments)[0]
        return results[0] if self._results == 1 else results

    def _through_library(self, arguments: Any, backend: Backend | str | None) -> Any:
        outputs = self._forward(*self.flatten(arguments, backend))
        return outputs[0] if self._results == 1 else tuple(outputs[: self._results])

    def _run(self, *flat: Any) -> list[Tensor]:
        arguments, implementation = self._restore(flat)
        with torch.no_grad(), without_autocast(flat):
            if hasattr(implementation, "backward"):
                results, saved = implementation.forward(arguments)
            else:
                results, saved = implementation.run(arguments), ()
        # Strides as `_fake` promises them; the compiler relies on it.
        return [part.contiguous() for part in (*_as_tuple(results), *saved)]

    def _fake(self, *flat: Any) -> list[Tensor]:
        arguments, implementation = self._restore(flat)
        has_backward = hasattr(implementation, "backward")
        saved = implementation.saved_like(arguments) if has_backward else ()
        return [*_as_tuple(self._outputs(arguments)), *saved]

    def _restore(self, flat: Sequence[Any]) -> tuple[Any, Any]:
        """The arguments of a call through the library, and what serves it."""
        arguments = self.schema.restore(flat[:-1])
        return arguments, self.select(arguments, flat[-1] or None)

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
        overwritten = self._flat_overwritten(ctx.rest)
        inplace_grad.begin(ctx, self.name, overwritten)
        # Read once: activation checkpointing computes them at that moment.
        saved_tensors = ctx.saved_tensors
        given, kept = saved_tensors[: ctx.given], saved_tensors[ctx.given :]
        tensors = iter(given)
        flat = [
            next(tensors) if is_tensor else value
            for is_tensor, value in zip(ctx.is_tensor, ctx.rest, strict=True)
        ]
        backward = self._backward_over if overwritten else self._backward
        wanted = list(ctx.needs_input_grad)
        found = iter(backward(list(grads[: self._results]), list(kept), wanted, *flat))
        return tuple(
            inplace_grad.finish(value)
            if name in overwritten
            else next(found)
            if is_wanted
            else None
            for name, value, is_wanted in zip(
                [*self.schema.names, "backend"], flat, wanted, strict=True
            )
        )

    def _flat_overwritten(self, flat: Sequence[Any]) -> tuple[str, ...]:
        if not self._may_overwrite:
            return ()
        names = flat[self.schema.names.index("overwritten")]
        return tuple(names.split(",")) if names else ()

    def _run_backward(
        self, grads: list[Tensor], outputs: list[Tensor], wanted: list[bool], *flat: Any
    ) -> list[Tensor]:
        with without_autocast(flat):
            arguments, implementation = self._restore(flat)
            if not hasattr(implementation, "backward"):
                found = self._from_autograd(grads, wanted, flat)
                return self._not_overwritten(found, wanted, flat)
            results, saved = tuple(outputs[: self._results]), tuple(outputs[self._results :])
            with torch.no_grad():
                upstream = tuple(gradient.contiguous() for gradient in grads)
                found = implementation.backward(arguments, upstream, results, saved)
        gradients = []
        names = [*self.schema.names, "backend"]
        for name, value, is_wanted in zip(names, flat, wanted, strict=True):
            if not is_wanted:
                continue
            if name not in found:
                raise RuntimeError(f"{self.name}: this backend has no gradient of `{name}`.")
            gradient = found[name]
            if gradient is None:
                gradient = torch.zeros_like(value, memory_format=torch.contiguous_format)
            gradients.append(gradient.contiguous())
        return self._not_overwritten(gradients, wanted, flat)

    def _from_autograd(
        self, grads: list[Tensor], wanted: list[bool], flat: Sequence[Any]
    ) -> list[Tensor]:
        with recording():
            again = [
                value.detach().requires_grad_() if is_wanted else value
                for is_wanted, value in zip(wanted, flat, strict=True)
            ]
            arguments, implementation = self._restore(again)
            results = _as_tuple(implementation.run(arguments))
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
        found = [value.new_empty(value.shape) for is_wanted, value in pairs if is_wanted]
        return self._not_overwritten(found, wanted, flat)

    def _not_overwritten(
        self, found: list[Tensor], wanted: list[bool], flat: Sequence[Any]
    ) -> list[Tensor]:
        """The gradients that have memory of their own, of all that are wanted."""
        overwritten = self._flat_overwritten(flat)
        if not overwritten:
            return found
        pairs = zip(self.schema.names, wanted[:-1], strict=True)
        names = [name for name, is_wanted in pairs if is_wanted]
        return [x for name, x in zip(names, found, strict=True) if name not in overwritten]

    def _count_backward(
        self, grads: Any, outputs: Any, wanted: Any, *flat: Any, out_val: Any = None
    ) -> int:
        return 2 * self._count(*flat)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


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
