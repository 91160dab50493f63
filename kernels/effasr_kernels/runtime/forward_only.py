"""Operations without a backward: what decoding calls. They may write to their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.torch_op import TorchOp, without_autocast


class ForwardOnlyOp(TorchOp):
    """An operation without a backward: ``effasr::NAME``.

    Attributes:
        written: The arguments that calls write to.
    """

    def __init__(
        self,
        *definition: Any,
        written: Sequence[str] = (),
        written_with: str | None = None,
        **options: Any,
    ):
        """Define and register it.

        Args:
            definition: See `TorchOp`.
            written: The arguments that calls write to, as the schema then says.
            written_with: The argument without which (None) they do not: a call with it is one of
                ``effasr::NAME_in_place``, so that the compiler copies nothing for the others.
            options: See `TorchOp`.
        """
        super().__init__(*definition, **options)
        self.written, self._written_with = tuple(written), written_with
        # Not a list: the compiler takes none from an operation that writes to its arguments.
        tensors = ", ".join(["Tensor"] * self._results)
        returns = tensors if self._results == 1 else f"({tensors})"
        how: Any = {"run": self._run, "fake": self._fake, "count": self._count}
        in_place = self._written(written)
        plain = ", ".join(self.schema.parts) if written_with else in_place
        self._call = self._call_in_place = self._define(self.name, plain, returns, **how)
        if written_with is not None:
            self._call_in_place = self._define(f"{self.name}_in_place", in_place, returns, **how)

    def __call__(self, arguments: Any, backend: Backend | str | None = None) -> Any:
        """Compute; see `TorchOp`.

        Raises:
            RuntimeError: Autograd would record the call.
        """
        if torch.is_grad_enabled():
            for name in self.schema.tensor_names:
                value = getattr(arguments, name)
                if value is not None and value.requires_grad:
                    raise RuntimeError(
                        f"{self.name}: `{name}` requires a gradient, which this operation does not "
                        "have: call it under torch.no_grad() or torch.inference_mode()."
                    )
        return super().__call__(arguments, backend)

    def _compute(self, implementation: Any, arguments: Any) -> Any:
        return implementation.run(arguments)

    def _through_library(self, arguments: Any, backend: Backend | str | None) -> Any:
        writes = self._written_with and getattr(arguments, self._written_with) is not None
        call = self._call_in_place if writes else self._call
        return call(*self.flatten(arguments, backend))

    def _run(self, *flat: Any) -> Any:
        arguments = self.schema.restore(flat[:-1])
        with torch.no_grad(), without_autocast(flat):
            found = self.select(arguments, flat[-1] or None).run(arguments)
        # Strides as `_fake` promises them; the compiler relies on it.
        if isinstance(found, tuple):
            return tuple(x.contiguous() for x in found)
        return found if found is None else found.contiguous()

    def _fake(self, *flat: Any) -> Any:
        arguments = self.schema.restore(flat[:-1])
        self.select(arguments, flat[-1] or None)
        return self._outputs(arguments)
