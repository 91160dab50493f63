"""Large tensors in a folder, in the format of torch.distributed.checkpoint.

Each process writes its own shards. Any number of processes can read them, each what it needs.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from effasr.untrusted.tensor_metadata import read_metadata


def write(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors, flushed to the disk."""
    writer = FileSystemWriter(folder)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state = dict(tensors)
    if group is not None:
        try:
            save(state, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            rank, (first, _) = min(error.failures.items())
            raise OSError(f"rank {rank} could not write its part: {first}") from error
        return
    # As `save` does without a process group, but without a warning each time.
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def describe(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the full shape and the dtype of each tensor; raises as `read_metadata`."""
    return {
        name: (item.size, item.properties.dtype)
        for name, item in read_metadata(folder).state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def read(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill tensors, whole or sharded, from a folder; other processes need not call this."""
    reader, metadata = FileSystemReader(folder), read_metadata(folder)
    if missing := sorted(tensors.keys() - metadata.state_dict_metadata.keys()):
        raise KeyError(f"{folder} has no {missing[0]}")
    try:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, True)
        local = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([local]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch and zipfile raise many kinds.
        # The first line: a refusal of torch goes on with advice to load without limits.
        (reason, *_) = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"{folder} holds damaged tensors: {reason[:200]}. Restore the checkpoint."
        ) from error


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, whole, on the CPU."""
    described = describe(folder).items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in described}
    read(tensors, folder)
    return tensors
