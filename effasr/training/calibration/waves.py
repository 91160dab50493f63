"""Frame budgets whose matrix products fill every multiprocessor of a GPU.

A product computes its result in tiles, one on a multiprocessor at a time. Where the number of tiles
is no multiple of the number of multiprocessors, some wait for the last tiles: 6,000 frames of 1,024
channels are 188 tiles, which take 132 multiprocessors as long as 264.
"""

from __future__ import annotations

import math

_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""The usual tile of a 16-bit product of cuBLAS on Hopper."""


def whole_waves(width: int, multiprocessors: int) -> int:
    """Return the least number of frames whose products fill all multiprocessors evenly.

    Its multiples do, too, and so do products to a multiple of the width, such as those of feed
    forward layers.
    """
    for name, value in (("width", width), ("multiprocessors", multiprocessors)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {value}.")
    columns = math.ceil(width / _TILE_COLUMNS)
    return _TILE_ROWS * (multiprocessors // math.gcd(multiprocessors, columns))
