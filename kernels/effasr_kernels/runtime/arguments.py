"""Conversion of an operation's argument dataclass to and from a torch.library schema.

A schema supports tensors and plain values, but no layouts. Eager calls pass the frozen dataclass
itself; only calls through torch.library flatten it to the parts of the schema and rebuild it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from effasr_kernels.packed import OffsetsOnDemand, PackedLayout


@dataclass(frozen=True, slots=True)
class Kind:
    """Conversion between a dataclass field and the parts of a schema."""

    parts: tuple[str, ...]  # the type and name of each part, with ``{}`` for the name of the field
    flatten: Callable[[Any], tuple[Any, ...]]  # the field's value to one for each part
    restore: Callable[..., Any]  # converts these values back to the field's value


def _plain(type_name: str) -> Kind:
    """The kind of a field of a supported type, such as ``Tensor?`` or ``float``."""
    return Kind((type_name + " {}",), lambda value: (value,), lambda value: value)


def optional_list(type_name: str, restore: Callable[[list[Any]], Any]) -> Kind:
    """The kind of a field that is None or an iterable of values of one type."""
    return Kind(
        (type_name + "[]? {}",),
        lambda values: (None if values is None else list(values),),
        lambda values: None if values is None else restore(values),
    )


def _flatten_layout(layout: PackedLayout) -> tuple[Tensor, int, int | None]:
    max_seqlen = layout.static_max_seqlen
    if max_seqlen is None and not layout.cu_seqlens.is_cpu:
        # Kernels size buffers by it. On a CPU it would only make the compiler trace every length.
        max_seqlen = layout.max_seqlen_bound
    return layout.cu_seqlens, layout.rows, max_seqlen


def _restore_layout(cu_seqlens: Tensor, rows: int, max_seqlen: int | None) -> PackedLayout:
    # Fake tensors hold no offsets, and shapes do not depend on them.
    host = () if is_fake(cu_seqlens) else OffsetsOnDemand(cu_seqlens)
    return PackedLayout(cu_seqlens, host, rows, max_seqlen)


_TENSORS = (Tensor, Tensor | None)
_KINDS: dict[Any, Kind] = {
    Tensor: _plain("Tensor"),
    Tensor | None: _plain("Tensor?"),
    int: _plain("int"),
    int | None: _plain("int?"),
    float: _plain("float"),
    bool: _plain("bool"),
    str: _plain("str"),
    tuple[int, ...] | None: optional_list("int", tuple),
    # Names are joined to one string: torch treats an empty list as a list of tensors.
    tuple[str, ...]: Kind(
        ("str {}",),
        lambda names: (",".join(names),),
        lambda text: tuple(text.split(",")) * bool(text),
    ),
    PackedLayout: Kind(
        ("Tensor {}", "SymInt {}_rows", "SymInt? {}_max_seqlen"), _flatten_layout, _restore_layout
    ),
}


class ArgumentSchema:
    def __init__(self, arguments: type):
        hints = get_type_hints(arguments)
        self._arguments = arguments
        self._kinds: list[tuple[str, Kind]] = [
            (field.name, field.metadata.get("kind") or _KINDS[hints[field.name]])
            for field in fields(arguments)
        ]
        # Types and names of the schema, such as "Tensor x", "SymInt layout_rows"
        self.parts = [part.format(name) for name, kind in self._kinds for part in kind.parts]
        self.names = [part.split()[-1] for part in self.parts]
        field_names = [name for name, _ in self._kinds]
        self.tensor_names = tuple(name for name in field_names if hints[name] in _TENSORS)
        self._other_names = tuple(name for name in field_names if name not in self.tensor_names)
        order = [*self.tensor_names, *self._other_names]
        self._positions = [order.index(name) for name in field_names]

    def tensors(self, arguments: Any) -> tuple[Tensor | None, ...]:
        """The values of the tensor fields, in the order of `tensor_names`."""
        return tuple([getattr(arguments, name) for name in self.tensor_names])

    def other_values(self, arguments: Any) -> tuple[Any, ...]:
        """The values of the other fields: layouts and options."""
        return tuple([getattr(arguments, name) for name in self._other_names])

    def join(self, tensors: Sequence[Tensor | None], other_values: Sequence[Any]) -> Any:
        """Rebuild the dataclass from the results of `tensors` and `other_values`."""
        values = (*tensors, *other_values)
        return self._arguments(*[values[position] for position in self._positions])

    def flatten(self, arguments: Any) -> list[Any]:
        """Convert the dataclass to the values of the schema's parts."""
        return [
            part for name, kind in self._kinds for part in kind.flatten(getattr(arguments, name))
        ]

    def restore(self, flat: Sequence[Any]) -> Any:
        """Rebuild the dataclass from the values of the parts: the inverse of `flatten`."""
        values = iter(flat)
        return self._arguments(
            *[kind.restore(*[next(values) for _ in kind.parts]) for _, kind in self._kinds]
        )
