"""The checkpoints of a run: one folder each, complete or absent.

A checkpoint is a model directory (see `effasr.checkpoint`) named after its step, with the state
that a run continues from:

    training.pt     training state of the components: small values
    training/       moments, and weights under an average, in the format of
                    torch.distributed.checkpoint: each rank writes its shards
    manifest.json   size and checksum of every file

Files are written while training continues, from copies in host memory.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor

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
from effasr.data.checksums import checksum, verify
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.distributed import tensor_files
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.training.checkpointing.background_task import Background
from effasr.training.checkpointing.staging import HostCopies
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.tensors import load_tensors

log = logging.getLogger(__name__)

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
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, but is {keep}.")
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
        """Return the folder of the checkpoint of a step."""
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
            Description(model.config, model.vocab_size, prompt or Prompt()),
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
        """Wait until the last checkpoint is complete."""
        self._background.wait()

    def linger(self) -> None:
        """Wait a limited time for the checkpoint in progress, where the process must end."""
        self._background.linger(_LINGER_S)

    def __enter__(self) -> Self:
        """Return the checkpoints."""
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
        """Return the training state of a checkpoint."""
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
        return {name: of for one in everyone for name, of in one.items()}

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
