"""Files of object stores and servers, by URLs of fsspec, as files of a local cache.

A URL has one path in the cache: ``s3://bucket/key`` is ``FOLDER/files/s3/bucket/key``. A file that
is not downloaded yet is empty there. The readers of this project know paths only:
`effasr.untrusted.files` downloads such a file when it is opened. Of archives, only the byte ranges
that are read are downloaded.
"""

import errno
import fcntl
import hashlib
import io
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar, cast

log = logging.getLogger(__name__)

CACHE, CACHE_GB, PATIENCE = (
    "EFFASR_REMOTE_CACHE",
    "EFFASR_REMOTE_CACHE_GB",
    "EFFASR_REMOTE_PATIENCE",
)
"""Environment variables: the folder, the size beyond which the files that were not used for longest
are removed, and the seconds for which a failed transfer is tried again."""

_DEFAULTS = {CACHE_GB: 50.0, PATIENCE: 300.0}
_LOCAL = {
    *("asynclocal", "async_wrapper", "asyncwrapper", "blockcache", "cached", "dask", "data", "dir"),
    *("file", "filecache", "generic", "git", "jlab", "jupyter", "libarchive", "local", "pyscript"),
    *("reference", "root", "simplecache", "tar", "zip"),
}
"""Protocols of fsspec for files of this machine, of other files, and of notebooks."""

_ARCHIVES = (".tar",)  # others are downloaded as a whole
_TEXTS = (
    *(".json", ".jsonl", ".gz", ".csv", ".tsv", ".txt", ".yaml", ".yml", ".scp", ".stm", ".ctm"),
    *(".srt", ".vtt", ".lab", ".trn", ".model", ".vocab", ""),
)
_BLOCK = 256 << 10  # bytes that are read of an archive at a time, as its headers are far apart
_CONNECTIONS = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 20.0
_IN_USE_S = 60.0  # files that were used so recently are not removed
_OF_CONNECTION = re.compile(
    "Connect|Timeout|Stream|Parser|Incomplete|Payload|Disconnect|HTTPClient"
)
"""In the names of errors that botocore, aiohttp, requests and others have for broken transfers."""

_PERMANENT = {errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.ENOSPC}

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*[A-Za-z0-9]):(//?)")
"""The protocol of a URL, or several; a `Path` of a URL has one slash only."""

T = TypeVar("T")


class RemoteError(OSError):
    """A transfer failed for good, although it was tried again."""


def is_url(value: object) -> TypeGuard[str | Path]:
    if not isinstance(value, str | Path) or (match := _URL.match(str(value))) is None:
        return False
    return match[2] == "//" or isinstance(value, Path)


def without_credentials(url: str) -> str:
    """Return a URL for messages and logs, without user, password, query and fragment."""
    return re.sub(r"(?<=/)[^/@]*:[^/@]*@|[?#].*", "", url, flags=re.DOTALL)


def canonical(url: str | Path) -> str:
    """Check a URL, and return it with two slashes and without one at its end."""
    match = _URL.match(str(url))
    assert match is not None
    protocol, path = match[1].lower(), str(url)[match.end() :].rstrip("/")
    shown = without_credentials(f"{protocol}://{path}")[:200]
    if protocol in _LOCAL or ":" in protocol:
        raise ValueError(f"{shown}: a URL must be of a store or a server: name the file itself.")
    if shown != f"{protocol}://{path}"[:200]:
        raise ValueError(
            f"{shown}: a URL must have neither a password nor a query such as a signature, which "
            "would be in logs and files of runs: give credentials by the environment or the files "
            "of the store's own tools, or download it first, such as by `curl -o FILE`."
        )
    if not path or any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
        raise ValueError(f"{shown}: a URL must have no empty part, no `.` and no `..`.")
    return f"{protocol}://{path}"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(CACHE) or f"{base}/effasr/remote").absolute()


def local_path(url: str | Path, kind: str = "files") -> Path:
    """Return the path of a URL in the cache; nothing is downloaded."""
    return cache_folder() / kind / canonical(url).replace("://", "/", 1)


def url_of(path: str | Path) -> str | None:
    """Return the URL of a path in the cache; None of any other path."""
    root, text = f"{cache_folder()}/files/", str(path)
    protocol, slash, remainder = text.removeprefix(root).partition("/")
    return f"{protocol}://{remainder}" if text.startswith(root) and slash else None


def shown(text: str) -> str:
    """Return a text in which paths in the cache are the URLs that they stand for."""
    cached = f"{re.escape(str(cache_folder()))}/(?:files|runs)/([a-z0-9+.-]+)/"
    return re.sub(cached, r"\1://", text)


def localized(path: str | Path, *, whole: bool = False) -> Path:
    """Return the local path of a manifest or a model; of a URL, texts are downloaded at once.

    With ``whole``, all files of a folder are, and archives, too.
    """
    return _localized(canonical(path), whole) if is_url(path) else Path(path)


@cache  # a process sees one version
def _localized(url: str, whole: bool) -> Path:
    parent, _, name = url.rpartition("/")
    is_pattern = any(mark in name for mark in ("*", "{", "_OP_"))
    try:
        if is_pattern:
            _list(parent, whole)
        else:
            info = _call(url, lambda fs, path: fs.info(path))
            if info["type"] == "directory":
                _list(url, whole)
                return local_path(url)
            if str(info.get("mimetype")).startswith("text/html"):
                raise ValueError(f"{url}: is a page of a web server: name a file or a pattern.")
            _place(url, info)
        if not whole and parent.count("/") > 2:
            # Archives beside a manifest of a tarred set.
            folder = parent.rpartition("/")[0] if "/sharded" in parent else parent
            with suppress(OSError):
                _list(folder, whole, only=_ARCHIVES, depth=1)
        if not is_pattern:
            ensure(local_path(url))
        return local_path(url)
    except FileNotFoundError:
        raise ValueError(f"{url}: there is no such file or folder.") from None


def _list(url: str, whole: bool, only: tuple[str, ...] = ("",), depth: int | None = None) -> None:
    """Make the files of a folder, and remove those that the store has no more."""
    entries = _call(url, lambda fs, path: (fs.find(path, maxdepth=depth, detail=True), path))
    files, base = cast("tuple[Mapping[str, Any], str]", entries)
    names = {name[len(base) :].strip("/"): info for name, info in files.items()}
    names = {name: info for name, info in names.items() if name and name.endswith(only)}
    for name, info in names.items():
        _place(canonical(f"{url}/{name}"), info)
    folder = local_path(url)
    for file in [] if depth else [file for file in folder.rglob("[!.]*") if file.is_file()]:
        if str(file.relative_to(folder)) not in names:
            file.unlink(missing_ok=True)
    fetched = [name for name in names if whole or Path(name).suffix.lower() in _TEXTS]
    with ThreadPoolExecutor(_CONNECTIONS, "remote") as pool:
        list(pool.map(lambda name: ensure(folder / name, whole=whole), fetched))


def _place(url: str, info: Mapping[str, Any]) -> None:
    """Make an empty file, unless there is one of this version; its time tells versions apart."""
    path = local_path(url)
    names = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
    version = [info.get("size"), *(str(info[name]) for name in names if name in info)]
    stamp = int(hashlib.sha256(repr(version).encode()).hexdigest()[:14], 16)
    with suppress(FileNotFoundError):
        if os.stat(path).st_mtime_ns == stamp:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    _publish(path, stamp, lambda partial: partial.touch())


def _publish(path: Path, stamp: int, write: Callable[[Path], object]) -> None:
    """Write a file under another name, and rename it."""
    partial = path.with_name(f".{path.name[:200]}.{os.getpid()}.{threading.get_ident()}")
    try:
        write(partial)
        os.utime(partial, ns=(time.time_ns(), stamp))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def ensure(path: str | Path, *, whole: bool = False) -> bool:
    """Download a file of the cache where it is none yet; False for other files and archives."""
    if (url := url_of(path)) is None or not (whole or not str(path).endswith(_ARCHIVES)):
        return False
    path = Path(path)
    if not _is_empty(path):
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
        return True
    with _locked(path):
        if _is_empty(path):
            info = _call(url, lambda fs, remote: fs.info(remote))
            if info["type"] == "directory":
                raise IsADirectoryError(f"{url} must be a file, but is a folder.")
            _place(url, info)
            stamp = os.stat(path).st_mtime_ns
            _publish(path, stamp, lambda partial: _call(url, _download(info.get("size"), partial)))
            _evict(os.stat(path).st_size)
    return True


def _download(size: int | None, partial: Path) -> Callable[[Any, str], None]:
    def download(fs: Any, remote: str) -> None:
        fs.get_file(remote, str(partial))
        if size not in (None, partial.stat().st_size):
            raise OSError(errno.EIO, f"{partial.stat().st_size} bytes of {size} came")

    return download


def _is_empty(path: Path) -> bool:
    try:
        return os.stat(path).st_size == 0
    except (FileNotFoundError, NotADirectoryError):
        return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process or thread download a file while others wait."""
    folder = cache_folder() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:3]  # some files share a lock
    with (folder / name).open("wb") as file:
        with suppress(OSError):  # a file system without locks: several may download it
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_range(path: str | Path, start: int, end: int) -> bytes:
    """Return bytes of an archive in the cache, which keeps the blocks that have them."""
    url = url_of(path)
    assert url is not None
    size = _archive_size(url)
    end = min(end, size)  # a manifest may claim any
    if not os.path.exists(path):
        _place(url, _call(url, lambda fs, remote: fs.info(remote)))
    first, stamp = start // _BLOCK, os.stat(path).st_mtime_ns
    files = [_block_file(f"{url} {stamp} {n}") for n in range(first, -(-end // _BLOCK))]
    blocks = [_cached(file) for file in files]
    while b"" in blocks:
        low = high = blocks.index(b"")
        while high < len(blocks) and not blocks[high]:
            high += 1
        offset, stop = (first + low) * _BLOCK, min((first + high) * _BLOCK, size)
        data = _call(url, _fetch(offset, stop))
        for number in range(low, high):
            blocks[number] = data[(number - low) * _BLOCK :][:_BLOCK]
            _keep(files[number], blocks[number])
    return b"".join(blocks)[start - first * _BLOCK : end - first * _BLOCK]


def _fetch(start: int, end: int) -> Callable[[Any, str], bytes]:
    def fetch(fs: Any, remote: str) -> bytes:
        data = fs.cat_file(remote, start=start, end=end)
        if len(data) > end - start:  # a web server without ranges sends all
            data = data[start:end]
        if len(data) != end - start:
            raise OSError(errno.EIO, f"{len(data)} bytes of {end - start} came")
        return data

    return fetch


def _block_file(key: str) -> Path:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return cache_folder() / "ranges" / digest[:2] / digest


def _cached(file: Path) -> bytes:
    with suppress(FileNotFoundError):
        data = file.read_bytes()
        os.utime(file)
        return data
    return b""


def _keep(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    _publish(file, time.time_ns(), lambda partial: partial.write_bytes(data))
    _evict(len(data))


def open_archive(path: str | Path) -> BinaryIO | None:
    """Open an archive of the cache, of which blocks are downloaded; None for other files."""
    if (url := url_of(path)) is None or not str(path).endswith(_ARCHIVES):
        return None
    if os.path.exists(path) and not _is_empty(Path(path)):
        return None
    return io.BufferedReader(_RemoteArchive(path, _archive_size(url)), _BLOCK)


@cache
def _archive_size(url: str) -> int:
    info = _call(url, lambda fs, remote: fs.info(remote))
    _place(url, info)
    return info["size"]


def read_at(file: BinaryIO, start: int, size: int) -> bytes:
    """Read a part of a file; of an archive in the cache, without more around it."""
    raw = getattr(file, "raw", None)
    if isinstance(raw, _RemoteArchive):
        return read_range(raw.path, start, start + size)
    file.seek(start)
    return file.read(size)


class _RemoteArchive(io.RawIOBase):
    def __init__(self, path: str | Path, size: int) -> None:
        super().__init__()
        self.path, self._size, self._position = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data = read_range(self.path, self._position, end)
        buffer[: len(data)] = data
        self._position = end
        return len(data)


def prefetch(parts: Iterable[tuple[str, int, int] | str]) -> None:
    """Download at the same time what is read next: files, or paths, starts and ends of ranges.

    Errors stay for the reader, who knows which utterance it is.
    """

    def load(part: tuple[str, int, int] | str) -> None:
        with suppress(OSError, ValueError):
            ensure(part) if isinstance(part, str) else read_range(*part)

    root = f"{cache_folder()}/files/"
    paths = ((part, part if isinstance(part, str) else part[0]) for part in dict.fromkeys(parts))
    remote = [part for part, path in paths if path.startswith(root)]
    if remote:
        with ThreadPoolExecutor(_CONNECTIONS, "remote") as pool:
            list(pool.map(load, remote))


# Transfers, which are tried again.

_broken: dict[str, float] = {}  # hosts that have failed for good, and when


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path there."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{url}: needs another package ({reason}): `pip install 'effasr[remote]'` has those of "
            "s3:// and gs://."
        ) from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}: the protocols are those of fsspec.") from error


def _call(url: str, work: Callable[[Any, str], T]) -> T:
    return retried(url, lambda: work(*filesystem(url)))


def retried(url: str, work: Callable[[], T]) -> T:
    """Do a transfer; again after a pause, which grows, where another try may succeed."""
    server = "/".join(url.split("/")[:3])
    patience = _number(PATIENCE)
    began, pause = time.monotonic(), _FIRST_PAUSE_S
    if began - _broken.get(server, -patience) < patience:
        patience = 0.0  # it was waited for already, moments ago
    while True:
        try:
            result = work()
            _broken.pop(server, None)
            return result
        except Exception as error:  # every store raises other kinds
            reason = " ".join((str(error) or type(error).__name__).split())[:300]
            reason = re.sub(r"\?\S*", "?...", reason)
            status = getattr(error, "status", None)
            name = type(error).__name__
            if isinstance(error, PermissionError) or status in (401, 403) or "Credential" in name:
                raise PermissionError(
                    errno.EACCES,
                    f"{url}: access was refused ({reason}): renew or set the credentials, such as "
                    "by `aws sso login` or AWS_PROFILE",
                ) from error
            if _is_distrusted(error):
                raise RemoteError(
                    errno.EIO,
                    f"{url}: the certificate of the server is not trusted: "
                    "`export SSL_CERT_FILE=ca.pem` names the authority that signed it",
                ) from error
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, f"{url}: there is no such file") from error
            if isinstance(error, OSError) and not _is_transient(error):
                raise RemoteError(error.errno or errno.EIO, f"{url}: {reason}") from error
            if not _is_transient(error):
                raise
            waited = time.monotonic() - began
            if waited + pause > patience:
                _broken[server] = time.monotonic()
                raise RemoteError(
                    errno.EIO,
                    f"{url}: cannot be transferred, after {waited:.0f} s of further tries "
                    f"({reason}): check the connection, or raise {PATIENCE}",
                ) from error
            log.debug("%s: tried again in %.1f s: %s", url, pause, reason)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _is_distrusted(error: BaseException | None) -> bool:
    """Return whether a certificate is the cause, which fsspec calls a missing file."""
    while error is not None and "certificate_verify_failed" not in str(error).casefold():
        error = error.__cause__ or error.__context__
    return error is not None


def _is_transient(error: Exception) -> bool:
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in (408, 425, 429)
    if isinstance(error, OSError):
        lasting = isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError)
        return not lasting and error.errno not in _PERMANENT
    return any(_OF_CONNECTION.search(kind.__name__) for kind in type(error).__mro__)


def _number(name: str) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else _DEFAULTS[name]
    except ValueError:
        raise ValueError(f"{name} must be a number, but is {text!r}: unset it.") from None


_written = 0


def _evict(added: int) -> None:
    """Remove what was not used for longest, where the cache is larger than it may be."""
    global _written
    _written += added
    most = _number(CACHE_GB) * 1e9
    if _written < most / 50:
        return
    _written = 0
    files = []
    for kind in ("files", "ranges"):
        for folder, _, names in os.walk(cache_folder() / kind):
            for name in names:
                with suppress(OSError):
                    state = os.stat(path := os.path.join(folder, name))
                    files.append((state.st_atime, state.st_size, path))
    total = sum(size for _, size, _ in files)
    for used, size, path in sorted(files):
        if total <= 0.9 * most or used > time.time() - _IN_USE_S:
            break
        if size:
            with suppress(OSError):
                if os.path.basename(path).startswith(".") or "/ranges/" in path:
                    os.unlink(path)
                else:  # listings still have it
                    stamp = os.stat(path).st_mtime_ns
                    _publish(Path(path), stamp, lambda partial: partial.touch())
            total -= size
