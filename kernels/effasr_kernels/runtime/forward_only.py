"""Operations without a backward, as torch's dispatcher sees them: what decoding calls.

As in `effasr_kernels.runtime.torch_op` an operation is one node of a torch.compile graph, works on
fake tensors and counts its true work. It may write to its arguments, which its schema then says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from effasr_kernels.runtime.dispatch import Backend, Op
from effasr_kernels.runtime.torch_op import NAMESPACE, Kind, without_autocast


class ForwardOnly:
    """An operation whose calls the dispatcher sees wherever somebody is watching."""

    def __init__(
        self,
        op: Op,
        arguments: Mapping[str, Kind],
        *,
        outputs: Callable[..., Tensor | tuple[Tensor, ...] | None],
        flops: Callable[..., int],
        results: int = 1,
        written: Sequence[str] = (),
        written_with: str | None = None,
    ):
        """Register ``effasr::NAME``, and ``effasr::NAME_in_place`` for ``written_with``.

        Args:
            op: The operation.
            arguments: The kind of each argument of its ``run``, in order.
            outputs: Called like ``run``, with fake tensors: makes empty tensors like the results,
                if any.
            flops: Called like ``run``: the floating-point operations.
            results: How many tensors a call returns; 0 is None.
            written: Arguments that calls write to.
            written_with: The argument without which (None) they do not: a call with it is one of
                ``effasr::NAME_in_place``, so that the compiler copies nothing for the others.
        """
        self.op, self.arguments = op, dict(arguments)
        self.parts = [part.format(n) for n, kind in arguments.items() for part in kind.schema]
        self._outputs, self._flops, self._results = outputs, flops, results
        self._written_with = written_with
        self._library = torch.library.Library(NAMESPACE, "FRAGMENT")
        plain = () if written_with else written
        self._call = self._define(op.name, plain)
        self._call_in_place = self._call
        if written_with is not None:
            self._call_in_place = self._define(f"{op.name}_in_place", written)

    def __call__(self, *args: Any, backend: Backend | str | None = None, **kwargs: Any) -> Any:
        """Run the operation, through the dispatcher if torch compiles, fakes or counts.

        Raises:
            RuntimeError: Autograd would record it.
        """
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        if torch.is_grad_enabled():
            self._refuse_gradients(given)
        if not (torch.compiler.is_compiling() or is_in_torch_dispatch_mode()):
            return self.op(**given, backend=backend)
        return self._operation(given)(*self.flatten(**given, backend=backend))

    def flatten(self, *args: Any, backend: Backend | str | None = None, **kwargs: Any) -> list[Any]:
        """The arguments of ``torch.ops.effasr.NAME`` for this call."""
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        flat = [x for name, kind in self.arguments.items() for x in kind.flatten(given[name])]
        return [*flat, "" if backend is None else str(backend)]

    def restore(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The arguments by name, the inverse of `flatten` but for the backend."""
        values = iter(flat)
        return {
            name: kind.restore(*(next(values) for _ in kind.schema))
            for name, kind in self.arguments.items()
        }

    def _define(self, name: str, written: Sequence[str]) -> Any:
        letters = dict(zip(written, "abcdefgh", strict=False))
        parts = [
            part.replace("Tensor", f"Tensor({letters[own]}!)") if own in letters else part
            for part in self.parts
            for own in (part.split()[-1],)
        ]
        # Not a list: the compiler takes none from an operation that writes to its arguments.
        returned = "Tensor" if self._results == 1 else f"({', '.join(['Tensor'] * self._results)})"
        self._library.define(f"{name}({', '.join(parts)}, str backend) -> {returned}")
        self._library.impl(name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", self._fake, lib=self._library)
        operation = getattr(getattr(torch.ops, NAMESPACE), name)
        register_flop_formula(operation, get_raw=True)(self._count)
        return operation

    def _operation(self, given: Mapping[str, Any]) -> Any:
        writes = self._written_with is not None and given[self._written_with] is not None
        return self._call_in_place if writes else self._call

    def _refuse_gradients(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"{self.op.name}: `{name}` requires a gradient, which this operation does not "
                    "have: call it under torch.no_grad() or torch.inference_mode()."
                )

    def _run(self, *flat: Any) -> Any:
        arguments = self.restore(flat[:-1])
        with torch.no_grad(), without_autocast(flat):
            found = self.op.select(**arguments, backend=flat[-1] or None)(**arguments)
        # Strides as `_fake` promises them; the compiler relies on it.
        if isinstance(found, tuple):
            return tuple(x.contiguous() for x in found)
        return found if found is None else found.contiguous()

    def _fake(self, *flat: Any) -> Any:
        arguments = self.restore(flat[:-1])
        self.op.select(**arguments, backend=flat[-1] or None)
        return self._outputs(**arguments)

    def _count(self, *flat: Any, out_val: Any = None) -> int:
        return self._flops(**self.restore(flat[:-1]))
