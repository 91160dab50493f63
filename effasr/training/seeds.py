"""Seeds of dropout and augmentation, and random choices of a step."""

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Return a seed that depends neither on the number of ranks nor on earlier steps."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of ``device``, as `torch.manual_seed` does."""
    # `torch.manual_seed` takes 1 ms: it seeds all devices, and formats the stack of calls for each
    # kind of device that is not in use.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def sample(choices: Sequence[T], seed: int, step: int) -> T:
    """Return the choice of a global step: the same for all its micro-batches, on every rank."""
    # So ranks compute equally long, and the gradient does not depend on the number of ranks.
    digest = hashlib.blake2b(struct.pack("<qq", seed, step), digest_size=8, person=b"choice")
    return choices[int.from_bytes(digest.digest(), "little") % len(choices)]
