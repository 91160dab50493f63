"""Models and training states on disk, complete or not there at all.

A model directory is what import, export, evaluation and training exchange:

    model.yaml          the configuration of the model, the size of its vocabulary, and the prompt
                        it was trained with most, which transcription uses unless told otherwise
    model.safetensors   its weights
    tokenizer/          its tokenizer

A checkpoint of a run is a model directory named after its step, with ``training.pt`` beside it:
all that decides how the run goes on. Folders are written under another name, flushed to the disk
and then renamed, so a power cut leaves the previous one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml

from effasr import config as configuration
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer, load_tokenizer
from effasr.model.asr import ASRModel, ModelConfig

log = logging.getLogger(__name__)

_DESCRIPTION, _WEIGHTS, _TOKENIZER = "model.yaml", "model.safetensors", "tokenizer"
_STATE, _MANIFEST = "training.pt", "manifest.json"


class CheckpointError(ValueError):
    """A model directory or a checkpoint that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Description:
    """What model.yaml holds.

    Attributes:
        model: The architecture.
        vocab_size: Tokens of the tokenizer.
        prompt: What the model was asked most often in training.
    """

    model: ModelConfig
    vocab_size: int
    prompt: Prompt = field(default_factory=Prompt)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and the prompt it was trained with most."""

    model: ASRModel
    tokenizer: Tokenizer
    prompt: Prompt


def save_model(
    directory: str | Path, model: ASRModel, tokenizer: Tokenizer, prompt: Prompt | None = None
) -> None:
    """Write a model directory, replacing one that is there.

    Args:
        directory: The folder.
        model: Its weights and architecture.
        tokenizer: Its tokenizer.
        prompt: What it was asked most often in training; English transcription by default.

    Raises:
        CheckpointError: ``directory`` is something else than a model directory.
    """
    directory = Path(directory)
    if directory.exists() and not _is_replaceable(directory):
        raise CheckpointError(
            f"`directory` must be new, empty or a model directory, but {directory} is not: "
            "choose another."
        )
    prompt = Prompt() if prompt is None else prompt
    _write_folder(directory, lambda folder: _write_model(folder, model, tokenizer, prompt))


def load_model(directory: str | Path, device: torch.device | str = "cpu") -> LoadedModel:
    """Read a model directory.

    Raises:
        CheckpointError: It is none, or a file of it is missing or damaged.
    """
    directory = Path(directory)
    description = read_description(directory)
    with _explaining(directory / _WEIGHTS) as path:
        weights = safetensors.torch.load_file(path, device=str(device))
        model = ASRModel.from_state_dict(description.model, description.vocab_size, weights)
    return LoadedModel(model.to(device).eval(), read_tokenizer(directory), description.prompt)


def read_description(directory: Path) -> Description:
    """What a model directory holds.

    Raises:
        CheckpointError: ``model.yaml`` is missing or is not one of this version.
    """
    path = directory / _DESCRIPTION
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return configuration.from_mapping(Description, content)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} must be a model directory, but has no {_DESCRIPTION}."
        ) from None
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in a model directory."""
    return load_tokenizer(directory / _TOKENIZER)


def load_weights(model: ASRModel, directory: Path, *, may_lack: tuple[str, ...] = ()) -> None:
    """Give a model the weights of a model directory, which must fit exactly.

    Args:
        model: Any.
        directory: The model directory.
        may_lack: What names begin with that it need not have; the model keeps its own then.

    Raises:
        CheckpointError: The file is missing or damaged, or is of another architecture.
    """
    remedy = " Leave `model` out of the recipe to take the architecture with the weights."
    with _explaining(directory / _WEIGHTS, remedy) as path:
        own = {k: v for k, v in model.state_dict().items() if k.startswith(may_lack)}
        model.load_state_dict(own | safetensors.torch.load_file(path))


@contextmanager
def _explaining(path: Path, remedy: str = "") -> Iterator[Path]:
    """Turn what can go wrong with a file of weights into a `CheckpointError`."""
    try:
        yield path
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}.") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except RuntimeError as error:
        heading, *differences = str(error).splitlines() or [""]
        if "loading state_dict" not in heading:
            raise
        first = textwrap.shorten(differences[0], 200, placeholder=" ...")
        raise CheckpointError(
            f"{path} is of another architecture, in {len(differences)} ways: {first}{remedy}"
        ) from error


def resolve(path: str | Path) -> Path:
    """The model directory meant by a path: itself, or the best, else the latest, of a run.

    Raises:
        CheckpointError: There is no model.
    """
    path = Path(path)
    if (path / _DESCRIPTION).is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    candidates = [_follow(folder / "best"), _follow(folder / "latest"), *_newest_first(folder)]
    for target in candidates:
        if target is not None:
            return target
    raise CheckpointError(
        f"{path} must be a model directory or a run with a checkpoint, but has neither "
        f"{_DESCRIPTION} nor checkpoints/step_*."
    )


class RunCheckpoints:
    """The checkpoints of one run: the newest ones, and the best.

    Args:
        folder: ``runs/NAME/checkpoints``.
        keep: How many of the newest to keep; the best is kept besides.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, but is {keep}.")
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step_{step:08d}"

    def save(
        self,
        step: int,
        model: ASRModel,
        tokenizer: Tokenizer,
        state: Mapping[str, Any],
        prompt: Prompt | None = None,
    ) -> Path:
        """Write a checkpoint, point ``latest`` at it, and remove those no longer kept.

        Args:
            step: Updates made so far.
            model: With the weights to evaluate.
            tokenizer: Its tokenizer.
            state: The rest: tensors and plain values, nested.
            prompt: See `save_model`.
        """
        prompt = Prompt() if prompt is None else prompt
        self.folder.mkdir(parents=True, exist_ok=True)

        def fill(folder: Path) -> None:
            _write_model(folder, model, tokenizer, prompt)
            torch.save(dict(state), folder / _STATE)
            sizes = {
                str(file.relative_to(folder)): file.stat().st_size
                for file in folder.rglob("*")
                if file.is_file()
            }
            (folder / _MANIFEST).write_text(json.dumps({"step": step, "bytes": sizes}))

        path = self.path(step)
        _write_folder(path, fill)
        _point(self.folder / "latest", path)
        # Later ones are damaged, for the run went back to one before; hidden ones were left by a
        # process that was killed while it wrote.
        later = [other for other in _newest_first(self.folder) if other.name > path.name]
        for useless in [*later, *self.folder.glob(".step_*")]:
            shutil.rmtree(useless, ignore_errors=True)
        self._prune()
        return path

    def mark_best(self, step: int) -> None:
        """Point ``best`` at the checkpoint of a step, and remove those no longer kept."""
        _point(self.folder / "best", self.path(step))
        self._prune()

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest complete checkpoint and its state; None where there never was one.

        A damaged one is passed over with a warning. ``latest`` then points at the one found.

        Raises:
            CheckpointError: There are checkpoints, and all are damaged.
        """
        self._restore_outdated()
        reasons = []
        for path in _newest_first(self.folder):
            try:
                state = self.read(path)
                # The process may have been killed between the checkpoint and its mark.
                _point(self.folder / "latest", path)
                return path, state
            except CheckpointError as error:
                log.warning("%s Going back to the checkpoint before it.", error)
                reasons.append(str(error))
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be read: {' '.join(reasons)} "
                "Restore one, or remove them all to begin again."
            )
        return None

    def read(self, path: Path) -> dict[str, Any]:
        """The state in a checkpoint.

        Raises:
            CheckpointError: A file of it is missing or damaged.
        """
        try:
            sizes = json.loads((path / _MANIFEST).read_text())["bytes"]
            for name, size in sizes.items():
                if (path / name).stat().st_size != size:
                    raise CheckpointError(f"{path / name} is not of the {size} bytes written.")
            with safetensors.safe_open(path / _WEIGHTS, framework="pt"):
                pass
            return torch.load(path / _STATE, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # A damaged file makes torch and zipfile raise many kinds.
            raise CheckpointError(f"{path} is damaged or incomplete: {error!r}.") from error

    def _restore_outdated(self) -> None:
        """Put back what was to be replaced, where the process was killed just before it was."""
        for outdated in self.folder.glob(".step_*.outdated"):
            path = outdated.with_name(outdated.name[1:].removesuffix(".outdated"))
            if not path.exists():
                outdated.rename(path)

    def _prune(self) -> None:
        best = _follow(self.folder / "best")
        for path in _newest_first(self.folder)[self.keep :]:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)


def _write_model(folder: Path, model: ASRModel, tokenizer: Tokenizer, prompt: Prompt) -> None:
    text = configuration.dump(Description(model.config, model.vocab_size, prompt))
    (folder / _DESCRIPTION).write_text(text, encoding="utf-8")
    safetensors.torch.save_file(model.state_dict(), folder / _WEIGHTS)
    tokenizer.save(folder / _TOKENIZER)


def _is_replaceable(directory: Path) -> bool:
    return directory.is_dir() and (
        (directory / _DESCRIPTION).is_file() or not any(directory.iterdir())
    )


def _write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make ``path`` a folder that ``fill`` fills, in one move, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    outdated = path.with_name(f".{path.name}.outdated")
    for leftover in (partial, outdated):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        fill(partial)
        for file in partial.rglob("*"):
            _flush(file)
        _flush(partial)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        # A full disk is any of these, and a part of the files must not keep it full.
        shutil.rmtree(partial, ignore_errors=True)
        reason = " ".join(str(error).split())
        raise OSError(f"{path} cannot be written; is the disk full? {reason}") from error
    if path.exists():
        path.rename(outdated)
    partial.rename(path)
    _flush(path.parent)
    shutil.rmtree(outdated, ignore_errors=True)


def _point(pointer: Path, target: Path) -> None:
    partial = pointer.with_name(f".{pointer.name}.partial")
    partial.write_text(target.name + "\n")
    _flush(partial)
    partial.replace(pointer)
    _flush(pointer.parent)


def _follow(pointer: Path) -> Path | None:
    if not pointer.is_file():
        return None
    target = pointer.parent / pointer.read_text().strip()
    return target if (target / _DESCRIPTION).is_file() else None


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step_*") if path.is_dir()), reverse=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
