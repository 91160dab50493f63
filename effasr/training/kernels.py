"""The backends of a run's operations: as its configuration says, or as measured on this GPU."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import effasr
import effasr_kernels
from effasr.model.asr import ASRModel
from effasr.nn.attention import (
    CrossAttention,
    RelativeSelfAttention,
    SelfAttention,
    refusal,
    try_backend,
)
from effasr.training.config import TrainConfig
from effasr.training.strategies.parallelism import narrow_dtype
from effasr_kernels import OPERATIONS, Backend, BackendUnavailable
from effasr_kernels.attention.order import ORDER
from effasr_kernels.runtime.example import ExampleInputs

RESULTS = Path(effasr.__file__).parents[1] / "profiling" / "results" / "ops.csv"
"""Rows of ``profiling/bench.py ops``, in a checkout."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A module's attribute that holds the backend of an operation, and a small call of it."""

    field: str  # of `effasr.training.config.KernelsConfig`
    place: str  # name of the module, for messages
    module: nn.Module
    attribute: str
    call: Callable[[str], Any]  # raises `BackendUnavailable`
    kind: str | None = None  # of the rows of ``profiling/bench.py ops``; None without any
    head_width: int = 0


def select_backends(model: ASRModel, config: TrainConfig, device: torch.device) -> None:
    """Give each module the backend of its operations; refuse what does not serve it.

    The model may be on the meta device: calls are made on ``device``.
    """
    kernels = config.kernels
    dtype = narrow_dtype(config.training.precision, device) or torch.float32
    rows = _rows(device, dtype)
    served: dict[tuple[Any, ...], str | None] = {}
    for use in _uses(model, device, dtype):
        requested = getattr(kernels, use.field) or kernels.attention
        # Layers are alike: one call for all of a part of the model.
        part, form = use.place.partition(".")[0], ("heads", "head_dim", "dropout")
        key = use.field, part, use.kind, *(getattr(use.module, name, None) for name in form)
        if key not in served:
            served[key] = _backend_of(use, requested, rows)
        setattr(use.module, use.attribute, served[key])


def explained_backends(
    model: ASRModel, config: TrainConfig, device: torch.device
) -> Iterator[tuple[str, str, str]]:
    """What `select_backends` gives each part of a model: field and part, backend, and why."""
    dtype = narrow_dtype(config.training.precision, device) or torch.float32
    rows, seen = _rows(device, dtype), set()
    for use in _uses(model, device, dtype):
        label = f"kernels.{use.field} ({use.place.partition('.')[0]})"
        if label in seen:
            continue
        seen.add(label)
        requested = getattr(config.kernels, use.field) or config.kernels.attention
        try:
            backend = _backend_of(use, requested, rows)
        except ValueError as error:
            yield label, "refused", str(error)
            continue
        if requested != "auto":
            yield label, requested, "as the recipe says"
        elif backend is not None:
            yield label, backend, f"the fastest on this GPU by {RESULTS.name}"
        else:
            yield label, *_first_of(use, device)


def _first_of(use: _Use, device: torch.device) -> tuple[str, str]:
    """The backend that serves a use without a request, and what keeps those before it."""
    is_attention = use.field.endswith("attention") and use.field != "guided_attention"
    order = ORDER if is_attention else OPERATIONS[use.field].backends
    reasons = []
    for backend in order:
        if backend is Backend.REFERENCE and device.type == "cuda":
            break
        try:
            use.call(backend.value)
        except BackendUnavailable as error:
            reasons.append(f"{backend.value}: {refusal(error, backend.value)}")
        else:
            return backend.value, "; ".join(reasons) or "the first of those that serve"
    return "none", "; ".join(reasons)


def _backend_of(use: _Use, requested: str, rows: Sequence[Mapping[str, str]]) -> str | None:
    if requested == "auto":
        for backend in _fastest(rows, use):
            try:
                use.call(backend)
            except BackendUnavailable:
                continue
            return backend
        return None
    try:
        use.call(requested)
    except BackendUnavailable as error:
        reason = refusal(error, requested)
        parts = ", kernels.decoder_attention or kernels.cross_attention"
        others = parts if use.field == "attention" else ""
        raise ValueError(
            f"`kernels.{use.field}` must be a backend that serves {use.place}, but is {requested} "
            f"({reason}): set kernels.{use.field}=auto{others and f', and {others[2:]}'}."
        ) from None
    return requested


def _uses(model: ASRModel, device: torch.device, dtype: torch.dtype) -> Iterator[_Use]:
    contexts = getattr(model.encoder.config, "context", ())
    for place, module in model.named_modules():
        width = getattr(module, "head_dim", 0)
        if isinstance(module, SelfAttention):
            is_encoder, is_decoder = (place.startswith(x) for x in ("encoder.", "decoder."))
            context = contexts[0] if is_encoder and contexts else None
            call = partial(try_backend, module, context, device, dtype)
            kind = "causal" if module.causal else "rotary" if module.rotary is not None else ""
            kind = "relative" if isinstance(module, RelativeSelfAttention) else kind
            field = "decoder_attention" if is_decoder else "attention"
            yield _Use(field, place, module, "backend", call, kind, width)
        elif isinstance(module, CrossAttention):
            call = partial(try_backend, module, None, device, dtype)
            yield _Use("cross_attention", place, module, "backend", call, "cross", width)
            call = partial(_call_example, "guided_attention", device, dtype)
            yield _Use("guided_attention", place, module, "guided_backend", call)
    if model.ctc_head is not None:
        call = partial(_call_example, "ctc_loss", device, dtype)
        yield _Use("ctc_loss", "the CTC loss", model, "ctc_backend", call)
    if model.transducer is not None:
        call = partial(_call_example, "transducer_loss", device, dtype)
        yield _Use("transducer_loss", "transducer", model.transducer, "backend", call)


def _call_example(operation: str, device: torch.device, dtype: torch.dtype, backend: str) -> None:
    example = OPERATIONS[operation].examples[0]
    # Its inputs are drawn, which must not change the random numbers of the run.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        arguments = example.arguments(ExampleInputs(device, dtype))
        getattr(effasr_kernels, operation)(**arguments, backend=backend)


def _rows(device: torch.device, dtype: torch.dtype) -> list[dict[str, str]]:
    """The rows of trained attention on this GPU."""
    if device.type != "cuda" or not RESULTS.is_file():
        return []
    wanted = {"device": torch.cuda.get_device_name(device), "op": "attention"}
    wanted |= {"mode": "forward+backward", "dtype": str(dtype).removeprefix("torch.")}
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if wanted.items() <= row.items()]


def _fastest(rows: Sequence[Mapping[str, str]], use: _Use) -> list[str]:
    """Backends of attention that were measured for all sizes of this kind, the fastest first."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        is_alike = row["kind"] == use.kind and f"D={use.head_width}" in row["shape"].split()
        if is_alike and row["backend"] in OPERATIONS["attention"].backends and row["p50_ms"]:
            times.setdefault(row["backend"], {})[row["shape"]] = float(row["p50_ms"])
    shapes = {shape for measured in times.values() for shape in measured}
    whole = {name: sum(x.values()) for name, x in times.items() if x.keys() == shapes}
    return sorted(whole, key=lambda name: whole[name])
