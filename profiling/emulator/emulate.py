"""Kernels of `effasr_kernels` on the CPU, as they are compiled for a GPU."""

import functools
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import aot
import torch
from torch import Tensor

from effasr_kernels.runtime.cuda import CudaLaunch
from effasr_kernels.runtime.launch import Launch, diverted
from emulator.machine import Binary, cache_folder, load, run
from emulator.parse import encode

_CSRC = Path(__file__).parents[2] / "csrc"

_BINARIES: dict[tuple, Binary] = {}


@contextmanager
def emulated(architecture: int, seed: int = 0, *, counted: bool = False) -> Iterator[None]:
    run_launch = partial(execute, architecture=architecture, seed=seed, counted=counted)
    with diverted(run_launch, divmod(architecture, 10)):
        yield


def binaries() -> list[Binary]:
    return list(_BINARIES.values())


def execute(
    launch: Launch | CudaLaunch, architecture: int, seed: int = 0, *, counted: bool = False
) -> int:
    """Run one launch; returns how many instructions its warps have run."""
    if 0 in launch.grid:
        return 0
    if isinstance(launch, CudaLaunch):
        key = architecture, launch.kernel, launch.dtype, launch.width
        if key not in _BINARIES:
            ptx = compiled_by_nvcc(_CSRC / f"{launch.source}.cu", architecture)
            _BINARIES[key] = load(ptx, name_of(launch), launch.shared_bytes)
        storages: dict[int, tuple[str, int, int]] = {}
        for name, tensor in launch.tensors.items():
            _add_storage(storages, name, tensor)
        parameters, tensors = bytes(launch.call), list(storages.values())
    else:
        key = (architecture, *aot.key(launch))
        if key not in _BINARIES:
            ptx, shared_bytes = aot.compile_to_ptx(launch, architecture)
            _BINARIES[key] = load(ptx, shared_bytes=shared_bytes)
        parameters, tensors = arguments_of(launch, _BINARIES[key])
    binary = _BINARIES[key]
    settings = {"shared_bytes": binary.shared_bytes, "seed": seed, "counted": counted}
    return run(binary, launch.grid, parameters, tensors, **settings)


def name_of(launch: CudaLaunch) -> str:
    """The mangled name of an instance of a kernel, as a pattern."""
    dtype = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}[launch.dtype]
    return rf"\w*\d{launch.kernel}INS_\d+{dtype}ELi{launch.width}E\w*"


@functools.cache
def compiled_by_nvcc(source: Path, architecture: int) -> str:
    """The PTX of all kernels of a source, with its lines; built once for each version of it."""
    digest = hashlib.sha256(f"{source} {architecture}".encode())
    for path in sorted((source, *source.parent.rglob("*.h"), *source.parent.rglob("*.cuh"))):
        digest.update(path.read_bytes())
    built = cache_folder() / f"{source.stem}_{digest.hexdigest()[:16]}.ptx"
    if not built.exists():
        target = {90: "90a"}.get(architecture, architecture)
        command = "nvcc", "-std=c++17", "-O3", "-lineinfo", "-ptx", f"-arch=sm_{target}"
        ptx = subprocess.run(
            [*command, str(source), "-o", "-"], check=True, capture_output=True, text=True
        ).stdout
        built.write_text(ptx)
    return built.read_text()


def arguments_of(launch: Launch, binary: Binary) -> tuple[bytes, list[tuple[str, int, int]]]:
    """Return the parameters' bytes, and the memory that tensors among them own."""
    types, _, _ = aot.signature(launch)
    # Behind the arguments come two pointers to memory that no kernel here asks for.
    arguments = {name: launch.args[name] for name, kind in types.items() if kind != "constexpr"}
    # A tuple of tensors is a pointer for each.
    values = [
        (name, value)
        for name, argument in arguments.items()
        for value in (argument if isinstance(argument, tuple) else (argument,))
    ]
    parameters = bytearray(binary.program.parameter_bytes)
    storages: dict[int, tuple[str, int, int]] = {}
    for (name, value), (offset, size) in zip(values, binary.program.parameters, strict=False):
        if isinstance(value, Tensor):
            _add_storage(storages, name, value)
            value = value.data_ptr()
        parameters[offset : offset + size] = encode(value, size, isinstance(value, float))
    for value in (*launch.read, *launch.written):
        _add_storage(storages, "tensor of a table", value)
    return bytes(parameters), list(storages.values())


def _add_storage(storages: dict[int, tuple[str, int, int]], name: str, x: Tensor) -> None:
    storage = x.untyped_storage()
    storages.setdefault(storage.data_ptr(), (name, storage.data_ptr(), storage.nbytes()))
