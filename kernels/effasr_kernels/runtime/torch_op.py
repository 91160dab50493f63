"""Operations: their definition, and their registration with torch.library.

An eager call calls the implementation directly. Registration with `torch.library` makes an
operation one node of a torch.compile graph, supports fake tensors, and lets `FlopCounterMode` count
its floating-point operations. If an implementation defines its own backward, the registered forward
returns the tensors that the backward needs as further results. If autograd records it, as with a
reference, the registered backward runs the forward again with autograd and differentiates it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from effasr_kernels.runtime import deferred_sums, inplace_grad
from effasr_kernels.runtime.arguments import ArgumentSchema
from effasr_kernels.runtime.dispatch import Backend, Dispatcher, load
from effasr_kernels.runtime.example import Example

NAMESPACE = "effasr"
"""Namespace of the operations in `torch.ops`."""

# What no operation of a backend supports, by the operation's first tensor
_REFUSALS = {
    Backend.TRITON: "effasr_kernels.runtime.launch:refusal",
    Backend.CUDA: "effasr_kernels.runtime.cuda:refusal",
    Backend.CPP: "effasr_kernels.runtime.native:refusal",
}

OPERATIONS: "dict[str, TorchOp]" = {}
"""Every operation by name; importing a definition adds it."""


def is_dispatched() -> bool:
    """Return whether calls go through torch's dispatcher: under torch.compile or a mode."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


class TorchOp(Dispatcher):
    """The definition of an operation; base class of `DifferentiableOp` and `ForwardOnlyOp`."""

    def __init__(
        self,
        name: str,  # name of the operation's folder and public function
        arguments: type,  # the frozen dataclass of its arguments; see `ArgumentSchema`
        # The import path of each implementation, in order of preference; see `Dispatcher`. By
        # default `_triton` and `reference` of the operation's folder.
        backends: Mapping[Backend, str] | None = None,
        *,
        # Returns empty tensors with the shapes and dtypes of the results. Its arguments may be
        # fake, with layouts that hold no lengths.
        outputs: Callable[[Any], Tensor | tuple[Tensor, ...] | None],
        # Returns the floating-point operations of the forward, summed over sequences. A backward
        # counts as twice that, as for matrix products; recomputation is not counted.
        flops: Callable[[Any], int],
        examples: Sequence[Example],  # small calls
        results: int = 1,  # number of tensors that a call returns; with 0 a call returns None
        order: Callable[[Any], Sequence[Backend]] | None = None,
    ):
        if backends is None:
            folder = f"effasr_kernels.{name}"
            triton, reference = f"{folder}._triton", f"{folder}.reference"
            backends = {Backend.TRITON: triton, Backend.REFERENCE: reference}
        super().__init__(name, dict(backends), order)
        self.schema = ArgumentSchema(arguments)
        self.examples = tuple(examples)
        self._outputs, self._flops, self._results = outputs, flops, results
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        OPERATIONS[name] = self

    def __call__(self, arguments: Any, backend: Backend | str | None = None) -> Any:
        """Run the operation, through torch's dispatcher under torch.compile or a dispatch mode."""
        # Autocast is disabled inside: the public functions have already cast their arguments, and
        # autocast would narrow what an implementation computes in a wider dtype.
        if is_dispatched():
            return self._through_library(arguments, backend)
        return self.eager(arguments, backend)

    def eager(self, arguments: Any, backend: Backend | str | None = None) -> Any:
        """Run the operation without torch's dispatcher, even under a dispatch mode."""
        implementation = self.select(arguments, backend)
        kind = getattr(arguments, self.schema.tensor_names[0]).device.type
        if not torch.is_autocast_enabled(kind):
            return self._compute(implementation, arguments)
        with torch.autocast(kind, enabled=False):
            return self._compute(implementation, arguments)

    def _find(self, backend: Backend, arguments: Any) -> Any:
        implementation = super()._find(backend, arguments)
        if isinstance(implementation, str) or backend not in _REFUSALS:
            return implementation
        tensor = getattr(arguments, self.schema.tensor_names[0])
        return load(_REFUSALS[backend])(tensor) or implementation

    def flatten(self, arguments: Any, backend: Backend | str | None = None) -> list[Any]:
        return [*self.schema.flatten(arguments), "" if backend is None else str(backend)]

    def overwritten(self, arguments: Any) -> tuple[str, ...]:
        return ()

    def _compute(self, implementation: Any, arguments: Any) -> Any:
        raise NotImplementedError

    def _through_library(self, arguments: Any, backend: Backend | str | None) -> Any:
        raise NotImplementedError

    def _define(
        self,
        name: str,
        parts: str,
        returns: str,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        count: Callable[..., int],
    ) -> Any:
        self._library.define(f"{name}({parts}, str backend) -> {returns}")
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=self._library)
        operation = getattr(getattr(torch.ops, NAMESPACE), name)
        register_flop_formula(operation, get_raw=True)(count)
        return operation

    def _written(self, names: Sequence[str]) -> str:
        """The parts of the schema, with mutation annotations on the tensors ``names``."""
        letters = dict(zip(names, "abcdefgh", strict=False))
        parts = zip(self.schema.parts, self.schema.names, strict=True)
        return ", ".join(
            part.replace("Tensor", f"Tensor({letters[name]}!)") if name in letters else part
            for part, name in parts
        )

    def _count(self, *flat: Any, out_val: Any = None) -> int:
        return self._flops(self.schema.restore(flat[:-1]))


class DifferentiableOp(TorchOp):
    """An operation with a backward: ``effasr::NAME`` and ``effasr::NAME_backward``."""

    def __init__(
        self,
        *definition: Any,
        # Names of tensors that the field ``overwritten`` may contain. A call that overwrites
        # tensors has the backward ``effasr::NAME_backward_over``, which writes their gradients in
        # place (`effasr_kernels.runtime.inplace_grad`) and returns the other gradients.
        overwritable: Sequence[str] = (),
        # Returns the names of tensors of given arguments that a backward does not read. They are
        # not kept for it in eager mode, where it finds None in their place.
        unread: Callable[[Any], Sequence[str]] = lambda _: (),
        # Indices of results: a backward does not read their gradients. In eager mode it finds None
        # in their place where the result was not used.
        undifferentiated: Sequence[int] = (),
        **options: Any,
    ):
        super().__init__(*definition, **options)
        self.unread, self.undifferentiated = unread, frozenset(undifferentiated)
        self._may_overwrite = bool(overwritable)
        parts = ", ".join(self.schema.parts)
        upstream = "Tensor[] grads, Tensor[] outputs, bool[] required"
        functions = self._run_backward, self._fake_backward, self._count_backward
        self._forward = self._define(
            self.name, parts, "Tensor[]", self._run, self._fake, self._count
        )
        self._backward = self._define(
            f"{self.name}_backward", f"{upstream}, {parts}", "Tensor[]", *functions
        )
        if overwritable:
            parts = f"{upstream}, {self._written(overwritable)}"
            self._backward_over = self._define(
                f"{self.name}_backward_over", parts, "Tensor[]", *functions
            )
        torch.library.register_autograd(
            f"{NAMESPACE}::{self.name}",
            self._differentiate,
            setup_context=self._save,
            lib=self._library,
        )

    def overwritten(self, arguments: Any) -> tuple[str, ...]:
        """Names of the tensors over which the backward of a call writes their gradients."""
        return arguments.overwritten if self._may_overwrite else ()

    def _compute(self, implementation: Any, arguments: Any) -> Any:
        if not hasattr(implementation, "backward"):
            return implementation.run(arguments)
        results: Any = None
        if torch.is_grad_enabled():
            tensors = self.schema.tensors(arguments)
            if any([x is not None and x.requires_grad for x in tensors]):
                results = ImplementationFunction.apply(self, implementation, arguments, *tensors)
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
        # The compiler relies on the strides that `_fake` returns, and on separate memory.
        parts = [part.contiguous() for part in (*_as_tuple(results), *saved)]
        return [x.clone() if any(x is value for value in flat) else x for x in parts]

    def _fake(self, *flat: Any) -> list[Tensor]:
        arguments, implementation = self._restore(flat)
        saved_like = getattr(implementation, "saved_like", lambda _: ())
        return [*_as_tuple(self._outputs(arguments)), *saved_like(arguments)]

    def _restore(self, flat: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments of a call through torch.library, and its implementation."""
        arguments = self.schema.restore(flat[:-1])
        return arguments, self.select(arguments, flat[-1] or None)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.options = [None if isinstance(value, Tensor) else value for value in inputs]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        saved = output[self._results :]
        # The backward reads the results only if the implementation saves further tensors.
        outputs = output if saved else []
        ctx.tensor_count = len(tensors)
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(*tensors, *outputs)

    def _differentiate(self, ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        overwritten = self._flat_overwritten(ctx.options)
        inplace_grad.begin(ctx, self.name, overwritten)
        # Read only once: activation checkpointing recomputes them at each access.
        saved_tensors = ctx.saved_tensors
        tensors, outputs = (
            iter(saved_tensors[: ctx.tensor_count]),
            saved_tensors[ctx.tensor_count :],
        )
        flat = [
            next(tensors) if is_tensor else value
            for is_tensor, value in zip(ctx.is_tensor, ctx.options, strict=True)
        ]
        backward = self._backward_over if overwritten else self._backward
        required = list(ctx.needs_input_grad)
        gradients = iter(backward(list(grads[: self._results]), list(outputs), required, *flat))
        return tuple(
            inplace_grad.finish(value)
            if name in overwritten
            else next(gradients)
            if is_required
            else None
            for name, value, is_required in zip(
                [*self.schema.names, "backend"], flat, required, strict=True
            )
        )

    def _flat_overwritten(self, flat: Sequence[Any]) -> tuple[str, ...]:
        if not self._may_overwrite:
            return ()
        names = flat[self.schema.names.index("overwritten")]
        return tuple(names.split(",")) if names else ()

    def _run_backward(
        self, grads: list[Tensor], outputs: list[Tensor], required: list[bool], *flat: Any
    ) -> list[Tensor]:
        with without_autocast(flat):
            arguments, implementation = self._restore(flat)
            if not hasattr(implementation, "backward"):
                return self._not_overwritten(
                    self._from_autograd(grads, required, flat), required, flat
                )
            results, saved = tuple(outputs[: self._results]), tuple(outputs[self._results :])
            with torch.no_grad():
                upstream = tuple(gradient.contiguous() for gradient in grads)
                by_name = implementation.backward(arguments, upstream, results, saved)
        gradients = []
        names = [*self.schema.names, "backend"]
        for name, value, is_required in zip(names, flat, required, strict=True):
            if not is_required:
                continue
            if name not in by_name:
                raise RuntimeError(f"{self.name}: this backend has no gradient of `{name}`.")
            gradient = by_name[name]
            if gradient is None:
                gradient = torch.zeros_like(value, memory_format=torch.contiguous_format)
            # Gradients that are views of one tensor need separate memory for the compiler.
            gradient = gradient.contiguous()
            gradients.append(gradient.clone() if gradient.storage_offset() else gradient)
        return self._not_overwritten(gradients, required, flat)

    def _from_autograd(
        self, grads: list[Tensor], required: list[bool], flat: Sequence[Any]
    ) -> list[Tensor]:
        """Run the forward again with autograd, and return the required gradients."""
        with recording():
            inputs = [
                value.detach().requires_grad_() if is_required else value
                for is_required, value in zip(required, flat, strict=True)
            ]
            arguments, implementation = self._restore(inputs)
            results = _as_tuple(implementation.run(arguments))
            leaves = [x for is_required, x in zip(required, inputs, strict=True) if is_required]
            pairs = [(x, dx) for x, dx in zip(results, grads, strict=True) if x.requires_grad]
            gradients = torch.autograd.grad(
                [x for x, _ in pairs], leaves, [dx for _, dx in pairs], materialize_grads=True
            )
        return [gradient.contiguous() for gradient in gradients]

    def _fake_backward(
        self, grads: list[Tensor], outputs: list[Tensor], required: list[bool], *flat: Any
    ) -> list[Tensor]:
        pairs = zip(required, flat, strict=True)
        gradients = [value.new_empty(value.shape) for is_required, value in pairs if is_required]
        return self._not_overwritten(gradients, required, flat)

    def _not_overwritten(
        self, gradients: list[Tensor], required: list[bool], flat: Sequence[Any]
    ) -> list[Tensor]:
        """Drop the gradients that are written over their tensors from the required ones."""
        overwritten = self._flat_overwritten(flat)
        if not overwritten:
            return gradients
        pairs = zip(self.schema.names, required[:-1], strict=True)
        names = [name for name, is_required in pairs if is_required]
        return [x for name, x in zip(names, gradients, strict=True) if name not in overwritten]

    def _count_backward(
        self, grads: Any, outputs: Any, required: Any, *flat: Any, out_val: Any = None
    ) -> int:
        return 2 * self._count(*flat)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def without_autocast(flat: Sequence[Any]) -> Any:
    """A context that disables autocast for the device type of the first tensor."""
    kind = next(value for value in flat if isinstance(value, Tensor)).device.type
    return torch.autocast(kind, enabled=False)


_AUTOGRAD = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.ADInplaceOrView,
)


@contextmanager
def recording() -> Iterator[None]:
    """Enable autograd inside a kernel that torch's dispatcher may have called below autograd."""
    # This happens under a dispatch mode such as `FlopCounterMode`, but not in compiled code.
    excluded = [key for key in _AUTOGRAD if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


class ImplementationFunction(Function):
    """Calls ``forward`` and ``backward`` of an implementation; see `dispatch.Dispatcher`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, op: DifferentiableOp, implementation: Any, arguments: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        results, saved = implementation.forward(arguments)
        ctx.op, ctx.implementation = op, implementation
        # Autograd would launch a kernel that writes zeros for each result that was not used.
        ctx.set_materialize_grads(False)
        # Tensors are saved through autograd, so that saved-tensor hooks and version checks apply.
        ctx.other_values, ctx.count = op.schema.other_values(arguments), len(results)
        ctx.overwritten = op.overwritten(arguments)
        integers = [x for x in results if not x.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)
        # `next_functions` has no entry for an argument that is None.
        named = list(zip(op.schema.tensor_names, tensors, strict=True))
        ctx.present = [name for name, x in named if x is not None]
        unread = op.unread(arguments)
        if unread:
            tensors = tuple([None if name in unread else x for name, x in named])
        ctx.save_for_backward(*tensors, *results, *saved)
        return results

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        names, overwritten = ctx.op.schema.tensor_names, ctx.overwritten
        inplace_grad.begin(ctx, ctx.op.name, overwritten)
        # Read only once: activation checkpointing recomputes them at each access.
        saved = ctx.saved_tensors
        inputs, results = len(names), len(names) + ctx.count
        arguments = ctx.op.schema.join(saved[:inputs], ctx.other_values)
        outputs = saved[inputs:results]
        upstream = _upstream(grads, outputs, ctx.op.undifferentiated)
        receivers = deferred_sums.receivers(ctx, ctx.present)
        with deferred_sums.waiting(is_allowed=bool(receivers)) as waiting:
            gradients = ctx.implementation.backward(arguments, upstream, outputs, saved[results:])
        for name in overwritten:
            gradients[name] = inplace_grad.finish(getattr(arguments, name))
        required = {
            name: gradients[name] if is_needed else None
            for name, is_needed in zip(names, ctx.needs_input_grad[3:], strict=True)
        }
        deferred_sums.hand_over(waiting, required, receivers)
        return None, None, None, *required.values()


def _upstream(
    grads: Sequence[Tensor | None], results: Sequence[Tensor], undifferentiated: Collection[int]
) -> tuple[Tensor | None, ...]:
    return tuple(
        [
            gradient.contiguous()
            if gradient is not None
            else None
            if index in undifferentiated
            else torch.zeros_like(result, memory_format=torch.contiguous_format)
            for index, (gradient, result) in enumerate(zip(grads, results, strict=True))
        ]
    )


class ForwardOnlyOp(TorchOp):
    """An operation without a backward: ``effasr::NAME``."""

    def __init__(
        self,
        *definition: Any,
        written: Sequence[str] = (),  # arguments that calls write to, mutated in the schema
        # An optional argument. If given, only calls where it is not None write; they call
        # ``effasr::NAME_in_place``, so that the compiler copies nothing for others.
        written_with: str | None = None,
        **options: Any,
    ):
        super().__init__(*definition, **options)
        self.written, self._written_with = tuple(written), written_with
        # Not a list: torch.compile does not support it for an operation that mutates arguments.
        tensors = ", ".join(["Tensor"] * self._results)
        returns = tensors if self._results == 1 else f"({tensors})"
        functions = self._run, self._fake, self._count
        in_place = self._written(written)
        plain = ", ".join(self.schema.parts) if written_with else in_place
        self._call = self._call_in_place = self._define(self.name, plain, returns, *functions)
        if written_with is not None:
            self._call_in_place = self._define(
                f"{self.name}_in_place", in_place, returns, *functions
            )

    def __call__(self, arguments: Any, backend: Backend | str | None = None) -> Any:
        self.refuse_gradients(arguments)
        return super().__call__(arguments, backend)

    def refuse_gradients(self, arguments: Any) -> None:
        """Raise the RuntimeError of a call whose arguments require a gradient."""
        if torch.is_grad_enabled():
            for name in self.schema.tensor_names:
                value = getattr(arguments, name)
                if value is not None and value.requires_grad:
                    raise RuntimeError(
                        f"{self.name}: `{name}` requires a gradient, which this operation does not "
                        "have: call it under torch.no_grad() or torch.inference_mode()."
                    )

    def _compute(self, implementation: Any, arguments: Any) -> Any:
        return implementation.run(arguments)

    def _through_library(self, arguments: Any, backend: Backend | str | None) -> Any:
        writes = self._written_with and getattr(arguments, self._written_with) is not None
        call = self._call_in_place if writes else self._call
        return call(*self.flatten(arguments, backend))

    def _run(self, *flat: Any) -> Any:
        arguments = self.schema.restore(flat[:-1])
        with torch.no_grad(), without_autocast(flat):
            results = self.select(arguments, flat[-1] or None).run(arguments)
        # The compiler relies on the strides that `_fake` returns.
        if isinstance(results, tuple):
            return tuple(x.contiguous() for x in results)
        return results if results is None else results.contiguous()

    def _fake(self, *flat: Any) -> Any:
        arguments = self.schema.restore(flat[:-1])
        self.select(arguments, flat[-1] or None)
        return self._outputs(arguments)
