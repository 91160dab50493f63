"""Attention contexts and causal convolutions of NeMo's cache-aware streaming encoders.

With ``att_context_style: chunked_limited``, ``att_context_size: [L, R]`` are chunks of R + 1 frames
that see L frames before them, whole chunks; with ``regular`` a frame sees L frames before it and R
after it. -1 is no limit, and several sizes are drawn in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from effasr_kernels import Context

_STYLES = "regular", "chunked_limited"


def read_contexts(size: Any, style: Any) -> tuple[Context, ...]:
    """Return the contexts of ``encoder.att_context_size`` and ``encoder.att_context_style``.

    Raises:
        ValueError: They are not NeMo's, or of a style that is not supported here.
    """
    if style not in _STYLES:
        raise ValueError(
            f"`encoder.att_context_style` must be {' or '.join(_STYLES)}, but is {style}."
        )
    sizes: Any = [[-1, -1]] if size is None else size
    if isinstance(sizes, Sequence) and not any(isinstance(one, Sequence) for one in sizes):
        sizes = [sizes]
    if not isinstance(sizes, Sequence) or not sizes or not all(map(_is_size, sizes)):
        raise ValueError(
            "`encoder.att_context_size` must be two numbers of at least -1, which is unlimited, or "
            f"a list of such, but is {size!r}."
        )
    if list(map(list, sizes)) == [[-1, -1]]:
        return ()
    return tuple(_read(left, right, style) for left, right in sizes)


def _is_size(size: Any) -> bool:
    return (
        isinstance(size, Sequence)
        and len(size) == 2
        and all(type(side) is int and side >= -1 for side in size)
    )


def _read(left: int, right: int, style: str) -> Context:
    before = None if left < 0 else left
    if style == "regular" or right < 0:
        return Context(before, None if right < 0 else right, 1)
    if before is not None and before % (right + 1):
        raise ValueError(
            f"`encoder.att_context_size` must have whole chunks of {right + 1} frames on the left, "
            f"but has {left}, which NeMo refuses as well."
        )
    return Context(before, 0, right + 1)


def write_contexts(contexts: Sequence[Context]) -> dict[str, Any] | None:
    """Return ``att_context_size`` and ``att_context_style``; None if NeMo cannot express them."""
    if not contexts:
        return {"att_context_size": [-1, -1], "att_context_style": "regular"}
    number = lambda side: -1 if side is None else side
    if all(one.right == 0 and not (one.left or 0) % one.chunk for one in contexts):
        style, sizes = "chunked_limited", [[number(one.left), one.chunk - 1] for one in contexts]
    elif all(one.chunk == 1 for one in contexts):
        style, sizes = "regular", [[number(one.left), number(one.right)] for one in contexts]
    else:
        return None
    size = sizes if len(sizes) > 1 else sizes[0]
    return {"att_context_size": size, "att_context_style": style}


def read_convolution(size: Any, taps: int) -> bool:
    """Return whether ``encoder.conv_context_size`` is causal.

    Raises:
        ValueError: It is neither causal nor symmetric.
    """
    half = (taps - 1) // 2
    if size in ("causal", [taps - 1, 0]):
        return True
    if size not in (None, half, [half, half]):
        raise ValueError(
            f"`encoder.conv_context_size` must be null or [{half}, {half}], as many frames on "
            f"both sides, or causal, but is {size}."
        )
    return False
