"""Weights of linear layers in oneDNN's blocked layout, for faster inference on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from effasr.model.asr import ASRModel
from effasr.nn.feed_forward import FeedForward
from effasr.nn.linear import whole_bias
from effasr.nn.subsampling import ConvSubsampling
from effasr.transcription.packed_decoder import PackedDecoder, can_pack

# Least weights of layers in decoder steps, with few rows: oneDNN's calls cost more than MKL's.
_FEWEST_WEIGHTS = 2**15


class PackedWeights:
    """Faster linear layers of a float32 model on a CPU, while `active`.

    oneDNN uses the vector instructions of a processor also where MKL, which serves
    `torch.nn.functional.linear`, does not (AVX-512 of AMD: 2.4 times as fast), and fuses the
    activation of a feed-forward network. The result of a row does not depend on the number of rows.
    It differs from MKL's by rounding.

    Layers over all frames and the large layers of the decoder are packed, which doubles their
    memory. Nothing is packed on a GPU, in another dtype, or where torch is built without oneDNN.

    torch's own packing for frozen models (`torch._inductor`) has no public name, and the public
    `torch.utils.mkldnn` copies every input and result: at most 1.6 times as fast as MKL.
    """

    def __init__(self, model: ASRModel) -> None:
        self._model, self._packed_of = model, _versions(model)
        self._methods: list[tuple[nn.Module, str, Callable[..., Tensor]]] = []
        decoder = model.decoder
        if decoder is not None and can_pack(decoder):
            packed_decoder = PackedDecoder(decoder)
            self._methods.append((decoder, "step", packed_decoder.step))
            self._methods.append((decoder, "likeliest", packed_decoder.likeliest))
        if not torch.backends.mkldnn.is_available():
            return
        packed = {
            module: _packed(module.weight, whole_bias(module))
            for module, fewest in _linears(model)
            if _can_be_packed(module.weight) and module.weight.numel() >= fewest
        }
        for module, linear in packed.items():
            self._methods.append((module, "forward", linear))
        for module in model.modules():
            if isinstance(module, FeedForward) and module.linear1 in packed:
                first = partial(packed[module.linear1], activation=_ACTIVATIONS[module.activation])
                self._methods.append((module, "forward", _joined(first, module.linear2)))
            elif isinstance(module, ConvSubsampling) and _can_be_packed(module.linear.weight):
                linear = _packed(module.project_weight(), module.linear.bias)
                self._methods.append((module, "project", linear))

    @property
    def is_current(self) -> bool:
        """Whether the parameters are those that were packed, by address and version."""
        return _versions(self._model) == self._packed_of

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the packed weights; without gradients, in evaluation mode.

        Not under autocast, which asks for another dtype.
        """
        if torch.is_autocast_enabled("cpu"):
            yield
            return
        try:
            for module, name, method in self._methods:
                setattr(module, name, method)
            yield
        finally:
            for module, name, _ in self._methods:
                # Removing the attribute restores the method of the class.
                module.__dict__.pop(name, None)


_ACTIVATIONS = {"silu": "swish", "relu": "relu", "gelu": "gelu"}


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    return partial(_linear, torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias)


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor, activation: str = "none") -> Tensor:
    # oneDNN has two GELUs: the exact one ("none") and "tanh".
    kind = "none" if activation == "gelu" else ""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], kind)


def _joined(first: Callable[[Tensor], Tensor], second: nn.Module) -> Callable[..., Tensor]:
    # `FeedForward.forward`, without its dropout: this is evaluation mode.
    def forward(x: Tensor, residual: object = None, *, offset: int = 0) -> Tensor:
        return second(first(x))

    return forward


def _linears(model: ASRModel) -> Iterator[tuple[nn.Linear, int]]:
    """Linear layers, and the least number of weights for which packing pays."""
    of_speech = (model.encoder, 0), (model.ctc_head, 0)
    for part, fewest in (*of_speech, (model.decoder, _FEWEST_WEIGHTS)):
        for name, module in () if part is None else part.named_modules():
            if isinstance(module, nn.Linear):
                yield module, 0 if name.endswith("kv_proj") and "encoder_attn" in name else fewest


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in model.parameters() if _is_plain(p)]


def _is_plain(weight: Tensor) -> bool:
    # A sharded parameter has another type; an inference tensor has no version.
    return type(weight) in (Tensor, nn.Parameter) and not weight.is_inference()


def _can_be_packed(weight: Tensor) -> bool:
    plain = _is_plain(weight)
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32
