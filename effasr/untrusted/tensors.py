"""Reads files of ``torch.save`` that others made."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.untrusted.files import open_regular

_SLACK_BYTES = 1 << 20
"""Bytes by which the content of a file may exceed its size."""


def load_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Return what ``torch.save`` wrote, tensors and plain values alone, on the CPU.

    No program in the file is run: only ``weights_only`` unpickling is used. torch writes files
    without compression, so a file whose content is larger than the file is refused.

    Args:
        path: The file.
        mmap: Whether the pages of tensors are read when they are used; files of torch before 1.6
            are no zip, and are always read at once.

    Raises:
        OSError: It cannot be opened.
        pickle.UnpicklingError: It holds other things than tensors and plain values.
        ValueError: It is no regular file, or its content is compressed.
        Exception: It is damaged; torch and zipfile raise many kinds.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            with zipfile.ZipFile(file) as content:
                if sum(entry.file_size for entry in content.infolist()) > size + _SLACK_BYTES:
                    raise ValueError(f"{path} must not be compressed, but is: save it with torch.")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)


def is_honest(tensor: Tensor) -> bool:
    """Return whether a tensor has as many values as it holds: strides of 0 make more of one."""
    values = tensor.numel() * tensor.element_size()
    return tensor.layout == torch.strided and values <= tensor.untyped_storage().nbytes()
