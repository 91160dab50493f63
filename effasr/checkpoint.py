"""Model directories and atomic checkpoints.

Import, export, evaluation and training exchange model directories:

    model.yaml          the configuration of the model, the size of its vocabulary, its most
                        frequent training prompt, which is the default of transcription, and how
                        long its training utterances are
    model.safetensors   its weights; for a run with LoRA the base weights and the adapters, which
                        are merged on reading
    tokenizer/          its tokenizer

A checkpoint of a run is a model directory, too: see
`effasr.training.checkpointing.run_checkpoints`. Folders are written under another name, flushed to
disk and then renamed, so a power cut leaves the previous one.
"""

import ctypes
import errno
import math
import os
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from torch import Tensor

from effasr import config as configuration
from effasr.checks import check
from effasr.data.checksums import verify
from effasr.data.languages import code_or_name
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer, load_tokenizer
from effasr.model.asr import ASRModel, Durations
from effasr.model.config import ModelConfig
from effasr.nn.lora import adapters, without_adapters
from effasr.untrusted.documents import WRONG_VALUES, read_json_object, read_yaml
from effasr.untrusted.files import open_regular, plain_name, read_text
from effasr.untrusted.mistaken import mistaken
from effasr.untrusted.remote import localized

DESCRIPTION, WEIGHTS, MANIFEST = "model.yaml", "model.safetensors", "manifest.json"
TOKENIZER = "tokenizer"

T = TypeVar("T")

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""From Linux's <fcntl.h> and <linux/fs.h>."""


class CheckpointError(ValueError):
    """A model directory or a checkpoint cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Description:
    """Content of model.yaml; the prompt is the most frequent one in training."""

    model: ModelConfig
    vocab_size: int
    prompt: Prompt = field(default_factory=Prompt)
    durations: Durations | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and its most frequent training prompt."""

    model: ASRModel
    tokenizer: Tokenizer
    prompt: Prompt

    def with_head(self, head: str) -> "LoadedModel":
        """Return the encoder with one output, ``decoder``, ``transducer`` or ``ctc``."""
        config = self.model.config
        heads = [name for name in ("decoder", "transducer", "ctc") if getattr(config, name)]
        rule = f"be an output of the model ({', '.join(heads)})"
        check(head in heads, "--head", rule, head)
        config = replace(
            config,
            decoder=config.decoder if head == "decoder" else None,
            transducer=config.transducer if head == "transducer" else None,
            ctc=head == "ctc",
            text_encoder=None,
        )
        names = ("encoder.", *{"decoder": ("decoder.", "projection.")}.get(head, (head,)))
        state = {k: v for k, v in self.model.state_dict().items() if k.startswith(names)}
        return self._with(config, state)

    def with_language(self, language: str) -> "LoadedModel":
        """Return the model with the adapters of one language merged into its weights."""
        config = self.model.config
        languages = config.language_adapters
        code = code_or_name(language)
        rule = f"be a language that has adapters ({', '.join(languages) or 'none has'})"
        check(code in languages, "--merge-language", rule, repr(language))
        place = languages.index(code), len(languages)
        state = without_adapters(self.model.state_dict(), place)
        return self._with(replace(config, language_adapters=()), state)

    def with_window(self, seconds: float) -> "LoadedModel":
        """Return a Whisper with the same weights that hears silence up to ``seconds``."""
        config = self.model.config
        features = config.features
        longest = getattr(config.encoder, "max_frames", 0) * features.framing.seconds
        if features.kind != "whisper":
            raise ValueError(
                f"`--window` must be left out, because this model of kind {features.kind} hears no "
                f"silence behind an utterance, but is {seconds:g}."
            )
        rule = f"be at most {longest:g} s, the longest that the model reads"
        check(seconds <= longest, "--window", rule, f"{seconds:g}")
        config = replace(config, features=replace(features, minimum_s=seconds))
        return self._with(config, self.model.state_dict())

    def _with(self, config: ModelConfig, state: Mapping[str, Tensor]) -> "LoadedModel":
        model = ASRModel.from_state_dict(config, self.model.vocab_size, state).eval()
        model.durations = self.model.durations
        return replace(self, model=model.to(next(self.model.parameters()).device))


def save_model(
    directory: str | Path, model: ASRModel, tokenizer: Tokenizer, prompt: Prompt | None = None
) -> None:
    """Write a model directory, replacing an existing one."""
    # Of a link, the folder is replaced, not the link.
    directory = Path(directory).resolve()
    if directory.exists() and not (
        directory.is_dir() and ((directory / DESCRIPTION).is_file() or not any(directory.iterdir()))
    ):
        raise CheckpointError(
            f"`directory` must be new, empty or a model directory, but {directory} is not: "
            "choose another."
        )
    description = Description(model.config, model.vocab_size, prompt or Prompt(), model.durations)
    partial = begin_folder(directory)
    with writing(directory):
        write_model(partial, description, model.state_dict(), tokenizer)
    publish_folder(directory)


def load_model(directory: str | Path, device: torch.device | str = "cpu") -> LoadedModel:
    directory = Path(directory)
    _verify(directory)
    description = read_description(directory)
    with _explaining(directory / WEIGHTS) as path:
        weights = safetensors.torch.load_file(path, device=str(device))
        if not description.model.language_adapters:
            weights = without_adapters(weights)
        model = ASRModel.from_state_dict(description.model, description.vocab_size, weights)
    model.durations = description.durations
    return LoadedModel(model.to(device).eval(), read_tokenizer(directory), description.prompt)


def load_best(path: str | Path, device: torch.device | str = "cpu") -> LoadedModel:
    """Load a model directory, or the best, else the latest checkpoint of a run."""
    return load_while_pruned(lambda: [resolve(path)], lambda paths: load_model(paths[0], device))


def load_while_pruned(
    list_checkpoints: Callable[[], list[Path]], load: Callable[[list[Path]], T]
) -> T:
    """Load checkpoints that a training may remove meanwhile; it then has others."""
    before: list[Path] = []
    while True:
        checkpoints = list_checkpoints()
        try:
            return load(checkpoints)
        except (OSError, ValueError):
            if checkpoints == before or all(path.is_dir() for path in checkpoints):
                raise
            before = checkpoints


def read_description(directory: Path) -> Description:
    path = directory / DESCRIPTION
    try:
        return configuration.from_mapping(Description, read_yaml(path))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} must be a model directory, but has no {DESCRIPTION}."
        ) from None
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def count_parameters(directory: Path) -> int:
    """Return the number of weights of a model directory, which are not read."""
    with (
        _explaining(directory / WEIGHTS) as path,
        safetensors.safe_open(path, framework="pt") as file,
    ):
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def read_tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory / TOKENIZER)


def load_weights(
    model: ASRModel,
    directory: Path,
    *,
    only: tuple[str, ...] = ("",),
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights,
) -> None:
    """Load the weights of a model directory into a model of the same architecture and adapters.

    The model keeps its own weights of names without a prefix in ``only``. ``change`` returns the
    weights to load.
    """
    _verify(directory)
    remedy = " Leave `model` out of the recipe to take the architecture with the weights."
    with _explaining(directory / WEIGHTS, remedy) as path:
        unchanged = {
            name: value for name, value in model.state_dict().items() if not name.startswith(only)
        }
        weights = safetensors.torch.load_file(path)
        weights = weights if adapters(model) else without_adapters(weights)
        chosen = {name: value for name, value in weights.items() if name.startswith(only)}
        model.load_state_dict(unchanged | change(chosen))


def _verify(directory: Path) -> None:
    """Compare the files of the model with their checksums; only checkpoints of runs have these."""
    manifest = directory / MANIFEST
    if not manifest.is_file():
        return
    try:
        files = read_json_object(manifest).get("files", {})
        of_model = {
            name: checksum
            for name, checksum in files.items()
            if name in (DESCRIPTION, WEIGHTS) or name.startswith(f"{TOKENIZER}/")
        }
        verify(directory, of_model)
    except (OSError, ValueError, *WRONG_VALUES) as error:
        raise CheckpointError(
            f"{directory} is damaged: {error} Restore it, or take another checkpoint; to use "
            f"files that were changed on purpose, remove {manifest}."
        ) from error


@contextmanager
def _explaining(path: Path, remedy: str = "") -> Iterator[Path]:
    """Turn errors of a weights file into `CheckpointError`."""
    try:
        try:
            # safetensors would wait for somebody to write to a pipe.
            open_regular(path).close()
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        yield path
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}.") from None
    except (safetensors.SafetensorError, OSError) as error:
        kind = mistaken(path)
        problem = f"is damaged: {error}" if kind is None else f"is {kind[0]}: {kind[1]}."
        if kind is not None and "safetensors" in kind[0]:
            problem = f"is damaged: {error}"
        raise CheckpointError(f"{path} {problem}") from error
    except RuntimeError as error:
        heading, *differences = str(error).splitlines() or [""]
        if "loading state_dict" not in heading:
            raise
        first = textwrap.shorten(differences[0], 200, placeholder=" ...")
        raise CheckpointError(
            f"{path} is of another architecture, in {len(differences)} ways: {first}{remedy}"
        ) from error


def resolve(path: str | Path) -> Path:
    """Return the model directory of a path: itself, or the best, else the latest, of a run."""
    path = localized(path, whole=True)
    if (path / DESCRIPTION).is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    for pointer in (folder / "best", folder / "latest"):
        target = follow(pointer)
        if target is not None:
            return target
    if checkpoints := newest_first(folder):
        return checkpoints[0]
    problem = f"has neither {DESCRIPTION} nor checkpoints/step_*"
    if path.is_file() and (path.parent / "config.json").is_file():
        path = path.parent  # the weights of a folder
    if path.suffix == ".nemo" or (path / "config.json").is_file() or any(path.glob("*.nemo")):
        line = shlex.join(["effasr", "import", str(path), f"models/{path.stem}"])
        problem = f"was not imported: `{line}`, and name models/{path.stem}"
    raise CheckpointError(
        f"{path} must be a model directory or a run with a checkpoint, but {problem}."
    )


def write_model(
    folder: Path, description: Description, weights: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    (folder / DESCRIPTION).write_text(configuration.dump(description), encoding="utf-8")
    safetensors.torch.save_file(dict(weights), folder / WEIGHTS)
    tokenizer.save(folder / TOKENIZER)
    # If the folder was removed meanwhile, `tokenizer.save` makes a part of it again.
    for name in (DESCRIPTION, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / name))


def begin_folder(path: Path) -> Path:
    """Create an empty folder, which `publish_folder` then renames to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _restore(_outdated(path), path)
    partial = partial_folder(path)
    for leftover in (partial, _outdated(path)):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    return partial


def partial_folder(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context in which the folder that becomes ``path`` is filled."""
    try:
        with naming(path):
            yield
    except OSError:
        # So that a full disk does not stay full.
        shutil.rmtree(partial_folder(path), ignore_errors=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which ``path`` is written; the message of an error names it, and the cause."""
    try:
        yield
    # safetensors and torch have errors of their own for a full disk.
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        cause = _cause(error)
        is_full = not isinstance(cause, OSError) or cause.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; is the disk full?" if is_full else ":"
        reason = cause.strerror if isinstance(cause, OSError) else " ".join(str(cause).split())
        raise OSError(f"{path} cannot be written{hint} {reason}") from error


def _cause(error: BaseException) -> BaseException:
    """Return the error of the file system behind an error, else the error itself."""
    # torch closes its file after a failed write, and what is raised then hides the failure.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def publish_folder(path: Path) -> None:
    """Flush a folder, and rename it atomically, replacing an older one."""
    partial, outdated = partial_folder(path), _outdated(path)
    with writing(path):
        for file in partial.rglob("*"):
            _flush(file)
        _flush(partial)
        if not path.exists():
            partial.rename(path)
        elif not _exchange(partial, path):
            path.rename(outdated)
            try:
                partial.rename(path)
            except OSError:
                _restore(outdated, path)
                raise
        _flush(path.parent)
    for leftover in (partial, outdated):
        shutil.rmtree(leftover, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders atomically; return whether the file system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)
    return not rename(*paths, _RENAME_EXCHANGE)


def remove_folder(path: Path) -> None:
    """Remove a folder, under another name: a part of it is never left under its name."""
    removed = path.with_name(f".{path.name}.removed")
    with suppress(OSError):
        path.rename(removed)
    for leftover in (removed, path):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_hidden(folder: Path) -> None:
    """Remove what a process that was killed has left half written, or half removed."""
    for hidden in sorted(folder.glob(".step_*")):
        # Renamed first: if its process is alive after all and publishes it meanwhile, it is
        # published whole or not at all.
        removed = hidden.with_suffix(".removed")
        shutil.rmtree(removed, ignore_errors=True)
        with suppress(OSError):
            hidden.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def restore_outdated(folder: Path) -> None:
    """Restore a folder if the process was killed while replacing it."""
    for outdated in folder.glob(".*.outdated"):
        _restore(outdated, outdated.with_name(outdated.name[1:].removesuffix(".outdated")))


def _restore(outdated: Path, path: Path) -> None:
    if outdated.exists() and not path.exists():
        outdated.rename(path)


def _outdated(path: Path) -> Path:
    return path.with_name(f".{path.name}.outdated")


def point(pointer: Path, target: Path) -> None:
    """Write a small file that names a folder in the same directory."""
    partial = pointer.with_name(f".{pointer.name}.partial")
    with naming(pointer):
        partial.write_text(f"{target.name}\n", encoding="utf-8")
        _flush(partial)
        partial.replace(pointer)
        _flush(pointer.parent)


def follow(pointer: Path) -> Path | None:
    """Return the model directory that `point` named; None if there is no pointer."""
    try:
        # Twice, as a run may have pointed elsewhere and removed the former checkpoint meanwhile.
        target = _target(pointer) or _target(pointer)
    except ValueError:
        target = None
    if target is None and pointer.is_file():
        raise CheckpointError(
            f"{pointer} must name a checkpoint beside it, but does not: write the name of one into "
            "it, or remove it."
        )
    return target


def _target(pointer: Path) -> Path | None:
    if not pointer.is_file():
        return None
    target = pointer.parent / plain_name(read_text(pointer, 4096).strip(), str(pointer))
    return target if (target / DESCRIPTION).is_file() else None


def newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step_*") if path.is_dir()), reverse=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
