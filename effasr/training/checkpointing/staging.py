"""Copies of tensors in host memory, from which checkpoints are written while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class HostCopies:
    """Buffers for copies, allocated once: pinned for tensors on a GPU.

    The next copy of a name overwrites the one before.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._mesh: DeviceMesh | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors on the CPU, complete; sharded ones stay sharded."""
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local.detach(), non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        return DTensor.from_local(
            buffer,
            self._mesh_like(tensor.device_mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _mesh_like(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh of the same ranks on the CPU."""
        if mesh.device_type == "cpu":
            return mesh
        if self._mesh is None:
            self._mesh = DeviceMesh("cpu", mesh.mesh)
        return self._mesh
