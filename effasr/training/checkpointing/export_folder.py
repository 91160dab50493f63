"""Writes an exported model into a folder as a whole."""

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from effasr.checkpoint import begin_folder, naming, publish_folder

_INSIDE = ".export.partial"


@contextmanager
def export_folder(directory: Path, dropped: Collection[str] = ()) -> Iterator[Path]:
    """Context in which a model is exported to the empty folder that it yields.

    When the block ends without an error, that folder replaces ``directory`` as `publish_folder`
    does, with the other files of ``directory`` carried over. Files are replaced one after another
    instead where ``directory`` cannot be renamed (a mount point, the working directory, one whose
    parent is read-only) or has other folders, such as that of git, in which somebody may be
    writing.
    """
    # Of a link, the folder is replaced, not the link.
    directory = directory.resolve()
    is_beside = _can_be_renamed(directory)
    staged = begin_folder(directory) if is_beside else _begin_inside(directory)
    # While it is open, no folder that is made anew in its place can have its inode.
    held = os.open(staged, os.O_RDONLY)
    try:
        yield staged
        if not os.path.samestat(os.fstat(held), staged.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(staged))
        if not directory.exists():
            publish_folder(directory)
        elif is_beside and _has_only_files(directory, staged):
            _carry_over(directory, staged, dropped)
            publish_folder(directory)
        else:
            # Move files, each of them written whole, to the places of the old ones.
            stale = [directory / name for name in dropped if not (staged / name).exists()]
            for path in sorted(staged.rglob("*")):
                target = directory / path.relative_to(staged)
                if path.is_dir():
                    target.mkdir(exist_ok=True)
                    continue
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                path.replace(target)
            for path in stale:
                path.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        # RuntimeError is left alone: the conversion of a model may raise it, too.
        with naming(directory):
            raise error
    finally:
        os.close(held)
        shutil.rmtree(staged, ignore_errors=True)


def _can_be_renamed(directory: Path) -> bool:
    """Return whether a folder can be replaced by another one; True if there is none."""
    if not directory.exists():
        return True
    with suppress(OSError):
        if Path.cwd().is_relative_to(directory):
            return False
    return not directory.is_mount() and os.access(directory.parent, os.W_OK | os.X_OK)


def _begin_inside(directory: Path) -> Path:
    staged = directory / _INSIDE
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    return staged


def _has_only_files(old: Path, new: Path) -> bool:
    """Return whether a folder has regular files alone, and no folder that the new one has not."""
    with os.scandir(old) as entries:
        return all(
            entry.is_file(follow_symlinks=False)
            or (
                entry.is_dir(follow_symlinks=False)
                and (new / entry.name).is_dir()
                and _has_only_files(old / entry.name, new / entry.name)
            )
            for entry in entries
        )


def _carry_over(old: Path, new: Path, dropped: Collection[str] = ()) -> None:
    """Add those files of the old folder that the new one has not."""
    shutil.copymode(old, new)
    with os.scandir(old) as entries:
        for entry in entries:
            target = new / entry.name
            if entry.is_dir():
                _carry_over(old / entry.name, target)
            elif entry.name not in dropped and not target.exists():
                try:
                    os.link(entry.path, target)
                except OSError:
                    # The file system has no links, or the file is somebody else's.
                    shutil.copy2(entry.path, target)
