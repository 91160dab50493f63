"""Seeds of dropout and augmentation."""

from __future__ import annotations

import hashlib
import struct


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Return the seed of dropout and augmentation in micro-batch ``index`` of a global step.

    It does not depend on the number of ranks or on earlier steps.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
