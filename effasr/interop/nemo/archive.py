"""Reading and writing of NeMo's ``.nemo`` files, without NeMo.

A ``.nemo`` is a tar, gzipped in older versions, of ``model_config.yaml``, ``model_weights.ckpt``
and files that the configuration names as ``nemo:FILE``; or a folder with the same files.
"""

import io
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from effasr.data.atomic_files import atomic_file
from effasr.untrusted.documents import YAML_BYTES, dump_yaml, parse_yaml
from effasr.untrusted.files import BoundedTar, open_regular, read_bytes
from effasr.untrusted.mistaken import wrong_file
from effasr.untrusted.tensors import named_tensors

CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
_PREFIX = "nemo:"
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_MOST_BYTES = 64 << 20
"""Most bytes of a file other than the weights."""

_MOST_MEMBERS = 10_000
_MOST_SMALL_BYTES = 256 << 20
"""Most bytes of all files other than the weights."""

_UNPACKED_RATIO = 20
"""Most bytes that a byte of a gzipped file stands for, beyond `_MOST_BYTES`; weights hardly shrink,
while gzip reaches 1,000 with zeros."""

# Exceptions for a damaged tar file, gzip stream or checkpoint.
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


@dataclass(frozen=True, slots=True)
class NemoArchive:
    path: Path  # Path of the file or folder
    config: dict[str, Any]  # Content of ``model_config.yaml``
    weights: dict[str, Tensor]
    files: dict[str, bytes]  # The other small files, by name

    def file(self, where: str, name: Any) -> bytes:
        """The content of a file that a field of the configuration names."""
        file = name.removeprefix(_PREFIX).rsplit("/", 1)[-1] if isinstance(name, str) else None
        if file is None or file not in self.files:
            raise ValueError(
                f"{self.path}: `{where}` must name a file in it, such as nemo:tokenizer.model, "
                f"but is {name!r}: save the model again with NeMo."
            )
        return self.files[file]


def read_archive(path: str | Path) -> NemoArchive:
    """Read a ``.nemo`` file, or a folder with its files.

    Only regular files at the top of the tar are read. Only the weights are written, under our own
    name in a temporary folder, which is removed afterwards.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file.")
    if path.is_dir():
        files: dict[str, bytes] = {}
        for file in sorted(path.iterdir()):
            if file.is_file() and _is_small(file.name, file.stat().st_size):
                files[file.name] = read_bytes(file, _MOST_BYTES)
                _check_amount(path, files)
        weights = path / WEIGHTS
        return _archive(path, files, weights if weights.is_file() else None)
    with tempfile.TemporaryDirectory(prefix="effasr_nemo_") as folder:
        weights = Path(folder) / "weights"
        try:
            files = _unpack(path, weights)
        except _DAMAGED as error:
            damaged = "must be a .nemo file, a tar, but cannot be read"
            raise wrong_file(path, "a .nemo file, a tar", error, damaged) from error
        # The mapped pages stay readable after the temporary folder is removed.
        return _archive(path, files, weights if weights.is_file() else None)


def _unpack(path: Path, weights: Path) -> dict[str, bytes]:
    """Read the members in their order, as a gzipped tar allows no other."""
    files: dict[str, bytes] = {}
    with (
        open_regular(path) as packed,
        BoundedTar(packed, _UNPACKED_RATIO, _MOST_BYTES) as content,
        tarfile.open(fileobj=cast(BinaryIO, content), mode="r:") as tar,
    ):
        for count, member in enumerate(tar, 1):
            if count > _MOST_MEMBERS:
                raise ValueError(f"{path} must have at most {_MOST_MEMBERS} files, but has more.")
            name = member.name.removeprefix("./")
            if not member.isfile() or "/" in name:
                continue
            source = tar.extractfile(member)
            assert source is not None  # a regular file
            if name == WEIGHTS:
                with weights.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
            elif _is_small(name, member.size):
                files[name] = source.read()
                _check_amount(path, files)
    return files


def _check_amount(path: Path, files: Mapping[str, bytes]) -> None:
    if sum(map(len, files.values())) > _MOST_SMALL_BYTES:
        raise ValueError(
            f"{path} must have at most {_MOST_SMALL_BYTES} bytes beside its weights, but has more."
        )


def _is_small(name: str, size: int) -> bool:
    """A second model, such as for word alignment, is not read."""
    return size <= _MOST_BYTES and not name.endswith((".ckpt", ".nemo"))


def _archive(path: Path, files: dict[str, bytes], weights: Path | None) -> NemoArchive:
    missing = [CONFIG] * (CONFIG not in files) + [WEIGHTS] * (weights is None)
    if missing or weights is None:
        raise ValueError(
            f"{path} must be a .nemo file, but has no {' and no '.join(missing)}: give what "
            "NeMo's `model.save_to` wrote. If they are in a folder of the tar, unpack it with "
            "`tar -xf`, and name that folder."
        )
    text = files.pop(CONFIG)
    if len(text) > YAML_BYTES:
        raise ValueError(f"{path}: {CONFIG} must have at most {YAML_BYTES} bytes, but has more.")
    try:
        config = parse_yaml(text.decode("utf-8"), f"{path}: {CONFIG}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {CONFIG} is not valid YAML: {error}.") from error
    config = _resolved(config, config)
    # A recipe, unlike a configuration, has the model in a separate section.
    if isinstance(config, dict) and "encoder" not in config:
        config = config.get("model", config)
    if not isinstance(config, dict):
        excerpt = repr(config)[:200]
        raise ValueError(f"{path}: {CONFIG} must be a mapping, but is {excerpt}.")
    return NemoArchive(path, config, named_tensors(weights, f"{path}: {WEIGHTS}"), files)


def _resolved(value: Any, root: Any) -> Any:
    """Replace references such as ``${model_defaults.enc_hidden}`` by the values that they name."""
    if isinstance(value, dict):
        return {key: _resolved(item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, root) for item in value]
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    target = root
    for key in match[1].split(".") if match else ():
        target = target.get(key) if isinstance(target, dict) else None
    plain = match and isinstance(target, bool | int | float | str)
    return target if plain else value


def write_archive(
    path: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], files: Mapping[str, bytes]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = dump_yaml(dict(config))
    with (
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as saved,
        atomic_file(path) as file,
    ):
        # Written next to the target: a disk with room for one has room for the other.
        torch.save(dict(weights), saved)
        saved.flush()
        with tarfile.open(fileobj=file, mode="w:") as tar:
            _add(tar, CONFIG, text.encode())
            for name, content in files.items():
                _add(tar, name, content)
            saved.seek(0)
            _add(tar, WEIGHTS, saved, os.fstat(saved.fileno()).st_size)


def _add(tar: tarfile.TarFile, name: str, content: bytes | Any, size: int | None = None) -> None:
    source: IO[bytes] = io.BytesIO(content) if isinstance(content, bytes) else content
    # NeMo expects names in the form of `tar -c .`.
    member = tarfile.TarInfo(f"./{name}")
    member.size = len(content) if size is None else size
    member.mode = 0o644
    tar.addfile(member, source)


def file_reference(name: str) -> str:
    return f"{_PREFIX}{name}"
