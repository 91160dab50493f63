"""Memory of the GPU, or of this process without one."""

import os
import resource
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory: of tensors on the GPU, or of this process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_bytes(device: torch.device) -> int:
    """Return the memory of the GPU, or of this machine within the limits of its control groups."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits()])


def in_use() -> str:
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        total = total_bytes(torch.device("cuda", torch.cuda.current_device()))
        return (
            f"tensors hold {gib(allocated)} and PyTorch reserves {gib(reserved)} of the GPU's "
            f"{gib(total)}"
        )
    return f"this process has held {gib(peak_bytes(torch.device('cpu')))} at most"


def gib(count: float) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.1f} MiB"


def _cgroup_limits() -> list[int]:
    """Return the memory limits of this process's control groups; version 2, then version 1."""
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # A group is limited by its ancestors too; inside a container its own group is the root.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            limits += _number(folder / name)
    return limits


def _number(path: Path) -> list[int]:
    try:
        return [int(path.read_text())]
    except (OSError, ValueError):
        return []
