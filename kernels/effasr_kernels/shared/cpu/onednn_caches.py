"""Limits of oneDNN's caches, which otherwise grow with every new length of a batch."""

from __future__ import annotations

import os

CACHE_ENTRIES = 64
"""Entries of each cache: more than the shapes of one batch, in which layers repeat."""

_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The variables of oneDNN itself and of ideep, the layer between it and PyTorch."""


def limit_onednn_caches() -> None:
    """Limit oneDNN's caches to `CACHE_ENTRIES`, unless the environment sets their capacity."""
    # oneDNN compiles code for each shape and keeps that of the last 1024 shapes. A packed batch
    # seldom has the length of another one, so that hardly an entry is used in a later batch, and a
    # process grows by hundreds of megabytes in its first thousand batches. Both libraries read the
    # environment at their first operation; a later call has no effect.
    for name in _VARIABLES:
        os.environ.setdefault(name, str(CACHE_ENTRIES))
