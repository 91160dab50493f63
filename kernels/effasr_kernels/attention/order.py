"""The order in which backends of `attention` are tried."""

import torch

from effasr_kernels.runtime.dispatch import Backend

ORDER = (
    Backend.TRITON,
    Backend.VARLEN,
    Backend.FLASH_ATTN_2,
    Backend.FLASH_ATTN_4,
    Backend.CPP,
    Backend.REFERENCE,
)
"""``triton`` is first, as it supports the whole contract.

FlashAttention 3 runs only on request: it supports inference but not training, and compiled code
cannot distinguish the two when it runs.
"""


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an available NVIDIA GPU; None for any other device."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)
