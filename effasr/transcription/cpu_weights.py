"""Weights in the layouts of faster inference on a CPU: oneDNN's blocks, and panels of a decoder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder, DecoderLayer
from effasr.nn.cache.decoder_state import DecoderState
from effasr.nn.feed_forward import FeedForward
from effasr.nn.linear import JoinedLinear, Linear, whole_bias
from effasr.nn.lora import LoRALinear
from effasr.nn.subsampling import ConvSubsampling
from effasr_kernels.runtime import native
from effasr_kernels.shared.cpu import decoder as cpu_decoder
from effasr_kernels.shared.cpu.decoder import Cache, DecoderWeights, Norm, PanelMatrix

# Least weights of layers in decoder steps, with few rows: oneDNN's calls cost more than MKL's.
_FEWEST_WEIGHTS = 2**15


class OneDNNWeights:
    """Faster linear layers of a float32 model on a CPU, while `active`.

    oneDNN uses the vector instructions of a processor also where MKL, which serves
    `torch.nn.functional.linear`, does not (AVX-512 of AMD: 2.4 times as fast), and fuses the
    activation of a feed-forward network. The result of a row does not depend on the number of rows.
    It differs from MKL's by rounding.

    Layers over all frames and the large layers of the decoder are reordered, which doubles their
    memory. Nothing is reordered on a GPU, in another dtype, or where torch is built without oneDNN.
    With ``dtype`` bfloat16 these layers round their weights and inputs to it, and sum in float32.

    torch's own packing for frozen models (`torch._inductor`) has no public name, and the public
    `torch.utils.mkldnn` copies every input and result: at most 1.6 times as fast as MKL.
    """

    def __init__(self, model: ASRModel, dtype: torch.dtype = torch.float32) -> None:
        self._model, self._versions_of_blocks = model, _versions(model)
        self._methods: list[tuple[nn.Module, str, Callable[..., Tensor]]] = []
        decoder = model.decoder
        if decoder is not None and has_panel_kernels(decoder):
            panels = PanelDecoder(decoder)
            self._methods.append((decoder, "step", panels.step))
            self._methods.append((decoder, "likeliest", panels.likeliest))
        if not torch.backends.mkldnn.is_available():
            return
        blocked = {
            module: _blocked(module.weight, whole_bias(module), dtype)
            for module, fewest in _linears(model)
            if _can_be_blocked(module.weight) and module.weight.numel() >= fewest
        }
        for module, linear in blocked.items():
            self._methods.append((module, "forward", linear))
        for module in model.modules():
            if isinstance(module, FeedForward) and module.linear1 in blocked:
                first = partial(blocked[module.linear1], activation=_ACTIVATIONS[module.activation])
                self._methods.append((module, "forward", _joined(first, module.linear2)))
            elif isinstance(module, ConvSubsampling) and _can_be_blocked(module.linear.weight):
                linear = _blocked(module.project_weight(), module.linear.bias, dtype)
                self._methods.append((module, "project", linear))

    @property
    def is_current(self) -> bool:
        """Whether the parameters are those that were reordered, by address and version."""
        return _versions(self._model) == self._versions_of_blocks

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the reordered weights, in evaluation mode, without gradients or autocast."""
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


def rounds_to_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _blocked(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Callable[..., Tensor]:
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype))
    return partial(_linear, blocks, None if bias is None else bias.detach().to(dtype))


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor, activation: str = "none") -> Tensor:
    # oneDNN has two GELUs: the exact one ("none") and "tanh".
    kind = "none" if activation == "gelu" else ""
    narrow = x.to(weight.dtype)
    return torch.ops.mkldnn._linear_pointwise(narrow, weight, bias, activation, [], kind).to(
        x.dtype
    )


def _joined(first: Callable[[Tensor], Tensor], second: nn.Module) -> Callable[..., Tensor]:
    # `FeedForward.forward`, without its dropout: this is evaluation mode.
    def forward(x: Tensor, residual: object = None, *, offset: int = 0) -> Tensor:
        return second(first(x))

    return forward


def _linears(model: ASRModel) -> Iterator[tuple[nn.Linear, int]]:
    """Linear layers, and the least number of weights for which reordering pays."""
    of_speech = (model.encoder, 0), (model.ctc_head, 0)
    for part, fewest in (*of_speech, (model.decoder, _FEWEST_WEIGHTS)):
        for name, module in () if part is None else part.named_modules():
            if isinstance(module, nn.Linear) and getattr(module, "lora_a", None) is None:
                yield module, 0 if name.endswith("kv_proj") and "encoder_attn" in name else fewest


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in model.parameters() if _is_plain(p)]


def _is_plain(weight: Tensor) -> bool:
    # A sharded parameter has another type; an inference tensor has no version.
    return type(weight) in (Tensor, nn.Parameter) and not weight.is_inference()


def _can_be_blocked(weight: Tensor) -> bool:
    plain = _is_plain(weight)
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


class PanelDecoder:
    """Copies of a decoder's weights, and its `step` and `likeliest` by the kernels for CPUs.

    What a row gets depends on neither the other rows nor their number. It differs from the result
    of `Decoder.step` by rounding. Steps whose attention is watched, and those of other dtypes and
    of paged caches, are the decoder's own.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        config = decoder.config
        assert config.activation != "swiglu"  # checked by `has_panel_kernels`
        table = decoder.position_table().float()
        norm = decoder.embedding_layernorm
        self._output = PanelMatrix.from_weight(decoder.output_weight, decoder.output_bias)
        self._weights = DecoderWeights(
            layers=[_panel_layer(layer) for layer in decoder.decoder_layers()],
            tokens=decoder.embed_tokens.weight.detach().contiguous(),
            positions=table.contiguous(),
            embedding_norm=None if norm is None else _norm(norm),
            norm=_norm(decoder.norm),
            heads=config.heads,
            head_width=config.head_width,
            activation=config.activation,
        )

    @torch.no_grad()
    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        sizes = state.sizes
        is_float32 = sizes.dtype == torch.float32 and sizes.device.type == "cpu"
        if not is_float32 or state.paged or state.watched is not None:
            return Decoder.step(self._decoder, tokens, state)
        self_cache, cross_cache = state.reserve()
        hidden = self._weights.step(
            tokens.contiguous(),
            state.positions,
            state.going,
            state.frames_each,
            self_cache=Cache(self_cache.held),
            cross_cache=Cache(cross_cache.held),
            hypotheses=state.hypotheses,
            most_position=state.last_position,
        )
        state.length += 1
        return hidden

    @torch.no_grad()
    def likeliest(
        self, hidden: Tensor, classes: int | None = None, bias: Tensor | None = None
    ) -> Tensor:
        if hidden.dtype != torch.float32:
            return Decoder.likeliest(self._decoder, hidden, classes, bias)
        output = self._output if bias is None else replace(self._output, bias=bias)
        return cpu_decoder.largest_logit(hidden, output, classes)


def has_panel_kernels(decoder: Decoder) -> bool:
    """Return whether the kernels exist and all weights are plain float32 ones on a CPU."""
    config = decoder.config
    is_other = config.positions == "rotary" or config.activation == "swiglu"
    if native.unsupported_reason() is not None or config.experts is not None or is_other:
        return False
    is_plain = all(
        type(p) in (Tensor, nn.Parameter) and p.device.type == "cpu" and p.dtype == torch.float32
        for p in decoder.parameters()
    )
    return is_plain and all(
        type(module) in (nn.Linear, Linear, JoinedLinear)
        or (isinstance(module, LoRALinear) and module.lora_a is None)  # merged
        for module in decoder.modules()
        if isinstance(module, nn.Linear)
    )


def _panel_layer(layer: DecoderLayer) -> cpu_decoder.Layer:
    attention, cross, network = layer.self_attn, layer.encoder_attn, layer.mlp
    assert isinstance(network, FeedForward)  # checked by `has_panel_kernels`
    return cpu_decoder.Layer(
        self_norm=_norm(layer.input_layernorm),
        cross_norm=_norm(layer.post_attention_layernorm),
        forward_norm=_norm(layer.final_layernorm),
        qkv=_panels(attention.qkv_proj),
        self_out=_panels(attention.o_proj),
        q=_panels(cross.q_proj),
        cross_out=_panels(cross.o_proj),
        first=_panels(network.linear1),
        second=_panels(network.linear2),
    )


def _panels(module: nn.Linear) -> PanelMatrix:
    return PanelMatrix.from_weight(module.weight, whole_bias(module))


def _norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight.detach(), norm.bias.detach(), norm.eps)
