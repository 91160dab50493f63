"""How much memory `transducer_loss` may work in, beside its arguments and their gradients."""

from __future__ import annotations

_DEFAULT_BYTES = 512 * 2**20


class _Workspace:
    bytes = _DEFAULT_BYTES


def set_workspace(size: int) -> int:
    """Set how many bytes the Triton backend works in; 512 MiB unless this is called.

    The backend ``cpp`` takes of it what it needs, at most 32 MiB for each thread.

    A quarter is for numbers of lattice nodes, three quarters for rows of the joint's output and of
    the logits' gradient. More makes products larger and launches fewer; results change by rounding
    alone. One frame of one sequence, and the lattice of one sequence, are the least that is held at
    a time, however small the workspace; `effasr_kernels.transducer_loss.triton.backend` has more.

    The setting holds for the process (autograd runs backward passes in threads of its own), so it
    belongs to programs, not to libraries. Compiled code keeps what held when it was compiled.

    Args:
        size: In bytes, positive.

    Returns:
        The setting before this call, to restore it.

    Raises:
        ValueError: The size is not positive.
    """
    if size <= 0:
        raise ValueError(f"`size` must be positive, but is {size}.")
    before = _Workspace.bytes
    _Workspace.bytes = size
    return before


def workspace() -> int:
    """The bytes that `set_workspace` has set."""
    return _Workspace.bytes
