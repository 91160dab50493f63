"""Limited context of self-attention: the frames that a query sees around its chunk."""

from dataclasses import dataclass

import torch
from torch import Tensor

UNLIMITED = 2**29
"""What stands for no limit in kernels: more than the rows of a sequence."""


@dataclass(frozen=True, slots=True)
class Context:
    r"""Limit self-attention to keys near the query's chunk.

    A sequence is cut into chunks of ``chunk`` rows. Query i, of chunk c = i // ``chunk``, sees the
    keys of its sequence from ``c * chunk - left`` to ``(c + 1) * chunk + right - 1``. With chunks
    of 1 that is a window that slides with the query; ``Context(None, 0, 1)`` is a causal mask.

    NeMo's ``att_context_size: [L, R]`` with ``att_context_style: chunked_limited`` is
    ``Context(L, 0, R + 1)``; with ``regular`` it is ``Context(L, R, 1)``.

    Attributes:
        left: Keys before the chunk; None for all.
        right: Keys after the chunk; None for all.
        chunk: Rows of a chunk.
    """

    left: int | None
    right: int | None = 0
    chunk: int = 1

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("left", self.left, 0),
            ("right", self.right, 0),
            ("chunk", self.chunk, 1),
        ):
            if value is None and name != "chunk":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                alternative = "" if name == "chunk" else " or None, for no limit"
                raise ValueError(
                    f"Context: `{name}` must be a whole number of at least {minimum}{alternative}, "
                    f"but is {value!r}."
                )

    @property
    def reach(self) -> int:
        """One more than the largest distance of a query and a key that it sees."""
        sides = [UNLIMITED if side is None else side for side in (self.left, self.right)]
        return max(sides) + self.chunk

    def bounds(self, longest: int) -> tuple[int, int, int]:
        """Return ``left``, ``right`` and ``chunk`` as numbers, for sequences of up to ``longest``.

        They are limited to ``longest``, which changes nothing, so that sums of them and of places
        in a sequence are 32-bit numbers.

        Raises:
            ValueError: ``longest`` is more than 2 ** 29.
        """
        if longest > UNLIMITED:
            raise ValueError(
                f"Context: sequences must have at most {UNLIMITED} rows, but one has {longest}."
            )
        limit = max(longest, 1)
        left, right = (limit if x is None else min(x, limit) for x in (self.left, self.right))
        return left, right, min(self.chunk, limit)

    def hidden(self, rows: int, device: torch.device) -> Tensor:
        """Which keys the queries of a sequence do not see: bool (rows, rows)."""
        left, right, chunk = self.bounds(rows)
        row = torch.arange(rows, device=device)
        first = (row // chunk * chunk)[:, None]
        return (row < first - left) | (row >= first + chunk + right)

    def pairs(self, rows: int) -> int:
        """Number of pairs of a query and a key that it sees, in a sequence."""
        left, right, chunk = self.bounds(rows)
        full_chunks, last_rows = divmod(rows, chunk)
        # Sums over whole chunks: of the ends of their keys, at most `rows`, and of the beginnings.
        unlimited = min(max((rows - right) // chunk, 0), full_chunks)
        ends = chunk * unlimited * (unlimited + 1) // 2 + right * unlimited
        ends += rows * (full_chunks - unlimited)
        later = range(left // chunk + 1, full_chunks)
        begins = chunk * (later.start + later.stop - 1) * len(later) // 2 - left * len(later)
        return chunk * (ends - begins) + last_rows * (rows - max(full_chunks * chunk - left, 0))
