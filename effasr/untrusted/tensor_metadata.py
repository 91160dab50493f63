"""Reads the untrusted metadata of a folder of torch.distributed.checkpoint, which is a pickle."""

import io
import math
import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from effasr.untrusted.files import open_regular, plain_name, read_bytes

FILE = ".metadata"
_MOST_BYTES = 256 << 20


def _member(cls: Any, name: str) -> Any:
    """Return a member of the one enumeration of metadata, which Python before 3.11.4 so names."""
    if cls is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it names an attribute, which no metadata of tensors has")
    return metadata._MEM_FORMAT_ENCODING[name]


_CLASSES: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("pathlib", "PosixPath"): PosixPath,
    # As Python 3.13 writes it.
    ("pathlib._local", "PosixPath"): PosixPath,
} | {
    (metadata.__name__, cls.__name__): cls
    for cls in (
        metadata.ChunkStorageMetadata, metadata.Metadata, metadata.MetadataIndex,
        metadata.StorageMeta, metadata.TensorProperties, metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
    )
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Makes what metadata of tensors consist of; a pickle can name any function to be called."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of tensors has")


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a folder that holds tensors alone, all of them in its own files.

    No code that the file names is run. `FileSystemReader.read_metadata` of torch would run it, and
    its planners would unpickle values that are no tensors without limits.
    """
    path = folder / FILE
    content = read_bytes(path, _MOST_BYTES)
    try:
        loaded = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(loaded, Metadata):
            raise TypeError(f"it holds {type(loaded).__name__}, not Metadata")
        names = {_file_name(info, path) for info in loaded.storage_data.values()}
        claimed = sum(_bytes(name, item) for name, item in loaded.state_dict_metadata.items())
    except Exception as error:  # A pickle may fail in any way.
        text = str(error)[:200] or type(error).__name__
        raise ValueError(f"{path} is damaged: {text}. Restore the checkpoint.") from error
    held = 0
    for name in sorted(names):
        with open_regular(folder / name) as file:
            held += file.seek(0, io.SEEK_END)
    if claimed > held:
        raise ValueError(
            f"{path} must not claim more values than its files have room for, but claims {claimed} "
            f"bytes in files of {held}. Restore the checkpoint."
        )
    return loaded


def _bytes(name: object, item: object) -> int:
    if not isinstance(name, str) or not isinstance(item, TensorStorageMetadata):
        raise TypeError(f"{name!r} is no tensor")
    sizes = list(item.size)
    if min(sizes, default=0) < 0:
        raise ValueError(f"{name!r} has a negative size in {sizes}")
    return math.prod(sizes) * item.properties.dtype.itemsize


def _file_name(info: Any, path: Path) -> str:
    if info.transform_descriptors:
        raise ValueError("a tensor is transformed, which effasr does not write")
    return plain_name(info.relative_path, f"a file of tensors in {path}")
