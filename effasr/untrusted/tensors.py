"""Reads untrusted files of ``torch.save``."""

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.untrusted.files import open_regular
from effasr.untrusted.mistaken import mistaken

_SLACK_BYTES = 1 << 20
"""Largest number of bytes by which the content of a file may exceed the file's size."""


def load_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Load a ``torch.save`` file of tensors and plain values on the CPU.

    No code in the file is run: only ``weights_only`` unpickling is used. torch writes files without
    compression, so a file whose content is larger than the file is refused. Files of torch before
    1.6 are no zip files, and are not mapped. Besides OSError, UnpicklingError (other content) and
    ValueError, torch and zipfile raise various exceptions for a damaged file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            with zipfile.ZipFile(file) as content:
                if sum(entry.file_size for entry in content.infolist()) > size + _SLACK_BYTES:
                    raise ValueError(f"{path} must not be compressed, but is: save it with torch.")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)


def named_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Load a ``torch.save`` file of tensors by name; messages have another name of the file."""
    kind = mistaken(path)
    if kind is not None and "torch.save" not in kind[0]:
        raise ValueError(f"{name} must be a file of torch.save, but is {kind[0]}: {kind[1]}.")
    try:
        state = load_tensors(path, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name} must hold tensors alone, but does not, and is not opened as it could run a "
            "program: load and save the model with the program that wrote it, if you trust it."
        ) from error
    except Exception as error:  # torch and zipfile raise many kinds, such as IndexError.
        raise ValueError(f"{name} is damaged: {error}: copy it again.") from error
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str) and torch.is_tensor(value) and is_honest(value)
        for key, value in state.items()
    ):
        raise ValueError(f"{name} must hold tensors by name, but does not.")
    return dict(state)


def is_honest(tensor: Tensor) -> bool:
    """Whether a tensor's storage holds all its values (strides of 0 repeat values)."""
    values = tensor.numel() * tensor.element_size()
    return tensor.layout == torch.strided and values <= tensor.untyped_storage().nbytes()
