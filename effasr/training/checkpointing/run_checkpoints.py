"""Copies of tensors in host memory, from which checkpoints are written while training continues."""

import errno
import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from effasr.checkpoint import (
    DESCRIPTION,
    MANIFEST,
    WEIGHTS,
    CheckpointError,
    Description,
    begin_folder,
    follow,
    newest_first,
    partial_folder,
    point,
    publish_folder,
    remove_folder,
    remove_hidden,
    restore_outdated,
    write_model,
    writing,
)
from effasr.checks import check
from effasr.data.checksums import checksum, verify
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.distributed import tensor_files
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.tensors import load_tensors


class HostCopies:
    """Buffers for copies, allocated once: pinned for tensors on a GPU.

    The next copy of a name overwrites the one before.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._mesh: DeviceMesh | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors on the CPU, complete; sharded ones stay sharded."""
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local.detach(), non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        return DTensor.from_local(
            buffer,
            self._mesh_like(tensor.device_mesh),
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _mesh_like(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh of the same ranks on the CPU."""
        if mesh.device_type == "cpu":
            return mesh
        if self._mesh is None:
            self._mesh = DeviceMesh("cpu", mesh.mesh)
        return self._mesh


# A slow task that runs while training continues, one at a time.

log = logging.getLogger(__name__)

_UNNOTICED_S = 0.05


class Background:
    """Runs one job at a time in a daemon thread; its error is raised by the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._what = ""
        self._error: BaseException | None = None
        self._waited = self._told = 0.0

    def start(self, what: str, job: Callable[[], object]) -> None:
        self.wait()
        self._what = what
        self._thread = threading.Thread(target=self._run, args=(job,), daemon=True, name=what)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a job that has failed, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self, reason: str = "") -> None:
        if self._thread is None:
            return
        began = time.perf_counter()
        self._thread.join()
        seconds = time.perf_counter() - began
        self._waited += seconds if reason else 0.0
        if self._waited > max(_UNNOTICED_S, 2 * self._told):
            self._told = self._waited
            log.warning(
                "waited %.1f s, %.1f s in all, for %s: %s",
                seconds,
                self._waited,
                self._what,
                reason,
            )
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def linger(self, seconds: float) -> None:
        """Wait a limited time for the job, in a process that is about to be ended."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error


# The checkpoints of a run: one folder each, complete or absent.
#
# A checkpoint is a model directory (see `effasr.checkpoint`) named after its step, with the state
# that a run continues from:
#
#     training.pt     training state of the components: small values
#     training/       moments, and weights under an average, in the format of
#                     torch.distributed.checkpoint: each rank writes its shards
#     manifest.json   size and checksum of every file
#
# Files are written while training continues, from copies in host memory.


TENSORS = "training"
_STATE = "training.pt"
_REQUIRED = (DESCRIPTION, WEIGHTS, _STATE)
_LINGER_S = 60.0


@dataclass(frozen=True, slots=True)
class _Content:
    """Immutable content of a checkpoint; the first four fields are written by rank 0 alone."""

    description: Description
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer
    state: bytes
    tensors: Mapping[str, Tensor]
    is_best: bool


class RunCheckpoints:
    """The checkpoints of one run: the ``keep`` newest and the best."""

    def __init__(self, folder: Path, keep: int, *, background: bool = False) -> None:
        check(keep >= 1, "keep", "be at least 1", keep)
        self.folder = folder
        self.keep = keep
        self._background = Background()
        self._in_background = background
        self._copies = HostCopies()
        self._rank = 0
        self._group: dist.ProcessGroup | None = None

    def share(self, context: DistributedContext) -> None:
        """Let all ranks save together, each its shards; all ranks call this."""
        self._rank = context.rank
        # The thread has its own process group: two threads must not share one.
        self._group = context.new_group(backend="gloo")

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def stage(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy tensors that `save` writes later.

        Waits for the checkpoint that is being written, whose buffers are reused.
        """
        self._background.wait(
            "checkpoints are due faster than they are written: raise training.checkpoint_every"
        )
        return self._copies.take(tensors)

    def save(
        self,
        step: int,
        model: ASRModel,
        tokenizer: Tokenizer,
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        prompt: Prompt | None = None,
        *,
        is_best: bool = False,
    ) -> Path:
        """Write a checkpoint, point ``latest`` at it, and remove those no longer kept."""
        serialized = io.BytesIO()
        weights: Mapping[str, Tensor] = {}
        if self._rank == 0:
            torch.save(dict(state), serialized)
            weights = self.stage({f"model/{k}": v for k, v in model.state_dict().items()})
        content = _Content(
            Description(model.config, model.vocab_size, prompt or Prompt(), model.durations),
            {name.removeprefix("model/"): value for name, value in weights.items()},
            tokenizer,
            serialized.getvalue(),
            tensors or {},
            is_best,
        )
        what = f"{self.path(step)} to be written"
        self._background.start(what, lambda: self._write(step, content))
        if not self._in_background:
            self.wait()
        return self.path(step)

    def check(self) -> None:
        """Raise the error of the last checkpoint if it has failed already."""
        self._background.check()

    def wait(self) -> None:
        self._background.wait()

    def linger(self) -> None:
        """Wait a limited time for the checkpoint in progress, where the process must end."""
        self._background.linger(_LINGER_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Wait until the last checkpoint is complete, also after an error."""
        if error is None:
            self.wait()
            return
        try:
            self.wait()
        except Exception as other:
            log.error("%s", other)

    def mark_best(self, step: int) -> None:
        """Point ``best`` at the checkpoint of a step, and remove those no longer kept."""
        point(self.folder / "best", self.path(step))
        self._prune()

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest complete checkpoint and its state; None if there never was one.

        A damaged one is skipped with a warning, and ``latest`` is set to the one found.
        """
        restore_outdated(self.folder)
        remove_hidden(self.folder)
        reasons = []
        for path in newest_first(self.folder):
            try:
                _check_files(path)
                state = self.read(path)
                # The process may have been killed between the checkpoint and its mark.
                point(self.folder / "latest", path)
                return path, state
            except CheckpointError as error:
                log.warning("%s Using the previous checkpoint.", error)
                reasons.append(str(error))
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be read: {' '.join(reasons)} "
                "Restore one, or remove them all to begin again."
            )
        return None

    def read(self, path: Path) -> dict[str, Any]:
        try:
            return load_tensors(path / _STATE)
        except Exception as error:  # torch and zipfile raise many kinds.
            raise CheckpointError(f"{path} is damaged or incomplete: {error!r}.") from error

    def _write(self, step: int, content: _Content) -> None:
        path, is_main = self.path(step), self._rank == 0
        partial = begin_folder(path) if is_main else partial_folder(path)
        with writing(path):
            if self._group is not None:
                # The folder exists only now.
                dist.barrier(self._group)
            if is_main:
                write_model(partial, content.description, content.weights, content.tokenizer)
                (partial / _STATE).write_bytes(content.state)
            if content.tensors:
                tensor_files.write(content.tensors, partial / TENSORS, self._group)
            sums = self._gather(_checksums(partial, self._rank))
            if is_main:
                # Of a folder that was removed meanwhile, torch makes a part again.
                for name in _REQUIRED:
                    if name not in sums:
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
                text = json.dumps({"step": step, "files": sums})
                (partial / MANIFEST).write_text(text, encoding="utf-8")
        if not is_main:
            return
        publish_folder(path)
        point(self.folder / "latest", path)
        if content.is_best:
            self.mark_best(step)
        # Later ones are damaged, since the run continued from an earlier one; hidden ones were left
        # by a process that was killed while writing.
        later = [other for other in newest_first(self.folder) if other.name > path.name]
        with suppress(CheckpointError):
            if follow(self.folder / "best") in later:
                (self.folder / "best").unlink()
        for useless in later:
            remove_folder(useless)
        remove_hidden(self.folder)
        self._prune()

    def _gather(self, sums: dict[str, list[int]]) -> dict[str, list[int]]:
        """Gather the checksums of all ranks; each has read its own files."""
        if self._group is None:
            return sums
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, sums, group=self._group)
        return {name: of for item in everyone for name, of in item.items()}

    def _prune(self) -> None:
        outdated = newest_first(self.folder)[self.keep :]
        try:
            best = follow(self.folder / "best")
        except CheckpointError as error:
            # One of them may be the best.
            if outdated:
                log.warning("%s Until then no checkpoint is removed.", error)
            return
        for path in outdated:
            if path != best:
                remove_folder(path)


def _checksums(folder: Path, rank: int) -> dict[str, list[int]]:
    """Return size and CRC-32 of the files written by a rank."""
    parts = (folder / TENSORS).glob(f"__{rank}_*")
    files = parts if rank else (f for f in folder.rglob("*") if not _is_of_another(f))
    return {str(file.relative_to(folder)): checksum(file) for file in files if file.is_file()}


def _is_of_another(file: Path) -> bool:
    """Return whether another rank than 0 has written a file: torch names them ``__RANK_NUMBER``."""
    return file.name.startswith("__") and not file.name.startswith("__0_")


def _check_files(path: Path) -> None:
    """Raise a `CheckpointError` if a file of a checkpoint differs from its manifest."""
    try:
        manifest = read_json_object(path / MANIFEST)
        if "files" not in manifest:
            raise CheckpointError(
                f"{path} was written by an earlier version of effasr: continue with that version, "
                "or start a run from its weights with `init_from`."
            )
        for name in _REQUIRED:
            if name not in manifest["files"]:
                raise CheckpointError(f"{path / MANIFEST} is damaged: it does not name {name}.")
        verify(path, manifest["files"])
        with safetensors.safe_open(path / WEIGHTS, framework="pt"):
            pass
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except Exception as error:  # The manifest may be malformed in any way.
        raise CheckpointError(f"{path} is damaged or incomplete: {error!r}.") from error
