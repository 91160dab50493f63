"""The memory limit of `transducer_loss`, beside its arguments and their gradients."""

from __future__ import annotations

_DEFAULT_BYTES = 512 * 2**20


class _Workspace:
    bytes = _DEFAULT_BYTES


def set_workspace(size: int) -> int:
    """Set the size of the workspace; the default is 512 MiB.

    The Triton backend uses a quarter for numbers of lattice nodes, and three quarters for rows of
    the joint's output and of the logits' gradient. A larger workspace makes products larger and
    launches fewer; results change only by rounding. The minimum is one frame of one sequence and
    the lattice of one sequence, however small the workspace; see
    `effasr_kernels.transducer_loss.triton.backend`. The backend ``cpp`` uses at most 32 MiB for
    each thread of it.

    The setting applies to the whole process (autograd runs backward passes in its own threads), so
    programs should set it, not libraries. Compiled code keeps the value from its compilation.

    Args:
        size: Size in bytes, positive.

    Returns:
        The setting before this call, to restore it.

    Raises:
        ValueError: ``size`` is not positive.
    """
    if size <= 0:
        raise ValueError(f"`size` must be positive, but is {size}.")
    before = _Workspace.bytes
    _Workspace.bytes = size
    return before


def workspace() -> int:
    """The size of the workspace in bytes."""
    return _Workspace.bytes
