"""Operations without a backward, for decoding. They may write to their arguments."""

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
            written: The arguments that calls write to; the schema declares them as mutated.
            written_with: An optional argument. If given, only calls where it is not None write;
                they call ``effasr::NAME_in_place``, so that the compiler copies nothing for others.
            options: See `TorchOp`.
        """
        super().__init__(*definition, **options)
        self.written, self._written_with = tuple(written), written_with
        # Not a list: torch.compile does not support it for an operation that mutates arguments.
        tensors = ", ".join(["Tensor"] * self._results)
        returns = tensors if self._results == 1 else f"({tensors})"
        how: Any = {"run": self._run, "fake": self._fake, "count": self._count}
        in_place = self._written(written)
        plain = ", ".join(self.schema.parts) if written_with else in_place
        self._call = self._call_in_place = self._define(self.name, plain, returns, **how)
        if written_with is not None:
            self._call_in_place = self._define(f"{self.name}_in_place", in_place, returns, **how)

    def __call__(self, arguments: Any, backend: Backend | str | None = None) -> Any:
        """Run the operation; see `TorchOp`.

        Raises:
            RuntimeError: Grad mode is enabled and an argument requires a gradient.
        """
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
