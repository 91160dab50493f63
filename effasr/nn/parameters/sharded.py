"""Recognizes parameters that FSDP2 has sharded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded_tensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a `DTensor`.

    If nobody has imported the module, there is none: the import takes half a second, for which a
    command that only reads a model should not wait.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
