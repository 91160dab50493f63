"""Memory-mapped cache of parsed manifests.

Reading takes most of the start-up time: every line is parsed and every text tokenized. The
resulting table depends on the manifests, the tokenizer and a few limits, but on no budget. Its file
is named by a digest of these, so that a table is found only under its own key.
"""

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, astuple, fields, is_dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, get_type_hints

import numpy as np

from effasr.data.atomic_files import atomic_file
from effasr.data.audio.waveform import AudioProblem, samples_in
from effasr.data.checksums import installed_version, sha256
from effasr.data.filters.config import Limits
from effasr.data.filters.rules import Dropped
from effasr.data.index.columns import decode
from effasr.data.index.index_reader import build_table
from effasr.data.index.utterance_table import UtteranceTable
from effasr.data.locks import building
from effasr.data.manifest.reader import deciding_files
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer

# The file begins with a line of JSON, padded with spaces to `_HEADER` bytes: ``format``, ``key``,
# for each column its dtype, byte offset and length, and a CRC-32 of the columns and of all that
# follows. Columns begin at multiples of `_ALIGNMENT`. It is mapped, so that processes share its
# memory; safetensors would copy the columns, and has no checksum.
_FORMAT = "effasr columns 3"
_HEADER = 16_384
_ALIGNMENT = 4_096
_BLOCK = 2**24  # bytes that are written or checked at a time


class Damaged(ValueError):
    """A column file is truncated, corrupted or of another key."""


def write_columns(
    path: Path,
    key: str,
    columns: Mapping[str, np.ndarray],
    progress: Callable[[int], None] = lambda size: None,
) -> int:
    """Write a file and return its size; processes that map a replaced file keep that."""
    places: dict[str, list[Any]] = {}
    end = _HEADER
    for name, values in columns.items():
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        places[name] = [values.dtype.str, begin, len(values)]
        end = begin + values.nbytes
    checksum = zlib.crc32(json.dumps(places).encode())
    with atomic_file(path) as file:
        file.seek(_HEADER)
        for name, values in columns.items():
            padding = bytes(places[name][1] - file.tell())
            data = np.ascontiguousarray(values).view(np.uint8).data
            blocks = (data[first : first + _BLOCK] for first in range(0, len(data), _BLOCK))
            for block in chain([padding], blocks):
                checksum = zlib.crc32(block, checksum)
                file.write(block)
                progress(file.tell())
        file.seek(0)
        header = {"format": _FORMAT, "key": key, "columns": places, "checksum": checksum}
        file.write(json.dumps(header).encode().ljust(_HEADER - 1) + b"\n")
    return end


def map_columns(path: Path, key: str) -> dict[str, np.ndarray]:
    """Map a file into memory, read-only, after checking its checksum.

    While a process has it mapped, or a fork of that process, `remove_unused` does not remove it.
    """
    with path.open("rb", buffering=0) as file:
        try:
            header = json.loads(file.read(_HEADER))
            names = header["format"], header["key"]
            places, expected = header["columns"], header["checksum"]
        except (ValueError, TypeError, KeyError) as error:
            raise Damaged(f"{path}: its header cannot be read ({error})") from error
        if names != (_FORMAT, key):
            raise Damaged(f"{path}: its format or key is not the expected one")
        checksum = zlib.crc32(json.dumps(places).encode())
        # Read instead of mapped: mapped pages would count as memory of every process.
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
        if checksum != expected:
            raise Damaged(f"{path}: its content does not match its checksum")
        with suppress(OSError):
            # The map keeps a copy of the descriptor and with it the lock.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Utterances are read in random order, so read-ahead is of no use.
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return {
        name: np.frombuffer(mapped, kind, count, offset) if count else np.zeros(0, kind)
        for name, (kind, offset, count) in places.items()
    }


def remove_unused(path: Path) -> bool:
    """Remove a file that no process has mapped, and return whether it was removed.

    Where the file system has no locks, the file is kept.
    """
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:
        return False
    return True


log = logging.getLogger(__name__)

_LEAST_BYTES = 4 * 2**20  # smaller manifests are not cached: reading them takes seconds

_GZIP = 8  # assumed compression ratio of gzipped manifests

_KEPT = 3  # files kept for the same manifests, with other limits or another tokenizer

_MOST_JOBS = 32
_NOTE_EVERY_S = 10.0
_READ = "reading manifests: {:,} utterances, {:,.0f} a second"
_PROBES = 256  # audio files whose size and modification time are compared, to detect replaced audio

T = TypeVar("T")

_PACKAGES = ("effasr", "lhotse", "numpy", "sentencepiece", "soundfile", "tokenizers")


class CorpusCache:
    """Reads manifests as `index_reader.build_table` does, or maps an earlier result.

    If several processes request the same table, one reads with all processors of the machine and
    the others wait. Without ``folder``, nothing is cached; ``note`` is called every few seconds
    with the progress of reading; ``least_bytes`` is the size below which manifests are not cached.
    """

    def __init__(
        self,
        folder: Path | None,
        note: Callable[[str], None] = lambda text: None,
        *,
        jobs: int | None = None,
        least_bytes: int | None = None,
    ) -> None:
        self._folder = folder
        self._note = note
        self._jobs = jobs or min(_MOST_JOBS, _processors())
        self._least_bytes = _LEAST_BYTES if least_bytes is None else least_bytes

    def __call__(
        self,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        limits: Limits,
        language: str,
        sources: Sequence[int],
    ) -> UtteranceTable:
        arguments = (paths, tokenizer, limits, language, sources)
        folder, files = self._folder, _files(paths)
        if folder is None or files is None or sum(map(_size, chain(*files))) < self._least_bytes:
            return build_table(*arguments, progress=_Progress(_READ, self._note))
        key = _key(arguments, *files)
        path = folder / f"{_name(arguments)}-{key}.corpus"
        if (table := self._find(path, key)) is not None:
            return table
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = path.with_suffix(".lock")
            with building(lock, self._note) as (report_progress, is_locked):
                table = self._find(path, key)
                if table is None:
                    # Left by a killed process; without locks another may be writing it.
                    for leftover in folder.glob(f"{path.name}.*.partial") if is_locked else ():
                        leftover.unlink(missing_ok=True)
                    table = self._build(path, key, arguments, files, report_progress)
                return table
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ValueError(
                    f"`cache`: {folder} must have room for the parsed manifests, about 0.5 kB for "
                    f"each utterance, but has not ({error.strerror}): free some space, "
                    "name another folder, or set data.cache=null."
                ) from error
            if error.errno in (errno.EEXIST, errno.ENOTDIR):
                raise ValueError(
                    f"`cache` must be a folder, but {folder} is not one: name another folder."
                ) from error
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            log.warning("%s cannot be written to (%s): nothing is cached", folder, error)
            return build_table(*arguments, progress=_Progress(_READ, self._note))

    def _find(self, path: Path, key: str) -> UtteranceTable | None:
        try:
            columns = map_columns(path, key)
        except FileNotFoundError:
            return None
        except (Damaged, OSError) as error:
            log.warning("%s; the cache file is built again", error)
            return None
        table, meta = _restored(columns), json.loads(columns["meta"].tobytes())
        if _audio_stats(table) != [list(map(tuple, meta[name])) for name in ("missed", "probes")]:
            self._note("audio files have changed since the manifests were read: reading them again")
            return None
        with suppress(OSError):
            os.utime(path)
        self._note(f"{len(table):,} utterances, cached in {path}")
        return table

    def _build(
        self,
        path: Path,
        key: str,
        arguments: tuple[Any, ...],
        files: tuple[list[Path], list[Path]],
        report_progress: Callable[[str], None],
    ) -> UtteranceTable:
        """Read the manifests, write the cache file and map it as all other processes do."""
        started = time.monotonic()
        progress = _Progress(_READ, self._note, report_progress)
        table = build_table(*arguments, jobs=self._jobs, progress=progress)
        report_progress("checking that the manifests have not changed")
        if _key(arguments, *files) != key:
            names = ", ".join(map(str, arguments[0]))
            raise ValueError(f"{names}: must not change while it is read, but did: start again.")
        written = _Progress(
            "writing the corpus: {:,} bytes, {:,.0f} a second", self._note, report_progress
        )
        size = write_columns(path, key, _columns(table), written)
        # The age of a file is not reliable: a clock that was set back makes this one the oldest.
        older = [file for file in _by_age(path) if file != path]
        for old in older[_KEPT - 1 :]:
            if remove_unused(old):
                old.with_suffix(".lock").unlink(missing_ok=True)
                self._note(f"removed {old}: the same manifests have {_KEPT} other files")
        seconds = time.monotonic() - started
        self._note(
            f"read {len(table) + len(table.dropped):,} utterances in {seconds:.0f} s, cached "
            f"in {path} ({size / 1e9:.1f} GB)"
        )
        return _restored(map_columns(path, key))


class _Progress:
    """Reports a count and its rate every few seconds."""

    def __init__(self, text: str, *sinks: Callable[[str], None]) -> None:
        self._text = text
        self._sinks = sinks
        self._started = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        if now - self._last >= _NOTE_EVERY_S:
            self._last = now
            rate = count / (now - self._started)
            for sink in self._sinks:
                sink(self._text.format(count, rate))


def _columns(table: UtteranceTable) -> dict[str, np.ndarray]:
    """Return a table as named arrays; `_restored` is the inverse."""
    missed, probes = _audio_stats(table)
    meta = {
        "dropped": [list(astuple(drop)) for drop in table.dropped],
        "prompts": [asdict(prompt) for prompt in table.prompts],
        "missed": missed,
        "probes": probes,
    }
    encoded = json.dumps(meta, ensure_ascii=True).encode()
    return _flattened(table) | {"meta": np.frombuffer(encoded, np.uint8)}


def _restored(columns: dict[str, np.ndarray]) -> UtteranceTable:
    meta = json.loads(columns["meta"].tobytes())
    prompts = tuple(Prompt(**prompt) for prompt in meta["prompts"])
    dropped = tuple(Dropped(*drop) for drop in meta["dropped"])
    return _unflattened(UtteranceTable, columns, dropped=dropped, prompts=prompts)


def _flattened(value: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """Return the arrays of a dataclass and of nested dataclasses, by dotted path."""
    columns: dict[str, np.ndarray] = {}
    for field in fields(value):
        part, name = getattr(value, field.name), f"{prefix}{field.name}"
        if isinstance(part, np.ndarray):
            columns[name] = part
        elif is_dataclass(part):
            columns |= _flattened(part, f"{name}.")
    return columns


def _unflattened(
    cls: type[T], columns: dict[str, np.ndarray], prefix: str = "", **values: Any
) -> T:
    for name, kind in get_type_hints(cls).items():
        if kind is np.ndarray:
            values[name] = columns[f"{prefix}{name}"]
        elif is_dataclass(kind):
            values[name] = _unflattened(kind, columns, f"{prefix}{name}.")  # type: ignore[arg-type]
    return cls(**values)


_Stat = tuple[str, int | None, int | None]


def _audio_stats(table: UtteranceTable) -> list[list[_Stat]]:
    """Stat audio files that could not be used, which may exist now, and a sample of the others."""
    problems = set(map(str, AudioProblem))
    missed = [_stat(drop.audio) for drop in table.dropped if drop.reason in problems]
    opened = np.flatnonzero(table.opened)
    chosen = opened[np.linspace(0, len(opened) - 1, min(_PROBES, len(opened))).astype(np.int64)]
    return [missed, [_stat(decode(table.audio.paths[row])) for row in table.rows[chosen]]]


def _stat(file: str) -> _Stat:
    try:
        state = os.stat(file)
    except (OSError, ValueError):  # A path with a zero byte is no path.
        return file, None, None
    return file, state.st_size, state.st_mtime_ns


def _files(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]] | None:
    contents, archives = [], []
    for path in paths:
        versions = deciding_files(path)
        if versions is None:
            return None
        contents += versions[0]
        archives += versions[1]
    return contents, archives


def _name(arguments: tuple[Any, ...]) -> str:
    paths = [str(Path(path).absolute()) for path in arguments[0]]
    return hashlib.sha256(json.dumps(paths).encode()).hexdigest()[:8]


def _by_age(path: Path) -> list[Path]:
    """Return the cache files of the same manifests, the most recently used first."""
    ages = {}
    for file in path.parent.glob(f"{path.name.partition('-')[0]}-*.corpus"):
        with suppress(FileNotFoundError):
            ages[file] = file.stat().st_mtime_ns
    return sorted(ages, key=lambda file: -ages[file])


def _key(arguments: tuple[Any, ...], files: list[Path], archives: list[Path]) -> str:
    """Return a digest of everything that determines the table."""
    paths, tokenizer, limits, language, sources = arguments
    longest = limits.framing.frames(samples_in(limits.max_duration))
    if limits.frame_budget is not None and limits.frame_budget >= longest:
        # Such a budget drops nothing: budgets of the usual sizes share one table.
        limits = replace(limits, frame_budget=None)
    parts = {
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "code": _code(),
        # Absolute, because audio paths may be relative to the manifest's folder.
        "paths": [str(Path(path).absolute()) for path in paths],
        "tokenizer": [type(tokenizer).__qualname__, *_tokenizer_digests(tokenizer)],
        "limits": asdict(limits),
        "files": _digests(files),
        "archives": [_stat(str(file)) for file in archives],
        "language": language,
        "sources": list(sources),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _digests(files: list[Path]) -> list[list[str]]:
    """Return [name, digest of the content] of each file."""
    with ThreadPoolExecutor(4) as executor:
        digests = executor.map(_digest, files)
        return [[file.name, digest] for file, digest in zip(files, digests, strict=True)]


def _digest(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}.") from error


def _size(path: Path) -> int:
    return (_stat(str(path))[1] or 0) * (_GZIP if path.suffix == ".gz" else 1)


def _tokenizer_digests(tokenizer: Tokenizer) -> list[list[str]]:
    with TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return _digests(sorted(file for file in Path(folder).rglob("*") if file.is_file()))


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _code() -> str:
    """Digest the sources of `effasr.data`, which change more often than the version."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
