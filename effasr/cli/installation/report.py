"""Reports this machine, what serves each operation on it, and what a recipe does there."""

import os
import platform
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import soundfile
import torch
from rich import box
from rich.table import Table
from rich.text import Text

import effasr_kernels
from effasr import config as configuration
from effasr.data.checksums import installed_version
from effasr.distributed.process_group import choose_device
from effasr.evaluation.tables import to_text
from effasr.model.asr import ASRModel
from effasr.optim.adamw import apex_unsupported_reason
from effasr.training.config import TrainConfig
from effasr.training.cuda_graph import obstacles, uses_graph
from effasr.training.kernels import explained_backends
from effasr.training.strategies.parallelism import narrow_dtype, reason_for_autocast
from effasr.untrusted.display import display_width
from effasr_kernels import OPERATIONS, Backend, BackendUnavailable, TorchOp
from effasr_kernels.runtime import native
from effasr_kernels.runtime.example import Example, ExampleInputs

_PACKAGES = {
    "lhotse": "manifests and audio",
    "sentencepiece": "tokenizers",
    "jiwer": "word error rates",
    "tensorboard": "curves",
    "nvtx": "ranges for Nsight Systems",
    "flash-attn": "attention (FlashAttention 2)",
    "flash-attn-3": "attention (FlashAttention 3)",
    "flash-attn-4": "attention (FlashAttention 4)",
    "transformers": "effasr import and export",
    "tokenizers": "tokenizers of Hugging Face",
    "whisper-normalizer": "normalizer whisper_english",
    "espeakng-loader": "the speech of the demo",
}
_VOCABULARY = 1_024
"""Of a recipe's model, whose backends do not depend on it."""
_WIDTH, _WIDEST_VALUE = 100, 30
"""Columns where there is no terminal, and of the column of versions and backends."""
_ABSENT = ": not installed"
"""Part of the reason of a backend whose package is absent, which is shown once."""
_REQUIRED = frozenset({"lhotse", "sentencepiece", "jiwer", "tensorboard", "nvtx"})
# The other backends exist for some operations only.
_EXPECTED = (Backend.TRITON, Backend.REFERENCE)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report."""

    section: str
    name: str
    value: str
    note: str = ""

    @property
    def notes(self) -> list[str]:
        return self.note.split("; ")

    @property
    def device(self) -> str:
        return self.name.rpartition(" on ")[2] if self.section == "operations" else ""


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[Row, ...]

    def text(self, width: int | None = None) -> str:
        """A table for each section, folded to the terminal's width or 100 columns by default."""
        if width is None:
            width = display_width() or _WIDTH
        parts = []
        for section in dict.fromkeys(row.section for row in self.rows):
            table = Table(box=box.MARKDOWN)
            table.add_column(section, no_wrap=True)
            table.add_column(max_width=_WIDEST_VALUE, overflow="fold")
            table.add_column("note", overflow="fold")
            rows = [row for row in self.rows if row.section == section]
            shared = _shared_notes(rows)
            absent = dict.fromkeys(
                note for row in rows for note in row.notes if row.device and _ABSENT in note
            )
            for row in rows:
                once = {*absent, *shared.get(row.device, ())}
                unshared = [note for note in row.notes if note not in once]
                table.add_row(Text(row.name), Text(row.value), Text("; ".join(unshared)))
            lines = [to_text(table, width)]
            for device, notes in shared.items():
                text = f"All on {device}: {'; '.join(notes)}."
                lines.append(textwrap.fill(text, width, subsequent_indent="  "))
            if absent:
                text = f"Not installed: {'; '.join(absent).replace(_ABSENT, '')}."
                lines.append(textwrap.fill(text, width, subsequent_indent="  "))
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"


def _shared_notes(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The reasons that all operations of a device have, by device."""
    shared = {}
    for device in dict.fromkeys(row.device for row in rows if row.device):
        first, *remaining = (row.notes for row in rows if row.device == device)
        common = [note for note in first if note and all(note in other for other in remaining)]
        if common and remaining:
            shared[device] = common
    return shared


def report() -> Report:
    """Look at the machine and packages, and call each backend of each operation once."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", 0))
    rows = [*_system(), *_packages()]
    for device in devices:
        rows += [_operation(op, x, device) for op in OPERATIONS.values() for x in op.examples]
    return Report(tuple(rows))


def _system() -> list[Row]:
    rows = [
        Row("system", "python", platform.python_version()),
        Row("system", "platform", platform.platform()),
        Row("system", "cpus", str(os.cpu_count())),
        Row("system", "torch", torch.__version__),
        _triton(),
        Row("system", "cuda", torch.version.cuda or "none", "that torch was built with"),
        Row("system", "libsndfile", soundfile.__libsndfile_version__, "reads audio files"),
    ]
    nsys = shutil.which("nsys") or "not on the path"
    rows.append(Row("system", "nsys", nsys, "profiling/nsys_train.sh"))
    rows.append(_cpu_kernels())
    if not torch.cuda.is_available():
        rows.append(Row("system", "gpu", "none", "torch sees no CUDA device"))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        note = (
            f"compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} multiprocessors, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
        rows.append(Row("system", f"gpu {index}", properties.name, note))
    return rows


def _triton() -> Row:
    installed, note = installed_version("triton"), "kernels for the GPU"
    if installed is None:
        note += " (pip install 'effasr[gpu]')"
    return Row("system", "triton", installed or "missing", note)


def _cpu_kernels() -> Row:
    """Whether the kernels of csrc/ are there, and else why not and how to build them."""
    reason = native.unsupported_reason()
    note = "attention and lattices of losses on CPUs, csrc/"
    if reason is not None:
        note += f"; {reason} ({native.HOW_TO_BUILD})"
    return Row("system", "CPU kernels", "not built" if reason else "built", note)


def _packages() -> list[Row]:
    rows = []
    for name, purpose in _PACKAGES.items():
        absent = "missing" if name in _REQUIRED else "not installed"
        rows.append(Row("packages", name, installed_version(name) or absent, purpose))
    reason = apex_unsupported_reason(torch.device("cuda"))
    note = "fused optimizers" if reason is None else f"not used: {reason}"
    rows.append(Row("packages", "apex", installed_version("apex") or "not installed", note))
    return rows


def _operation(op: TorchOp, example: Example, device: torch.device) -> Row:
    """The chosen backend of a call on the device, other usable and unusable ones."""
    dtype = narrow_dtype("auto", device) or torch.float32
    inputs = ExampleInputs(device, dtype)
    label = f"{example.label} on {device.type}"
    notes = [f"{b.value}: not implemented" for b in _EXPECTED if b not in op.backends]
    serving = ""
    for backend in op.backends:
        if serving and backend is Backend.REFERENCE:
            continue
        reason = _unsupported_reason(op, example, inputs, backend)
        if reason is None and backend is Backend.REFERENCE and device.type == "cuda":
            reason = "slow on a GPU, so only on request"
        if reason is not None:
            notes.append(f"{backend.value}: {reason}")
        elif serving:
            notes.append(f"{backend.value}: on request")
        else:
            serving = backend.value
    return Row("operations", label, serving or "none", "; ".join(notes))


@torch.no_grad()
def _unsupported_reason(
    op: TorchOp, example: Example, inputs: ExampleInputs, backend: Backend
) -> str | None:
    """Why this backend cannot serve the call, or None if it did."""
    try:
        getattr(effasr_kernels, op.name)(**example.arguments(inputs), backend=backend)
    except BackendUnavailable as error:
        before, after = f"{op.name}: no backend can run this call ({backend}: ", ")."
        return str(error).removeprefix(before).removesuffix(after)
    except Exception as error:
        # The report must show a backend that breaks on this machine instead of failing itself.
        return f"fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def recipe_rows(recipe: str | None, overrides: Sequence[str]) -> list[Row]:
    """The rows of a recipe; none without one."""
    if recipe is None:
        if overrides:
            raise ValueError(
                f"`overrides` must come with --recipe, whose fields they change, but are "
                f"{' '.join(overrides)}: add --recipe RECIPE."
            )
        return []
    config = _with_architecture(configuration.load(TrainConfig, recipe, overrides))
    device = choose_device(config.training.device)
    dtype = narrow_dtype(config.training.precision, device) or torch.float32
    precision = str(dtype).removeprefix("torch.")
    section = f"recipe {recipe} on {device.type}"
    values = {"training.compile": "yes" if config.training.compile else "no"}
    if config.model.language_model is not None:
        values |= {
            "training.strategy": config.training.strategy,
            "data.frame_budget": str(config.data.frame_budget),
        }
    # Several ranks, as fsdp2 differs from the other strategies only there.
    reason = reason_for_autocast(config, device, 2)
    requested = config.training.bfloat16_weights
    if requested == "auto":
        value, note = ("yes", "") if reason is None else ("no", reason)
    else:
        value, note = ("yes" if requested else "no"), "as the recipe says"
    rows = [
        Row(section, "training.precision", precision, "of matrix products"),
        _graph(config, section, device),
        Row(section, "training.bfloat16_weights", value, note),
    ]
    rows += [Row(section, name, value, "") for name, value in values.items()]
    if config.model.language_model is not None:
        rows += _rows_of_language_model(config, section)
    else:
        with torch.device("meta"):
            model = ASRModel(config.model, _VOCABULARY)
        rows += [Row(section, *row) for row in explained_backends(model, config, device)]
    return rows


def _with_architecture(config: TrainConfig) -> TrainConfig:
    """The configuration with the architecture of its language model, if it is here."""
    settings = config.model.language_model
    if settings is None or settings.architecture is not None:
        return config
    # Imported here, because transformers takes seconds.
    from effasr.model.language_model.architecture import CONFIG_FILE, read_architecture

    if not (Path(settings.path) / CONFIG_FILE).is_file():
        return config
    settings = replace(settings, architecture=read_architecture(settings.path))
    return replace(config, model=replace(config.model, language_model=settings))


def _rows_of_language_model(config: TrainConfig, section: str) -> list[Row]:
    budget, settings = config.data.token_budget, config.model.language_model
    note = "rows of the language model" + (
        ", as the data fill along with the frames" if budget is None else ""
    )
    value = "by the data" if budget is None else f"{budget}"
    rows = [Row(section, "data.token_budget", value, note)]
    if settings is not None and settings.architecture is not None:
        from effasr.model.language_model.model import fused_modules

        # On a CPU the modules keep their own forwards.
        fused, where = fused_modules(settings.architecture), "on a GPU: one kernel each"
        rows.append(Row(section, "fused modules", fused, where))
    return rows


def _graph(config: TrainConfig, section: str, device: torch.device) -> Row:
    reasons_against = obstacles(config, device)
    reasons = "; ".join(f"{x.setting}: {x.reason}" for x in reasons_against)
    settings = config.model.language_model
    if settings is not None and settings.architecture is None and not reasons_against:
        reasons = f"if the modules of {settings.path} read nothing from the GPU; it is not here"
    requested = config.training.cuda_graph
    value = "yes" if uses_graph(config, device) else "no"
    if requested is True and reasons_against:
        value = "refused"
    elif requested is False and not reasons_against:
        reasons = "possible, but turned off"
    return Row(section, "training.cuda_graph", value, reasons)
