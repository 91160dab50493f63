"""One small call of every operation, as the models make it, to see which backend serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels import (
    Backend,
    PackedLayout,
    RelativeBias,
    Rotary,
    append_to_pages,
    attention,
    ctc_loss,
    decode_attention,
    depthwise_conv,
    guided_attention,
    linear_cross_entropy,
    projected_top_k,
    strided_depthwise,
    subsampling_stem,
    transducer_loss,
)

_FRAMES, _TOKENS = (24, 16), (5, 3)
_HEADS, _WIDTH, _CHANNELS, _VOCABULARY, _MELS = 2, 64, 128, 256, 80


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where and in what precision a probe computes, with what the probes share."""

    device: torch.device
    dtype: torch.dtype
    backend: Backend

    @property
    def frames(self) -> PackedLayout:
        """Two utterances."""
        return PackedLayout.from_lengths(_FRAMES, self.device)

    @property
    def tokens(self) -> PackedLayout:
        """Their transcripts."""
        return PackedLayout.from_lengths(_TOKENS, self.device)

    def ones(self, *shape: int) -> Tensor:
        """A tensor; the values do not matter."""
        return torch.ones(shape, device=self.device, dtype=self.dtype)

    def heads(self, rows: int) -> Tensor:
        """Queries, keys or values."""
        return self.ones(rows, _HEADS, _WIDTH)

    def targets(self) -> Tensor:
        """The tokens of the transcripts."""
        return torch.ones(sum(_TOKENS), device=self.device, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Probe:
    """A call of an operation.

    Attributes:
        operation: Its name in ``effasr_kernels.OPERATIONS``.
        label: Names this way to call it.
        call: Makes the call.
    """

    operation: str
    label: str
    call: Callable[[Inputs], object]


def _self_attention(inputs: Inputs, *, causal: bool, position: Rotary | None) -> object:
    q = inputs.heads(sum(_FRAMES))
    return attention(
        q, q, q, inputs.frames, causal=causal, position=position, backend=inputs.backend
    )


def _relative_attention(inputs: Inputs) -> object:
    q, bias = inputs.heads(sum(_FRAMES)), inputs.ones(_HEADS, _WIDTH)
    position = RelativeBias(bias, bias, inputs.heads(2 * max(_FRAMES) - 1))
    return attention(q, q, q, inputs.frames, position=position, backend=inputs.backend)


def _guided_attention(inputs: Inputs) -> object:
    q, k = inputs.heads(sum(_TOKENS)), inputs.heads(sum(_FRAMES))
    return guided_attention(
        q, k, k, inputs.tokens, inputs.frames, sigma=0.2, backend=inputs.backend
    )


def _linear_cross_entropy(inputs: Inputs) -> object:
    hidden = inputs.ones(sum(_TOKENS), _CHANNELS)
    weight = inputs.ones(_VOCABULARY, _CHANNELS)
    return linear_cross_entropy(
        hidden, weight, inputs.targets(), label_smoothing=0.1, backend=inputs.backend
    )


def _ctc_loss(inputs: Inputs) -> object:
    return ctc_loss(
        inputs.ones(sum(_FRAMES), _CHANNELS),
        inputs.ones(_VOCABULARY, _CHANNELS),
        inputs.targets(),
        inputs.frames,
        inputs.tokens,
        blank_id=_VOCABULARY - 1,
        backend=inputs.backend,
    )


def _transducer_loss(inputs: Inputs) -> object:
    return transducer_loss(
        inputs.ones(sum(_FRAMES), _CHANNELS),
        inputs.ones(sum(_TOKENS) + len(_TOKENS), _CHANNELS),
        inputs.targets(),
        inputs.frames,
        inputs.tokens,
        inputs.ones(_VOCABULARY, _CHANNELS),
        inputs.ones(_VOCABULARY),
        blank_id=_VOCABULARY - 1,
        backend=inputs.backend,
    )


def _depthwise_conv(inputs: Inputs) -> object:
    x, weight = inputs.ones(sum(_FRAMES), _CHANNELS), inputs.ones(_CHANNELS, 9)
    return depthwise_conv(x, weight, inputs.frames, backend=inputs.backend)


def _lengths(inputs: Inputs, factor: int) -> Tensor:
    return torch.tensor(_FRAMES, device=inputs.device) * factor


def _subsampling_stem(inputs: Inputs) -> object:
    taps, bias = inputs.ones(_CHANNELS, 9), inputs.ones(_CHANNELS)
    x = inputs.ones(8 * sum(_FRAMES), _MELS)
    return subsampling_stem(
        x, taps, bias, taps, bias, inputs.frames, _lengths(inputs, 8), backend=inputs.backend
    )


def _strided_depthwise(inputs: Inputs) -> object:
    taps, bias = inputs.ones(_CHANNELS, 9), inputs.ones(_CHANNELS)
    x = inputs.ones(2 * sum(_FRAMES), _MELS // 4, _CHANNELS)
    return strided_depthwise(
        x, taps, bias, inputs.frames, _lengths(inputs, 2), backend=inputs.backend
    )


def _integers(inputs: Inputs, *rows: int | list[int]) -> Tensor:
    return torch.tensor(rows, device=inputs.device, dtype=torch.int32)


def _decode_attention(inputs: Inputs, *, hypotheses: int, new: bool) -> object:
    q, pages = inputs.heads(2 * hypotheses), inputs.ones(4, 16, _HEADS, _WIDTH)
    return decode_attention(
        *(q, pages, pages.clone(), _integers(inputs, [0, 1], [2, 3]), _integers(inputs, *_FRAMES)),
        new_k=q if new else None,
        new_v=q if new else None,
        splits=2,
        backend=inputs.backend,
    )


def _append_to_pages(inputs: Inputs) -> object:
    k, pages = inputs.heads(2), inputs.ones(4, 16, _HEADS, _WIDTH)
    table, positions = _integers(inputs, [0, 1], [2, 3]), _integers(inputs, *_TOKENS)
    return append_to_pages(k, k, pages, pages.clone(), table, positions, backend=inputs.backend)


def _projected_top_k(inputs: Inputs) -> object:
    hidden, weight = inputs.ones(2, _CHANNELS), inputs.ones(_VOCABULARY, _CHANNELS)
    return projected_top_k(hidden, weight, k=4, backend=inputs.backend)


PROBES = (
    Probe("attention", "attention, relative", _relative_attention),
    Probe(
        "attention",
        "attention, rotary",
        lambda inputs: _self_attention(inputs, causal=False, position=Rotary()),
    ),
    Probe(
        "attention",
        "attention, causal",
        lambda inputs: _self_attention(inputs, causal=True, position=None),
    ),
    Probe("guided_attention", "guided_attention", _guided_attention),
    Probe("linear_cross_entropy", "linear_cross_entropy", _linear_cross_entropy),
    Probe("ctc_loss", "ctc_loss", _ctc_loss),
    Probe("transducer_loss", "transducer_loss", _transducer_loss),
    Probe("depthwise_conv", "depthwise_conv", _depthwise_conv),
    Probe("subsampling_stem", "subsampling_stem", _subsampling_stem),
    Probe("strided_depthwise", "strided_depthwise", _strided_depthwise),
    Probe(
        "decode_attention",
        "decode_attention, self",
        lambda inputs: _decode_attention(inputs, hypotheses=1, new=True),
    ),
    Probe(
        "decode_attention",
        "decode_attention, cross",
        lambda inputs: _decode_attention(inputs, hypotheses=4, new=False),
    ),
    Probe("append_to_pages", "append_to_pages", _append_to_pages),
    Probe("projected_top_k", "projected_top_k", _projected_top_k),
)
