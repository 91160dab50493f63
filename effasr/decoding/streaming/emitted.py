"""A token of a stream."""

from __future__ import annotations

from typing import NamedTuple


class Emitted(NamedTuple):
    """A token and the frame of its chunk, from 0, at which a search emits it."""

    token: int
    frame: int
