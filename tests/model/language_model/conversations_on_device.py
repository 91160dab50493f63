"""Forward and backward over conversations on fake tensors, for `tests/model/fake_gpu_worker.py`.

The layouts are those of a recorded micro-batch, whose lengths the host does not know.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from effasr.data.batch import StaticShape
from effasr.model.asr import ASRModel
from effasr_kernels import PackedLayout, PackedSequence
from effasr_kernels.packed import OffsetsOnDemand
from tests.support.speech_llm import (
    FAMILIES,
    conversations,
    make_conversation_batch,
    speech_llm_config,
)

SHAPE = StaticShape(40, 70, 6, longest_frames=20, longest_tokens=40)
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


def check_conversations(
    one_device: Callable[[], AbstractContextManager],
    device: str,
    model_on_device: Callable[..., ASRModel],
) -> int:
    """Check every family, and two precisions; return how many steps ran."""

    def step(kind: str, dtype: torch.dtype, **fields: Any) -> None:
        mode = FakeTensorMode()
        model = model_on_device(speech_llm_config(kind, **fields), mode, dtype)
        real = make_conversation_batch(conversations(), shape=SHAPE)
        with mode:
            batch = real._mapped(lambda x: moved(x, mode, device))
        with mode, one_device():
            losses = model(batch, label_smoothing=0.1)
            losses.cross_entropy.backward()
        assert losses.per_utterance.shape == (6,)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, (kind, name)

    for kind in FAMILIES:
        step(kind, torch.float32)
    for kind in ("llama", "gemma3_text"):
        step(kind, torch.bfloat16)
    try:
        step("llama", torch.float32, **DYNAMIC)
    except RuntimeError as error:
        if "_local_scalar_dense" not in repr(error):
            raise
    else:
        raise SystemExit("Dynamic rotary positions are read by the host, but nothing notices.")
    return len(FAMILIES) + 2


def moved(x: Any, mode: FakeTensorMode, device: str) -> Any:
    """Return a tensor, layout or packed sequence on the device, without lengths on the host."""
    if isinstance(x, Tensor):
        return mode.from_tensor(x).to(device)
    if isinstance(x, PackedSequence):
        return PackedSequence(moved(x.values, mode, device), moved(x.layout, mode, device))
    offsets = moved(x.cu_seqlens, mode, device)
    return PackedLayout(offsets, OffsetsOnDemand(offsets), x.rows, x.static_max_seqlen)
