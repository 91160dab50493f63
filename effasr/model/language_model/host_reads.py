"""Finds out whether the modules of a language model wait for the device in their forward."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from effasr.model.language_model.architecture import build_causal_model
from effasr.model.language_model.packed_attention import CONTEXT, PackedContext
from effasr_kernels import PackedLayout

_LENGTHS = (5, 3)
_WAITS = (DataDependentOutputException, DynamicOutputShapeException)


@cache
def host_read(architecture: str) -> str | None:
    """Return where a forward over packed rows asks the device for a value; None if it does not.

    Dynamic rotary positions, for example, are chosen by the longest position that occurs: the host
    waits for the device there, and a CUDA graph cannot record it. The forward runs on tensors
    without values, so it takes no memory, and whatever reads a value fails. A forward that fails
    for another reason, as some mixtures of experts do, counts as one that reads.
    """
    with FakeTensorMode(), torch.no_grad(), _without_log():
        causal = build_causal_model(architecture).train()
        model = getattr(causal, causal.base_model_prefix)
        layout = PackedLayout.from_lengths(_LENGTHS)
        width = causal.get_input_embeddings().weight.shape[1]
        try:
            model(
                inputs_embeds=torch.empty(1, sum(_LENGTHS), width),
                position_ids=torch.zeros(1, sum(_LENGTHS), dtype=torch.int64),
                use_cache=False,
                **{CONTEXT: PackedContext(layout)},
            )
        except _WAITS as error:
            return _place(error)
        except Exception as error:  # Modules of any family fail in any way without values.
            problem = " ".join(str(error).split())[:120]
            return f"{_place(error)}: {problem}"
    return None


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep torch from logging a stack for each operator that fails on tensors without values."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _place(error: Exception) -> str:
    """Return the innermost line of transformers, and the operator that has no value."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "transformers" in x.filename]
    where = f"{Path(frames[-1].filename).name} line {frames[-1].lineno}, " if frames else ""
    operator = getattr(error, "func", None)
    return f"{where}{operator if operator is not None else type(error).__name__}"
