"""The machine, built with the compiler that is there, and launches on it."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emulator.parse import Operations, Parser, Program

_SOURCES = Path(__file__).parent / "native"
_MOST_STEPS = 20_000_000
_OPTIONS = ("-std=c++20", "-O2", "-fno-strict-aliasing", "-fPIC", "-shared")
COUNTS = ("issued", "sectors", "needed", "wavefronts", "fewest", "products")
"""Counters of each instruction; see ``native/counts.h``."""


class Fault(RuntimeError):
    """An error that a GPU would make, at times or always."""


class _Tensor(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("name", ctypes.c_char_p))


_POINTER, _INT, _UINT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32


class _Launch(ctypes.Structure):
    _fields_ = (
        *(("code", _POINTER), ("length", _INT), ("operands", _POINTER), ("words", _INT)),
        *(("constants", _POINTER), ("num_constants", _INT)),
        *(("specials", _POINTER), ("num_specials", _INT)),
        *(("parameters", ctypes.c_char_p), ("parameter_bytes", _INT)),
        *(("threads", _UINT), ("shared_bytes", _UINT), ("local_bytes", _UINT), ("grid", _UINT * 3)),
        *(("tensors", _POINTER), ("num_tensors", _INT)),
        *(("seed", ctypes.c_uint64), ("most_steps", ctypes.c_uint64), ("counts", _POINTER)),
    )


@dataclass(frozen=True, slots=True)
class Binary:
    program: Program
    code: array
    operands: array
    constants: array
    specials: array
    counts: array
    shared_bytes: int  # dynamic


def cache_folder() -> Path:
    """Of what is compiled, for later processes of this user."""
    folder = Path(tempfile.gettempdir()) / f"effasr_ptx_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def library() -> ctypes.CDLL:
    """Build the machine, once for each version of its sources."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    built = cache_folder() / f"machine_{digest.hexdigest()[:16]}.so"
    if not built.exists():
        partial = built.with_suffix(f".{os.getpid()}")
        command = [compiler, *_OPTIONS, str(_SOURCES / "machine.cpp"), "-o", str(partial)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        partial.replace(built)
    loaded = ctypes.CDLL(str(built))
    loaded.ptx_special.restype = ctypes.c_char_p
    return loaded


@functools.cache
def operations() -> Operations:
    name, kinds = ctypes.c_char_p(), ctypes.c_char_p()
    ask = library().ptx_operation
    lanes = {}
    for number in range(ask(1 << 30, None, None)):
        ask(number, ctypes.byref(name), ctypes.byref(kinds))
        lanes |= dict.fromkeys(_text(name).split(), (number, _text(kinds)))
    specials = {}
    while (special := library().ptx_special(len(specials))) is not None:
        specials[special.decode()] = 10000 + len(specials)
    return Operations(lanes, specials)


def load(ptx: str, kernel: str = r"\w+", shared_bytes: int = 0) -> Binary:
    program = Parser(operations()).parse(ptx, kernel)
    flat = lambda rows: array("i", [_signed(x) for row in rows for x in row])
    constants = (
        (position, wide, value & 0xFFFFFFFF, value >> 32)
        for position, wide, value in program.constants
    )
    return Binary(
        program,
        flat(program.code),
        array("i", program.operands),
        flat(constants),
        flat(program.specials),
        array("Q", bytes(8 * len(COUNTS) * len(program.code))),
        shared_bytes,
    )


def run(
    binary: Binary,
    grid: Sequence[int],
    parameters: bytes,
    tensors: Sequence[tuple[str, int, int]],
    *,
    shared_bytes: int,  # dynamic
    seed: int = 0,
    counted: bool = False,
) -> int:
    """Launch a kernel; returns how many instructions its warps have run."""
    program = binary.program
    pointer = lambda values: values.buffer_info()[0]
    places = (_Tensor * len(tensors))(*((at, size, name.encode()) for name, at, size in tensors))
    launch = _Launch(
        *(pointer(binary.code), len(program.code), pointer(binary.operands), program.words),
        *(pointer(binary.constants), len(program.constants)),
        *(pointer(binary.specials), len(program.specials), parameters, len(parameters)),
        *(program.threads, program.shared_bytes + shared_bytes, program.local_bytes),
        (_UINT * 3)(*grid, *[1] * (3 - len(grid))),
        *(ctypes.addressof(places), len(tensors), seed, _MOST_STEPS),
        pointer(binary.counts) if counted else None,
    )
    error = ctypes.create_string_buffer(1000)
    line, steps = ctypes.c_int(), ctypes.c_uint64()
    arguments = ctypes.byref(launch), error, len(error), ctypes.byref(line), ctypes.byref(steps)
    if library().ptx_run(*arguments):
        where = program.lines[line.value]
        raise Fault(f"{program.name}, {where}: {error.value.decode()}")
    return steps.value


def _text(value: ctypes.c_char_p) -> str:
    return (value.value or b"").decode()


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
